"""``quantkit serve-local`` as a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from typing import Any

import httpx
import openai


class Process:
    """A server in a process of its own; ``with`` kills it at the end, if it is still there."""

    def __init__(self, arguments: tuple[object, ...], **environment: str) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-m", "quantkit.cli.main", "serve-local", *map(str, arguments), "--json"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment})
        self._lines: list[str] = []
        self._reader = threading.Thread(target=lambda: self._lines.extend(self.child.stderr), daemon=True)
        self._reader.start()
        self.where = json.loads(self.child.stdout.readline() or "{}")

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        self.child.kill()
        self.child.wait()
        self.child.stdout.close()

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.where["url"] + "/v1", api_key="none", max_retries=0, timeout=60)

    def ask(self, **options: Any) -> Any:
        return self.client.completions.create(model=self.where["model"], **options)

    def ended(self) -> tuple[int, str]:
        """Exit code and all of stderr."""
        code = self.child.wait(60)
        self._reader.join(60)
        return code, "".join(self._lines)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.where["url"] + path, timeout=60)
