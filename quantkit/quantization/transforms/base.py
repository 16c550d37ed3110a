"""What a transform is, the decoder layer that it changes, and how a recipe's transforms are applied."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from quantkit.formats.spec import QuantSpec
from quantkit.models.architecture import HEAD, parse_config
from quantkit.models.config import ModelConfig
from quantkit.models.outline import is_known
from quantkit.plugins.manager import describe_entry, is_builtin, registry
from quantkit.quantization.methods.base import LayerStats, MethodOptions, checked_options
from quantkit.quantization.planning.engine import unknown_family
from quantkit.quantization.recipe import Recipe, TransformSpec
from quantkit.sources.base import ModelSource
from quantkit.sources.causal_lm import ResolvedHeadSource
from quantkit.sources.wrapper import CheckedSource
from quantkit.support.errors import PluginError, RecipeError


class LayerTensors:
    """One decoder layer between measuring and solving: its tensors as they are changed, and their inputs.

    Args:
        read: full name of a tensor → the model's, in the dtype in which it is stored.
        has: whether there is such a tensor.
        specs: the specs of the Linears that will be quantized, by full name.
        stats: the statistics of their inputs; replaced as the inputs change.
        offset_norms: the norms' weights are stored less 1.

    Attributes:
        changed: new tensors by full name: norms and biases in the dtype in which they are stored,
            weights of Linears in float32.
    """

    def __init__(self, read: Callable[[str], torch.Tensor], has: Callable[[str], bool],
                 specs: Mapping[str, QuantSpec], stats: dict[str, LayerStats],
                 offset_norms: bool = False) -> None:
        self._read, self._has = read, has
        self.specs, self.stats = specs, stats
        self._offset = 1.0 if offset_norms else 0.0
        self.changed: dict[str, torch.Tensor] = {}

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor as it is now, float32."""
        return (self.changed[name] if name in self.changed else self._read(name)).float()

    def weights(self, names: Sequence[str]) -> tuple[torch.dtype | torch.Tensor, ...]:
        """The dtype in which the model stores these tensors; then they as they are now, float32 if they were
        changed."""
        originals = [self._read(name) for name in names]
        return originals[0].dtype, *(map(self.changed.get, names, originals))

    def stored(self, name: str) -> torch.Tensor:
        """A tensor as it is now, in the dtype in which the model stores it."""
        original = self._read(name)
        return self.changed[name].to(original.dtype) if name in self.changed else original

    def fault(self) -> str | None:
        """What is wrong with :attr:`changed`; ``None``: nothing."""
        for name, tensor in self.changed.items():
            if not isinstance(name, str) or not self._has(name):
                return f"it changes {name!r}, which the model doesn't have"
            if not isinstance(tensor, torch.Tensor):
                return f"{name} became a {type(tensor).__name__}"
            if tensor.shape != (shape := self._read(name).shape):
                return f"{name} became {list(tensor.shape)}; it is {list(shape)}"
        return None

    def scale(self, seam: ScaleGroup, by: torch.Tensor) -> None:
        """Divide what writes a seam's channels, multiply what reads them, tell the statistics.

        A norm's weight is rounded to the dtype it is stored in, and the readers take what it was really
        divided by: the function stays the same to float32's last bits. A channel with a weight of 0 stays.

        Args:
            seam: a seam of this layer.
            by: float32 ``[channels]``, positive.
        """
        if seam.rows is None:
            by = self._scale_norm(f"{seam.writer}.weight", by)
        else:
            self._scale_rows(seam.writer, seam.rows, by)
        columns = seam.spread(by)
        scaled: dict[int, LayerStats] = {}  # readers may share theirs
        for reader in seam.readers:
            self.changed[f"{reader}.weight"] = self.tensor(f"{reader}.weight") * columns
            if (stats := self.stats.get(reader)) is not None:
                if id(stats) not in scaled:
                    scaled[id(stats)] = _scaled(stats, columns)
                self.stats[reader] = scaled[id(stats)]
        for router in seam.routers:
            name = f"{router}.weight"
            self.changed[name] = (self.tensor(name) * columns).to(self._read(name).dtype)

    def _scale_norm(self, name: str, by: torch.Tensor) -> torch.Tensor:
        stored, now = self._read(name), self.tensor(name) + self._offset
        rounded = (now / by - self._offset).to(stored.dtype)
        effective = rounded.float() + self._offset
        lost = (now == 0) | (effective == 0) | ~torch.isfinite(effective)
        self.changed[name] = torch.where(lost, self.tensor(name).to(stored.dtype), rounded)
        return torch.where(lost, torch.ones_like(by), now / effective)

    def _scale_rows(self, writer: str, rows: tuple[int, int], by: torch.Tensor) -> None:
        part = slice(*rows)
        weight = self.tensor(f"{writer}.weight").clone()
        weight[part] /= by[:, None]
        self.changed[f"{writer}.weight"] = weight
        if self._has(name := f"{writer}.bias"):
            bias = self.tensor(name).clone()
            bias[part] /= by
            self.changed[name] = bias.to(self._read(name).dtype)


def _scaled(stats: LayerStats, columns: torch.Tensor) -> LayerStats:
    """The statistics of inputs that are divided by ``columns``."""
    def scaled(form: torch.Tensor | None) -> torch.Tensor | None:
        return None if form is None else form / columns / columns[:, None]

    return dataclasses.replace(stats, hessian=scaled(stats.hessian), drift=scaled(stats.drift),
                               largest=None if stats.largest is None else stats.largest / columns)


def _unchanged(source: ModelSource, config: ModelConfig, options: MethodOptions) -> ModelSource:
    return source


@dataclass(frozen=True)
class Transform:
    """A registered transform. It changes the whole model before anything is measured, or every decoder layer
    after its inputs were.

    Attributes:
        name: its name in recipes.
        paper: link to the paper.
        source: presents the model in its changed form; data-free.
        layer: ``(config, index, tensors, options)``, changes ``tensors``; calibrated. It must depend on
            nothing else, so that a run that is resumed does the same.
        needs: statistics that ``layer`` must be given: ``"hessian"`` or ``"largest"``.
        options: its options' model.
        reason_against_model: why a model can't be changed so; ``None`` if it can.
        reason_against_spec: why ``layer`` has nothing to do for Linears of a spec; ``None`` if it has.
    """

    name: str
    paper: str
    source: Callable[[ModelSource, ModelConfig, MethodOptions], ModelSource] = _unchanged
    layer: Callable[[ModelConfig, int, LayerTensors, MethodOptions], None] | None = None
    needs: frozenset[str] = frozenset()
    options: type[MethodOptions] = MethodOptions
    reason_against_model: Callable[[ModelConfig], str | None] = lambda config: None
    reason_against_spec: Callable[[QuantSpec], str | None] = lambda spec: None


def resolve_transforms(specs: Iterable[TransformSpec]) -> list[tuple[Transform, MethodOptions]]:
    """Every transform with its options. Raises UsageError for an unknown one, RecipeError for options,
    PluginError for one that nothing would call."""
    table, resolved = registry("transforms"), []
    for spec in specs:
        transform: Transform = table.get(spec.name)
        if transform.layer is not None and not transform.needs:  # it would never be called
            raise PluginError(f"{describe_entry('transforms', spec.name)} changes layers and needs no "
                              "statistics",
                              why="layers are changed once their inputs are measured",
                              next='declare what it is measured for: needs=frozenset({"largest"})')
        options = checked_options(f"transform {spec.name}", transform.options, spec.options)
        resolved.append((transform, options))
    return resolved


def transformed(specs: Iterable[TransformSpec], source: ModelSource) -> ModelSource:
    """The model of ``source`` as the whole-model transforms present it.

    Raises:
        RecipeError: one of the transforms, also of those that change layers later, isn't for this model.
    """
    for transform, options in resolve_transforms(specs):
        config = parse_config(source.config())
        if (why := transform.reason_against_model(config)) is not None:
            raise RecipeError(f"transform {transform.name} can't be used on {source.uri}", why=why,
                              next="leave it out of the recipe")
        source = transform.source(source, config, options)
        if not is_builtin("transforms", transform.name):
            source = CheckedSource(source, describe_entry("transforms", transform.name))
    return source


def apply_to_layer(transform: Transform, options: MethodOptions, config: ModelConfig, index: int,
                   tensors: LayerTensors) -> None:
    """Let a transform change a layer, if it changes layers. Raises PluginError if a plugin's leaves something
    else than tensors of the model's names and shapes."""
    if transform.layer is None:
        return
    transform.layer(config, index, tensors, options)
    if not is_builtin("transforms", transform.name) and (fault := tensors.fault()) is not None:
        raise PluginError(f"{describe_entry('transforms', transform.name)}: in layer {index} {fault}",
                          why="LayerTensors.changed holds new tensors of the model by their full names",
                          next="correct it: quantkit.quantization.transforms.base says what it promises")


@dataclass(frozen=True)
class ScaleGroup:
    """Channels between a writer and all that reads them.

    Attributes:
        writer: full name, without ``.weight``, of a norm or a Linear.
        rows: first and end of the rows of the Linear that writes them; ``None``: the writer is a norm.
        readers: full names of Linears whose columns are these channels.
        routers: experts' routers, if they read the channels too; they are never quantized.
        heads: ``(key heads, query heads a key head, head_dim)`` where each channel is read by several
            columns.
    """

    writer: str
    rows: tuple[int, int] | None
    readers: tuple[str, ...]
    routers: tuple[str, ...] = ()
    heads: tuple[int, int, int] | None = None

    def spread(self, channels: torch.Tensor) -> torch.Tensor:
        """``[channels]`` → ``[columns]`` of the readers."""
        if self.heads is None:
            return channels
        keys, _, dim = self.heads
        return channels.view(keys, 1, dim).expand(self.heads).reshape(-1)

    def gather(self, columns: torch.Tensor) -> torch.Tensor:
        """``[columns]`` → ``[channels]``: the largest value of each channel's columns."""
        if self.heads is None:
            return columns
        return columns.view(self.heads).amax(dim=1).reshape(-1)


def scale_groups(config: ModelConfig, index: int) -> Iterator[ScaleGroup]:
    """The scale groups of one decoder layer, in the order of its operations: what writes their channels can
    be divided and what reads them multiplied without changing the model.

    A norm's weight writes what q, k and v read, or gate and up; v writes what o reads, since attention only
    averages it; up writes what down reads, since the activation is on the other factor (where it isn't, as
    with ``clamped_silu``, there is no such group).
    """
    layer, experts = f"model.layers.{index}", config.experts
    attention, dim = f"{layer}.self_attn", config.head_dim
    q, kv = config.num_heads * dim, config.num_kv_heads * dim
    fused = config.fused_projections
    inputs: tuple[str, ...] = ("qkv_proj",) if fused else ("q_proj", "k_proj", "v_proj")
    yield ScaleGroup(f"{layer}.input_layernorm", None, tuple(f"{attention}.{name}" for name in inputs))
    first = q + kv if fused else 0
    yield ScaleGroup(f"{attention}.{inputs[-1]}", (first, first + kv), (f"{attention}.o_proj",),
                     heads=(config.num_kv_heads, config.num_heads // config.num_kv_heads, dim))
    norm = f"{layer}.{'pre_feedforward' if config.sandwich_norms else 'post_attention'}_layernorm"
    if experts is not None and experts.layers[index]:
        gate, up, down = experts.projections
        sizes = {experts.expert_name(index, number): experts.intermediate_size
                 for number in range(experts.count)}
        if experts.shared_size:
            sizes[experts.expert_name(index, None)] = experts.shared_size
        yield ScaleGroup(norm, None, tuple(f"{name}.{part}" for name in sizes for part in (gate, up)),
                         routers=experts.routers(index))
        if config.activation != "clamped_silu":
            yield from (ScaleGroup(f"{name}.{up}", (0, size), (f"{name}.{down}",))
                        for name, size in sizes.items())
        return
    size, mlp = config.intermediate_size, f"{layer}.mlp"
    inputs = ("gate_up_proj",) if fused else ("gate_proj", "up_proj")
    yield ScaleGroup(norm, None, tuple(f"{mlp}.{name}" for name in inputs))
    if config.activation == "clamped_silu":
        return
    first = size if fused else 0
    yield ScaleGroup(f"{mlp}.{inputs[-1]}", (first, first + size), (f"{mlp}.down_proj",))


def check_transforms(recipe: Recipe, source: ModelSource) -> None:
    """Raise RecipeError if a recipe changes a model whose mathematics isn't known here."""
    config, infos = source.config(), source.tensors()
    if (recipe.transforms or recipe.recover is not None) and not is_known(config, infos):
        raise unknown_family(recipe, str(config.get("model_type"))[:80],
                             "it changes or trains a model whose mathematics isn't known here")


def with_own_head(recipe: Recipe, source: ModelSource) -> ModelSource:
    """The source; if a rule with ``match: lm_head`` that isn't optional quantizes the head of a model that
    has it tied to its embedding, the model with a head of its own, whatever becomes of the embedding."""
    if not is_known(source.config(), source.tensors()):  # its head stays as it is
        return source
    tied = parse_config(source.config(), source.tensors()).tie_word_embeddings
    quantizes_head = any(rule.match == HEAD and rule.method and not rule.optional for rule in recipe.rules)
    return ResolvedHeadSource(source, tied=False) if tied and quantizes_head else source
