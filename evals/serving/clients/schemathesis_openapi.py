"""schemathesis over a running server's ``/openapi.json``: all phases and checks, valid and invalid requests.

    quantkit serve-local smollm2-int4
    python evals/serving/clients/schemathesis_openapi.py [URL] [--python PYTHON] [--examples N]

PYTHON belongs to an environment with ``pip install schemathesis``; by default this one. What the document
allows must be accepted and what it forbids refused, every status and body must be described, and none may be
5xx. The rules between fields that no JSON schema says (tokens of prompt and answer together, for instance)
are kept by the hooks that the tests use, ``tests/serving/rules.py``; they assume a context of 8,192 tokens
and the default ``--max-queue``. The last line is ``N passed, M failed``, in requests; exit code 1 if anything
was found.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CONFIG = """
[checks.negative_data_rejection]
expected-statuses = ["400", "401", "403", "404", "405", "413"]
"""
"""What refuses a request that the document forbids: a body may be too large before anything else is wrong."""


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000")
    parser.add_argument("--python", type=Path, default=Path(sys.executable))
    parser.add_argument("--examples", type=int, default=100, help="requests an operation and phase, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--include", metavar="REGEX", help="only operations whose path matches")
    args = parser.parse_args()
    env = {**os.environ, "SCHEMATHESIS_HOOKS": "rules", "PYTHONPATH": str(ROOT / "tests" / "serve")}
    command = [str(args.python.absolute()), "-m", "schemathesis.cli", "run",
               f"{args.url.rstrip('/')}/openapi.json", "--no-color", "--mode", "all", "--checks", "all",
               "--phases", "examples,coverage,fuzzing,stateful", "--max-examples", str(args.examples),
               "--seed", str(args.seed), "--request-timeout", "120", "--max-response-time", "120",
               "--continue-on-failure"]
    if args.include:
        command += ["--include-path-regex", args.include]
    with tempfile.TemporaryDirectory() as folder:  # where it keeps its examples
        (Path(folder) / "schemathesis.toml").write_text(CONFIG)
        done = subprocess.run(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, check=False)
    print(done.stdout)
    cases = re.search(r"(\d+) generated, (?:(\d+) found (\d+) unique failures|(\d+) passed)?", done.stdout)
    generated = int(cases[1]) if cases else 0
    failed = int(cases[2] or 0) if cases else 0
    if done.returncode and not failed:
        failed = 1  # it stopped before it had cases
    print(f"schemathesis: {generated - failed if generated else 0} passed, {failed} failed")
    return 1 if done.returncode or failed or not generated else 0


if __name__ == "__main__":
    sys.exit(main())
