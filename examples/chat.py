"""A conversation with a model and a compressed KV cache: python examples/chat.py [MODEL] [KV]"""

import sys

import quantkit

name, kv = (*sys.argv[1:], *("smollm2", "int8")[len(sys.argv) - 1:])[:2]
model = quantkit.load(name, kv=kv)
conversation = model.chat("Answer in one sentence.", max_tokens=60)
for question in ("Why is the sky blue?", "And at sunset?"):
    print(f"> {question}")
    for piece in conversation.stream(question):
        print(piece, end="", flush=True)
    print()
cache = model.engine.cache
print(f"{cache.used_bytes / 1e6:.1f} MB of keys and values, {cache.bytes_per_token:,} bytes a token")
