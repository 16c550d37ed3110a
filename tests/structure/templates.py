"""Short chat templates in each family's manner, with places for tools."""

QWEN = """{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '<tools>' }}{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\n<tool_call>\\n{"name": <name>, "arguments": <json>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}{%- if message.role == 'user' %}
{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}
{%- elif opens is defined and opens %}{{- '<think>\\n' }}{%- endif %}{%- endif %}"""

LLAMA3 = """{{- bos_token }}{%- if tools %}{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{{- 'Answer as {"name": function name, "parameters": dictionary}.\\n' }}
{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{{- '<|eot_id|>' }}{%- endif %}
{%- for message in messages %}{%- if message.tool_calls %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + message.tool_calls[0].function.name }}
{{- '", "parameters": ' + (message.tool_calls[0].function.arguments | tojson) + '}<|eot_id|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}
{%- else %}{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content }}
{{- '<|eot_id|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

MISTRAL = """{{- bos_token }}{%- if tools %}
{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
{%- endif %}{%- for message in messages %}{%- if message.role == 'user' %}
{{- '[INST]' + message.content + '[/INST]' }}{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS]{"content": ' + (message.content | tojson) + ', "call_id": "' + message.tool_call_id }}
{{- '"}[/TOOL_RESULTS]' }}{%- elif message.tool_calls %}{{- '[TOOL_CALLS][' }}
{%- for call in message.tool_calls %}{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
{%- endfor %}{{- ']' + eos_token }}{%- else %}{{- message.content + eos_token }}{%- endif %}{%- endfor %}"""

MISTRAL_ARGS = MISTRAL.replace("{{- '[TOOL_CALLS][' }}", "").replace(
    "{{- (call.function | tojson)[:-1] + ', \"id\": \"' + call.id + '\"}' }}",
    "{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}").replace(
    "{{- ']' + eos_token }}", "{{- eos_token }}")

GEMMA = """{{- bos_token }}{%- for tool in tools or [] %}
{{- '<start_function_declaration>declaration:' + tool.function.name + '{description:<escape>' }}
{{- tool.function.description + '<escape>}<end_function_declaration>' }}{%- endfor %}
{%- for message in messages %}{%- if message.role == 'tool' %}
{{- '<start_function_response>response:f{value:<escape>' + message.content }}
{{- '<escape>}<end_function_response>' }}{%- else %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
{{- message.content }}
{%- for call in message.tool_calls or [] %}{{- '<start_function_call>call:' + call.function.name + '{' }}
{%- for key, value in call.function.arguments | dictsort %}
{{- key + ':<escape>' + (value if value is string else value | tojson) + '<escape>' }}{%- endfor %}
{{- '}<end_function_call>' }}
{%- endfor %}{{- '<end_of_turn>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""

GLM = QWEN.replace("<json>", "<arg_key>k</arg_key>")

FAMILIES = {"hermes": ("chatml", QWEN), "llama3": ("llama3", LLAMA3), "mistral": ("mistral", MISTRAL),
            "mistral args": ("mistral", MISTRAL_ARGS), "gemma": ("gemma", GEMMA)}
"""By format: the family of ``tests.text.families`` whose tokenizer fits, and the template."""
