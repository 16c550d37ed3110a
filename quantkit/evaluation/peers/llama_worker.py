"""The backend of :mod:`worker` for llama.cpp's shared library: it needs Python's standard library alone.

llama.cpp's C interface has no stable layout of its structures. Of the two structures of parameters only the
first four fields are touched, whose defaults tell whether they are where they are expected; both are passed
in a space that is larger than any version's. All else goes through functions.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIBRARIES = ("ggml-base", "ggml-cpu", "ggml", "llama")
"""In the order in which each needs those before; backends of GPUs are found by ggml itself."""
CHUNK = 512
"""Tokens that go through the model at once."""
DEFAULTS = (512, 2048, 512, 1)
"""Of ``llama_context_params``: n_ctx, n_batch, n_ubatch, n_seq_max."""


class LlamaParameters(ctypes.Structure):
    """Room for a structure of parameters of any version."""

    _fields_ = (("words", ctypes.c_uint32 * 256),)


class LlamaBatch(ctypes.Structure):
    _fields_ = (("n_tokens", ctypes.c_int32), ("token", ctypes.POINTER(ctypes.c_int32)),
                ("embd", ctypes.POINTER(ctypes.c_float)), ("pos", ctypes.POINTER(ctypes.c_int32)),
                ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
                ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
                ("logits", ctypes.POINTER(ctypes.c_int8)))


def load_library(folder: Path) -> Any:
    """``libllama`` of a folder, and the libraries that it needs.

    Raises:
        FileNotFoundError: it isn't there.
    """
    patterns = ("lib{}.so", "lib{}.dylib", "{}.dll", "lib{}.so.*")
    places = {name: [file for pattern in patterns for place in (folder, folder.parent / "lib")
                     for file in sorted(place.glob(pattern.format(name)))] for name in LIBRARIES}
    if not places["llama"]:
        raise FileNotFoundError(f"no libllama in {folder}, nor in {folder.parent / 'lib'}")
    opened: dict[str, Any] = {name: ctypes.CDLL(str(files[0]), mode=ctypes.RTLD_GLOBAL)
                              for name, files in places.items() if files}
    if "ggml" in opened and not opened["ggml"].ggml_backend_dev_count():  # each processor's code is a file
        opened["ggml"].ggml_backend_load_all_from_path(str(places["ggml"][0].parent).encode())
    return opened["llama"]


class LlamaModel:
    """A GGUF that llama.cpp opened.

    Args:
        options: ``file``, ``bin``, ``context``, ``threads``.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        begin = time.perf_counter()
        self._library = lib = load_library(Path(options["bin"]))
        declare(lib)
        lib.llama_backend_init()
        model_parameters, parameters = lib.llama_model_default_params(), lib.llama_context_default_params()
        if tuple(parameters.words[:4]) != DEFAULTS:
            raise RuntimeError(f"this libllama begins its context's parameters with "
                               f"{list(parameters.words[:4])}, not {list(DEFAULTS)}: another layout")
        self._model = lib.llama_model_load_from_file(options["file"].encode(), model_parameters)
        if not self._model:
            raise RuntimeError(f"llama.cpp can't open {options['file']}")
        size = max(options["context"], CHUNK)  # in a smaller one a batch would be smaller, too
        parameters.words[0] = size
        parameters.words[1] = CHUNK
        parameters.words[2] = CHUNK
        self._context = lib.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise RuntimeError(f"llama.cpp can't make a context of {size} tokens")
        if lib.llama_n_ctx(self._context) < size or lib.llama_n_batch(self._context) != CHUNK:
            raise RuntimeError("this libllama doesn't follow the parameters of its context: another layout")
        lib.llama_set_n_threads(self._context, options["threads"], options["threads"])
        self._vocab = lib.llama_model_get_vocab(self._model)
        self._size = int(lib.llama_vocab_n_tokens(self._vocab))
        self._batch = lib.llama_batch_init(CHUNK, 0, 1)
        batch = self._batch
        if batch.n_tokens or batch.embd or not all((batch.token, batch.pos, batch.n_seq_id, batch.seq_id,
                                                    batch.logits)):
            raise RuntimeError("this libllama's batch has another layout")
        self._load_s = time.perf_counter() - begin
        self._place, self._greedy = 0, lib.llama_sampler_init_greedy()

    def facts(self) -> dict[str, Any]:
        lib, text = self._library, ctypes.create_string_buffer(256)
        lib.llama_model_desc(self._model, text, len(text))
        method, version = text.value, b""
        if hasattr(lib, "llama_version"):  # neither is in older ones
            lib.llama_version.restype = ctypes.c_char_p
            version = lib.llama_version()
        if hasattr(lib, "llama_ftype_name"):
            lib.llama_ftype_name.restype = ctypes.c_char_p
            method = lib.llama_ftype_name(lib.llama_model_ftype(self._model)) or method
        return {"tool": f"llama.cpp {version.decode(errors='replace')}".strip(),
                "method": method.decode(errors="replace"),
                "vocab_size": self._size, "load_s": self._load_s,
                "weight_bytes": int(lib.llama_model_size(self._model))}

    def encode(self, text: str) -> list[int]:
        """Ids without BOS; control tokens in the text are tokens."""
        raw = text.encode()
        ids = (ctypes.c_int32 * (len(raw) + 8))()
        count = self._library.llama_tokenize(self._vocab, raw, len(raw), ids, len(ids), False, True)
        if count < 0:
            raise RuntimeError("llama.cpp can't split the text into tokens")
        return list(ids[:count])

    def logits(self, ids: list[int], skip: int) -> tuple[int, Iterator[bytes]]:
        """Columns, and float32 rows of all positions but the last, without the first ``skip``."""
        return self._size, self._rows(ids[:-1], skip)

    def prefill(self, ids: list[int]) -> int:
        """Read a prompt from an empty cache; the likeliest token after it."""
        self._clear()
        for start in range(0, len(ids), CHUNK):
            part = ids[start:start + CHUNK]
            self._decode(part, [len(part) - 1] if start + len(part) == len(ids) else [])
        return self._likeliest(len(part) - 1)

    def step(self, token: int) -> int:
        """One token more; the likeliest one after it."""
        self._decode([token], [0])
        return self._likeliest(0)

    def _rows(self, ids: list[int], skip: int) -> Iterator[bytes]:
        self._clear()
        for start in range(0, len(ids), CHUNK):
            part = ids[start:start + CHUNK]
            wanted = [row for row in range(len(part)) if start + row >= skip]
            self._decode(part, wanted)
            for row in wanted:
                yield ctypes.string_at(self._logits_at(row), 4 * self._size)

    def _clear(self) -> None:
        lib, self._place = self._library, 0
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)

    def _decode(self, ids: list[int], wanted: list[int]) -> None:
        batch = self._batch
        batch.n_tokens = len(ids)
        for row, token in enumerate(ids):
            batch.token[row], batch.pos[row] = token, self._place + row
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = 0
            batch.logits[row] = 0
        for row in wanted:
            batch.logits[row] = 1
        if code := self._library.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode failed with {code}")
        self._place += len(ids)

    def _logits_at(self, row: int) -> int:
        address: int | None = self._library.llama_get_logits_ith(self._context, row)
        if not address:
            raise RuntimeError(f"llama.cpp gives no logits of token {row}")
        return address

    def _likeliest(self, row: int) -> int:
        # by llama.cpp's own sampler: a search in Python would take longer than a step
        return int(self._library.llama_sampler_sample(self._greedy, self._context, row))


def declare(lib: Any) -> None:
    """Types of the functions that are called.

    Raises:
        RuntimeError: the library lacks one of them.
    """
    pointer, number = ctypes.c_void_p, ctypes.c_int32
    functions = {
        "llama_backend_init": (None, ()),
        "llama_model_default_params": (LlamaParameters, ()),
        "llama_context_default_params": (LlamaParameters, ()),
        "llama_model_load_from_file": (pointer, (ctypes.c_char_p, LlamaParameters)),
        "llama_init_from_model": (pointer, (pointer, LlamaParameters)),
        "llama_n_ctx": (ctypes.c_uint32, (pointer,)), "llama_n_batch": (ctypes.c_uint32, (pointer,)),
        "llama_set_n_threads": (None, (pointer, number, number)),
        "llama_model_get_vocab": (pointer, (pointer,)), "llama_vocab_n_tokens": (number, (pointer,)),
        "llama_model_desc": (number, (pointer, ctypes.c_char_p, ctypes.c_size_t)),
        **({"llama_model_ftype": (number, (pointer,))} if hasattr(lib, "llama_model_ftype") else {}),
        "llama_model_size": (ctypes.c_uint64, (pointer,)),
        "llama_tokenize": (number, (pointer, ctypes.c_char_p, number, ctypes.POINTER(number), number,
                                    ctypes.c_bool, ctypes.c_bool)),
        "llama_batch_init": (LlamaBatch, (number, number, number)),
        "llama_decode": (number, (pointer, LlamaBatch)),
        "llama_get_logits_ith": (pointer, (pointer, number)),
        "llama_get_memory": (pointer, (pointer,)), "llama_memory_clear": (None, (pointer, ctypes.c_bool)),
        "llama_sampler_init_greedy": (pointer, ()),
        "llama_sampler_sample": (number, (pointer, pointer, number))}
    for name, (result, arguments) in functions.items():
        if not hasattr(lib, name):
            raise RuntimeError(f"this libllama has no {name}: it is too old, or too new")
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments


def open_model(options: dict[str, Any]) -> LlamaModel:
    """What :mod:`worker` asks for."""
    return LlamaModel(options)
