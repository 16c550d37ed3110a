"""The models of a comparison: what is known of them before their weights are read, and those in memory."""

from __future__ import annotations

import hashlib
import json
import math
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from quantkit.checkpoint.dequantized import is_unknown
from quantkit.checkpoint.foreign.checkpoint import ForeignCheckpoint
from quantkit.checkpoint.open import AnyCheckpoint, open_model
from quantkit.checkpoint.reader import Checkpoint
from quantkit.evaluation.quality.feed import TeacherForcedModel
from quantkit.evaluation.quality.hidden_states import HiddenStates
from quantkit.evaluation.quality.score import windows_of
from quantkit.evaluation.sweep.store import user_folder
from quantkit.kv.spec import KVSpec, parse_kv, setting_of
from quantkit.models.architecture import tensor_shapes
from quantkit.models.config import ModelConfig
from quantkit.models.loadable import check_loadable, dtype_of
from quantkit.models.modules import config_there
from quantkit.models.outline import outline_of_tensors, sizes_of
from quantkit.ops.cpu_machine import trim_heap
from quantkit.runtime.cpu.model import reason_against
from quantkit.runtime.loader import LoadedModel, load
from quantkit.runtime.memory.weights import of_checkpoint, unquantized
from quantkit.runtime.modules_model import load_through_modules, plain_source, with_attention
from quantkit.sources.base import ModelSource, mapped_files
from quantkit.support.errors import CheckpointError, SourceError
from quantkit.support.paths import local_path
from quantkit.support.progress import Listener, silent
from quantkit.text.tokenizer import Tokenizer
from quantkit_kernels.kept import is_writable

_BLOCK = 1 << 22


@dataclass(frozen=True)
class ModelRef:
    """A model as any process can load it.

    Attributes:
        uri: its name, which workers in other folders find too.
        revision, dtype, device, decoded: arguments of :func:`~quantkit.runtime.loader.load`.
        through_modules: whether transformers' modules run it.
    """

    uri: str
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    decoded: bool = False
    through_modules: bool = False


@dataclass(frozen=True)
class TextWindows:
    """A text as models read it.

    Attributes:
        content: the text, so far as it is needed.
        window, windows: tokens of a window, and their number.
        prompt: tokens of a window that go through the KV cache as its prompt; ``None``: there is no cache.
    """

    content: str
    window: int
    windows: int
    prompt: int | None


class LoadedModels:
    """The model that a run has in memory, and what models left of texts: measurements share both."""

    def __init__(self) -> None:
        self._ref: ModelRef | None = None
        self._model: LoadedModel | None = None
        self._states: dict[tuple[ModelRef, str | None, TextWindows], HiddenStates] = {}

    def get(self, ref: ModelRef, loading: Listener = silent) -> LoadedModel:
        """The model, loaded unless it is the one in memory, which goes first."""
        if self._model is None or self._ref != ref:
            self.clear()
            self._ref, self._model = ref, load_through_modules(
                ref.uri, revision=ref.revision, dtype=ref.dtype, device=ref.device, loading=loading,
            ) if ref.through_modules else load(ref.uri, revision=ref.revision, dtype=ref.dtype,
                                               device=ref.device, decoded=ref.decoded, loading=loading)
        return self._model

    def states(self, ref: ModelRef, kv: str | None, text: TextWindows, progress: Listener = silent,
               loading: Listener = silent) -> HiddenStates:
        """What a model with a KV setting leaves of a text, which it reads unless it has.

        Raises:
            UsageError: the text is too short.
            QuantkitError: the model can't be loaded, or the disk is full.
        """
        key = ref, kv, text
        if key not in self._states:
            loaded, folder = self.get(ref, loading), user_folder()
            tokens = windows_of(loaded, text.content, text.window, text.windows)
            self._states[key] = HiddenStates(with_kv(loaded, kv, text.prompt), tokens, text.prompt or 0,
                                             folder if is_writable(folder) else None, progress)
        return self._states[key]

    def clear(self, states: bool = False) -> None:
        """Let go of the model, and with ``states`` of what models left of texts too."""
        if states:
            self._states.clear()
        files = () if self._model is None else self._model.files
        self._model = None
        for file in files:  # which stay mapped if its head lies there
            file.release()
        trim_heap()


def with_kv(model: LoadedModel, kv: str | None, prompt: int | None) -> LoadedModel | TeacherForcedModel:
    """A model with its KV setting, as text; as it is, if no cache is involved."""
    if prompt is None:
        return model
    return TeacherForcedModel(model, model.kv if kv is None else parse_kv(kv), prompt)


@dataclass(frozen=True)
class ModelFacts:
    """A model that takes part in a comparison.

    Attributes:
        uri, revision: its name as the user gave it.
        identity: a hash of the manifest, which has every file's hash, or of the files; ``None``: nobody asked
            for it, or nothing says which bytes it is.
        quantized: whether it is a checkpoint.
        config: the model's shape.
        kv: the KV setting that its checkpoint names.
        dtype: the dtype of activations, as torch writes it without ``torch.``.
        parameters: the number of numbers in its tensors.
        weight_bytes: bytes of its weights in memory; ``mapped``: they are pages of its files.
        tokenizer: the model's tokenizer.
        through_modules: whether transformers' modules run it: then neither speed nor a KV cache is measured.
        recipe: the recipe that made it in this comparison; ``None``: it was there.
    """

    uri: str
    revision: str | None
    identity: str | None
    quantized: bool
    config: ModelConfig
    kv: KVSpec
    dtype: str
    parameters: int
    weight_bytes: int
    mapped: bool
    tokenizer: Tokenizer = field(compare=False, repr=False)
    recipe: str | None = None
    through_modules: bool = False

    def ref(self, dtype: str, device: str, decoded: bool = False) -> ModelRef:
        """How workers in other folders load it; ``decoded``: as the one that others are compared with."""
        path = local_path(self.uri)
        uri = str(path.absolute()) if path is not None and path.exists() else self.uri
        return ModelRef(uri, self.revision, dtype, device, decoded, self.through_modules)

    def setting(self, kv: str | None) -> str:
        """A KV setting as text; of ``None`` the one that the checkpoint names."""
        return str(self.kv) if kv is None else kv

    @property
    def name(self) -> str:
        """How progress and messages call it."""
        return self.recipe or Path(self.uri).name or self.uri


def facts_of(uri: str, revision: str | None = None, dtype: str = "auto", recipe: str | None = None,
             hashed: bool = True) -> ModelFacts:
    """Look at a model's headers, and hash it.

    Args:
        uri, revision: which.
        dtype: the dtype of activations, or ``auto``.
        recipe: the recipe that made it.
        hashed: whether its identity is wanted, for which all of its files may have to be read.

    Raises:
        QuantkitError: it isn't there, or can't be loaded.
    """
    with closing(open_model(uri, revision)) as opened:
        if is_unknown(opened):
            return _facts_of_modules(opened, uri, revision, dtype, recipe, hashed)
        if isinstance(opened, Checkpoint | ForeignCheckpoint):
            checked = check_loadable(uri, opened.config(), opened.infos, opened.side_files(), opened.layers,
                                     dtype=dtype, error=CheckpointError)
            weights, mapped = of_checkpoint(opened, reason_against, dtype=dtype), False
        else:
            infos = opened.tensors()
            checked = check_loadable(uri, opened.config(), infos, opened.side_files(), dtype=dtype,
                                     error=SourceError)
            weights = unquantized(opened, reason_against, dtype=dtype)
            mapped = bool(mapped_files(opened)) and {info.dtype for info in infos.values()} == {checked.dtype}
        kv = setting_of(opened.manifest.recipe) if isinstance(opened, Checkpoint) else KVSpec()
        identity = _identity(opened) if hashed else None
        quantized = isinstance(opened, Checkpoint | ForeignCheckpoint)
    parameters = sum(math.prod(shape) for shape in tensor_shapes(checked.config).values())
    return ModelFacts(uri, revision, identity, quantized, checked.config, kv,
                      str(checked.dtype).removeprefix("torch."), parameters, weights.bytes, mapped,
                      checked.tokenizer, recipe)


def _facts_of_modules(opened: ModelSource | AnyCheckpoint, uri: str, revision: str | None, dtype: str,
                      recipe: str | None, hashed: bool) -> ModelFacts:
    """Of a model whose mathematics isn't known here."""
    source = plain_source(opened, uri)
    config, infos = source.config(), source.tensors()
    outline, kind = outline_of_tensors(uri, config, infos), dtype_of(config, dtype)
    sizes = with_attention(sizes_of(outline), config_there(config, outline.model_type))
    parameters = sum(math.prod(info.shape) for info in infos.values())
    tokenizer = Tokenizer(source.side_files(), config)
    sizes = replace(sizes, vocab_size=sizes.vocab_size or tokenizer.vocab_size)
    quantized = isinstance(opened, Checkpoint | ForeignCheckpoint)
    return ModelFacts(uri, revision, _identity(opened) if hashed else None, quantized, sizes, KVSpec(),
                      str(kind).removeprefix("torch."), parameters, parameters * kind.itemsize, False,
                      tokenizer, recipe, through_modules=True)


def _identity(opened: ModelSource | AnyCheckpoint) -> str | None:
    if isinstance(opened, Checkpoint):
        return hashlib.sha256(opened.manifest.to_bytes()).hexdigest()
    if isinstance(opened, ForeignCheckpoint):  # another tool's, which records no hashes
        return hash_of(opened.path)
    identity = opened.identity()
    if not identity.files and not identity.pinned:
        return None
    # what has no files is made by its name
    content = dict(identity.files) or {"kind": identity.kind, "uri": identity.uri,
                                       "revision": str(identity.revision)}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def hash_of(path: Path) -> str | None:
    """Of a file, or of all files at the top of a folder; ``None`` if nothing is there."""
    if not path.exists():
        return None
    digest = hashlib.sha256()
    for part in sorted(path.iterdir()) if path.is_dir() else [path]:
        if part.is_file():
            digest.update(part.name.encode() + b"\0")
            with part.open("rb") as file:
                while block := file.read(_BLOCK):
                    digest.update(block)
    return digest.hexdigest()
