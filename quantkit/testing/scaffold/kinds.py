"""What a plugin can register, as ``quantkit plugins new --kind`` knows it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TemplateKind:
    """A kind of plugin.

    Attributes:
        name: as ``--kind`` takes it; also its folder of templates and its page of the documentation.
        registry: where it is registered; ``None``: its files are found in a folder.
        summary: what the template's example does, a sentence.
        shows: a command that shows the plugin at work; ``$name`` and ``$key`` are filled in.
        example: the name under which the documentation shows the example.
        source: the file that an author edits, in the package.
        underscores: names are written with ``_`` in place of ``-``.
    """

    name: str
    registry: str | None
    summary: str
    shows: str
    example: str
    source: str = ""
    underscores: bool = False


def _kind(name: str, registry: str | None, example: str, summary: str, shows: str, *, source: str = "",
          underscores: bool = False) -> TemplateKind:
    return TemplateKind(name, registry, summary, shows, example, source or f"{name}.py", underscores)


KINDS: dict[str, TemplateKind] = {kind.name: kind for kind in (
    _kind("method", "methods", "clipped", "Rounds weights to nearest with clipped ranges.",
          "quantkit quantize smollm2 --recipe int4-$name --out OUT && quantkit eval smollm2 OUT --windows 4"),
    _kind("transform", "transforms", "equalize", "Evens out the ranges of channels between two layers.",
          "quantkit quantize smollm2 --recipe int4-$name --out OUT && quantkit eval smollm2 OUT --windows 4"),
    _kind("format", "formats", "rowwise", "Stores 8-bit weights with a scale a row.",
          "quantkit quantize smollm2 --recipe int8-$name --out OUT && quantkit eval smollm2 OUT --windows 4"),
    _kind("kernel", "kernels", "blockwise", "Multiplies by 4-bit weights a block of rows at a time.",
          "quantkit doctor"),
    _kind("policy", "kv_policies", "keynorm", "Keeps the keys with the smallest norms in the KV cache.",
          'quantkit eval smollm2 --kv "none,$name(0.5)" --windows 4'),
    _kind("codec", "kv_codecs", "uint8", "Stores keys and values in 8 bits with an offset.",
          "quantkit eval smollm2 --kv none,$name --windows 4"),
    _kind("drafter", "drafters", "bigram", "Drafts tokens by what followed the last time.",
          'quantkit generate smollm2 "One, two, three, one, two," --draft $name'),
    _kind("metric", "metrics", "top5", "Measures how often the likeliest token stays among the top five.",
          "quantkit eval smollm2 --suite quick", underscores=True),
    _kind("reporter", "reporters", "jsonl", "Writes results as JSON Lines.",
          "quantkit eval smollm2 --suite quick --out REPORT"),
    _kind("source", "sources", "zip", "Reads models from zip files.", "quantkit inspect $name:FILE.zip"),
    _kind("architecture", "architectures", "renamed", "Runs models that are Llama under other names.",
          "quantkit inspect FOLDER_OF_A_MODEL", underscores=True),
    _kind("command", "commands", "sizes", "Adds a command that counts a model's parameters by part.",
          "quantkit $name smollm2"),
    _kind("recipe", None, "int4-v8", "Ships recipes.",
          "quantkit quantize smollm2 --recipe $name --out OUT && quantkit eval smollm2 OUT --windows 4",
          source="recipes/$name.yaml"),
    _kind("suite", None, "long-windows", "Ships evaluation suites.", "quantkit eval smollm2 --suite $name",
          source="evals/$name.yaml"),
)}
