"""GGUF files by their type, from a hub on the loopback address."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from quantkit.sources.hub import KIND, gguf_files
from quantkit.support.errors import SourceError
from tests.helpers.gguf_models import write_model

SHA = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Answers as the hub does where its client lists a repository and downloads a file of it."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.downloads = files, []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                if self.path.startswith("/api/models/owner/name"):
                    self.answer(json.dumps({"id": "owner/name", "sha": SHA, "siblings": [
                        {"rfilename": name} for name in hub.files]}).encode())
                    return
                name = self.path.removeprefix(f"/owner/name/resolve/{SHA}/")
                name = name.removeprefix("/owner/name/resolve/main/")
                if name not in hub.files:
                    self.send_error(404)
                    return
                if self.command == "GET":
                    hub.downloads.append(name)
                self.answer(hub.files[name])

            def answer(self, content: bytes) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.send_header("X-Repo-Commit", SHA)
                self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "one.gguf", "llama")
    write_model(folder / "many.gguf", "llama", shards=3)
    one, parts = (folder / "one.gguf").read_bytes(), sorted(folder.glob("many-*.gguf"))
    hub = Hub({"README.md": b"x", "mmproj-F16.gguf": b"GGUF", "model.imatrix.gguf": b"GGUF",
               "Model-Q4_K_M.gguf": one, "Model-UD-Q4_K_M.gguf": b"GGUF", "Model-Q8_0.gguf": b"not GGUF",
               **{f"BF16/Model-BF16{part.name.removeprefix('many')}": part.read_bytes() for part in parts}})
    yield hub
    hub.server.shutdown()


def inspected(hub: Hub, tmp_path: Path, name: str, *options: str, offline: bool = False):
    """What ``quantkit inspect NAME --json`` says, and its process."""
    environment = {**os.environ, "HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "hf"),
                   "HF_HUB_OFFLINE": str(int(offline)), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run([sys.executable, "-m", "quantkit.cli.main", "inspect", name, "--json", *options],
                          env=environment, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    return (json.loads(done.stdout) if done.returncode == 0 else None), done


def test_one_file_of_several_then_offline(hub, tmp_path):
    hub.downloads.clear()
    facts, done = inspected(hub, tmp_path, "owner/name:model-q4_k_m")
    assert facts and facts["architecture"] == "llama", done.stderr
    assert hub.downloads == ["Model-Q4_K_M.gguf"]
    said = " ".join(done.stderr.split())
    assert f"--revision {SHA}" in said and "its mmproj file is left out" in said
    again, done = inspected(hub, tmp_path, "hf:owner/name:model-q4_k_m", offline=True)
    assert again and again["layers"] == facts["layers"], done.stderr
    assert hub.downloads == ["Model-Q4_K_M.gguf"]


def test_parts_by_a_commit(hub, tmp_path):
    facts, done = inspected(hub, tmp_path, "owner/name:BF16", "--revision", SHA)
    assert facts and facts["tensors"] > 10 and "not pinned" not in done.stderr, done.stderr


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind,what,remedy", [
    ("Q4_K_M", "has 2 GGUF files of type Q4_K_M", "owner/name:Model-Q4_K_M"),
    ("Q5_K_M", "has no GGUF file of type Q5_K_M", "write the end of one's name"),
    ("Q8_0", "is not a GGUF file", "give a .gguf file")])
def test_what_is_not_there(hub, tmp_path, kind, what, remedy):
    facts, done = inspected(hub, tmp_path, f"owner/name:{kind}")
    said = " ".join(done.stderr.split())
    assert facts is None and what in said and remedy in said and "Traceback" not in said


def test_names():
    assert all(KIND.matches(name) for name in ("a/b:Q4_K_M", "hf:a/b:UD-Q4_K_XL", "a/b:BF16"))
    assert not any(KIND.matches(name) for name in ("a/b:", "a/b:../c", "a/b:c/d", "a/b:c:d"))
    files = ["a-Q4_0.gguf", "b/a-Q4_K-00002-of-00002.gguf", "b/a-Q4_K-00001-of-00002.gguf"]
    assert gguf_files("o/n", "q4_k", files) == sorted(files[1:])
    with pytest.raises(SourceError, match="no GGUF file"):
        gguf_files("o/n", "4_0", files)
