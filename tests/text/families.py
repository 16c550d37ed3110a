"""Small tokenizers and chat templates of five families, and how their control tokens are flagged."""

import json
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from quantkit.text.tokenizer import Tokenizer as OurTokenizer

CHATML = """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
LLAMA3 = """{% set loop_messages = messages %}{% for message in loop_messages %}
{%- set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'
 + message['content'] | trim + '<|eot_id|>' %}
{%- if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}
{%- endfor %}{% if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
MISTRAL = """{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}
{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}
{{- bos_token }}{%- for message in loop_messages %}{%- if message['role'] == 'user' %}
{%- if loop.last and system_message is defined %}
{{- '[INST] ' + system_message + '\n\n' + message['content'] + '[/INST]' }}
{%- else %}{{- '[INST] ' + message['content'] + '[/INST]' }}{%- endif %}
{%- else %}{{- ' ' + message['content'] + eos_token }}{%- endif %}{%- endfor %}"""
GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{- raise_exception('System role not supported') }}{%- endif %}{% for message in messages %}
{%- if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}
{%- set role = message['role'] %}{% endif %}
{{- '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"""
PHI3 = """{% for message in messages %}{% if message['role'] == 'system' %}
{{- '<|system|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'user' %}
{{- '<|user|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'assistant' %}
{{- '<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""


def _all(tokens, **options):
    return {token: dict(options) for token in tokens}


@dataclass(frozen=True)
class Family:
    """``controls``: token → options of its ``AddedToken``; ``words``: other added tokens."""

    template: str
    controls: dict
    words: tuple
    bytes_level: bool
    settings: dict


FAMILIES = {
    "chatml": Family(CHATML, _all(("<|endoftext|>", "<|im_start|>", "<|im_end|>")),
                     ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>",
                      "</tool_response>"), True, {"eos_token": "<|im_end|>"}),
    "llama3": Family(LLAMA3, _all(("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>",
                                            "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>")),
                     (), True, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}),
    "mistral": Family(MISTRAL, _all(("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]")),
                      (), False, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
    "gemma": Family(GEMMA, {"<pad>": {}, "<eos>": {}, "<bos>": {}, "<unk>": {}, "<mask>": {},
                            "<start_of_turn>": {"special": False, "normalized": False},
                            "<end_of_turn>": {"special": False, "normalized": False}},
                    ("\n\n", "▁▁", "<h1>"), False, {"bos_token": "<bos>", "eos_token": "<eos>"}),
    "phi3": Family(PHI3, {"<unk>": {}, "<s>": {}, "</s>": {"rstrip": True}, "<|endoftext|>": {},
                          **_all(("<|user|>", "<|assistant|>", "<|system|>", "<|end|>"), rstrip=True)},
                   (), False, {"bos_token": "<s>", "eos_token": "<|endoftext|>", "unk_token": "<unk>"}),
}


def files_of(name):
    """The side files of a family's small model."""
    family = FAMILIES[name]
    if family.bytes_level:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {letter: i for i, letter in enumerate([*letters, "Ġa", "im", "end"])}
        inner = Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "a"), ("i", "m")]))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
    else:
        words = [*family.controls, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "\n", "<"]
        inner = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[("▁", "a")],
                                     unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        first = [] if name == "gemma" else [normalizers.Prepend("▁")]
        inner.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
        inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(),
                                           decoders.Fuse()])
    inner.add_special_tokens([AddedToken(token, **{"special": True, **options})
                              for token, options in family.controls.items() if options.get("special", True)])
    inner.add_tokens([AddedToken(token, **options) for token, options in family.controls.items()
                      if not options.get("special", True)])
    inner.add_tokens([AddedToken(token, normalized=False) for token in family.words])
    settings = {"chat_template": family.template, **family.settings}
    return {"tokenizer.json": inner.to_str().encode(), "tokenizer_config.json": json.dumps(settings).encode()}


def tokenizer_of(name):
    """As quantkit reads it."""
    return OurTokenizer(files_of(name), {})
