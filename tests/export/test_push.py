"""Push: to a hub that is a server on this machine, speaking as the real one does."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest

from quantkit.export.push import push
from quantkit.quantization.run import quantize
from quantkit.runtime.verify import verify
from quantkit.support.errors import CheckpointError, QuantkitError, UsageError
from quantkit.testing import tiny_model
from quantkit.testing.results import sample_results

SHA = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """What was asked of the server, and what it holds."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.blobs: dict[str, bytes] = {}
        self.refuses: int | None = None
        self.port = 0


class Handler(BaseHTTPRequestHandler):
    """Creation, listing, preupload, LFS and commit, as huggingface_hub calls them."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def answer(self, body: object, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_GET(self) -> None:
        self.hub.requests.append(f"GET {self.path}")
        name = "/".join(self.path.split("?")[0].split("/")[3:5])
        if self.path.startswith("/api/models/") and name in self.hub.repos:
            files = self.hub.repos[name]
            if "/tree/" in self.path:
                self.answer([{"type": "file", "path": file, "size": len(data), "oid": SHA}
                             for file, data in files.items()])
                return
            self.answer({"id": name, "sha": SHA, "private": self.hub.private[name],
                         "siblings": [{"rfilename": file} for file in files]})
        else:
            self.answer({"error": "Repository not found"}, 404)

    def do_PUT(self) -> None:
        self.hub.requests.append(f"PUT {self.path}")
        data = self.body()
        self.hub.blobs[self.path.rsplit("/", 1)[1]] = data
        self.answer({})

    def do_POST(self) -> None:
        self.hub.requests.append(f"POST {self.path}")
        data, hub, path = self.body(), self.hub, self.path.split("?")[0]
        if hub.refuses:
            self.answer({"error": "no"}, hub.refuses)
        elif path == "/api/repos/create":
            wanted = json.loads(data)
            owner = wanted.get("organization") or "ann"
            name = f"{owner}/{wanted['name']}"
            if name in hub.repos:
                self.answer({"error": "You already created this model repo", "url": name}, 409)
                return
            hub.repos[name] = {".gitattributes": b""}
            hub.private[name] = wanted.get("private", wanted.get("visibility") == "private")
            self.answer({"url": f"http://127.0.0.1:{hub.port}/{name}"})
        elif path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            files = json.loads(data)["files"]
            self.answer({"files": [{"path": one["path"], "shouldIgnore": False, "uploadMode": "lfs" if one[
                "path"].endswith(".safetensors") else "regular"} for one in files]})
        elif path.endswith("/objects/batch"):
            objects = json.loads(data)["objects"]
            self.answer({"transfer": "basic", "objects": [{**one, "actions": {"upload": {
                "href": f"http://127.0.0.1:{hub.port}/lfs/{one['oid']}"}}} for one in objects]})
        elif "/commit/" in path:
            name = "/".join(path.split("/")[3:5])
            for line in map(json.loads, data.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    hub.repos[name][value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    hub.repos[name][value["path"]] = hub.blobs[value["oid"]]
            self.answer({"commitUrl": f"http://127.0.0.1:{hub.port}/{name}/commit/{SHA}", "commitOid": SHA})
        else:
            self.answer({"error": f"unknown {path}"}, 404)


@pytest.fixture
def hub():
    Handler.hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Handler.hub.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield Handler.hub
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("push")
    return quantize(str(tiny_model(folder / "tiny")), "int8", folder / "out").out


def quantkit(hub, tmp_path, *arguments, token: str = "hf_made_up"):
    """The command in a process of its own: huggingface_hub reads its address when it is imported."""
    env = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{hub.port}", "HF_HUB_DISABLE_XET": "1",
           "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "*",
           "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_TOKEN": token}
    if not token:
        del env["HF_TOKEN"]
    return subprocess.run([sys.executable, "-m", "quantkit.cli.main", *map(str, arguments)],
                          capture_output=True,
                          text=True, timeout=120, env=env)


def test_every_listed_file_arrives_in_a_private_repository(hub, checkpoint, tmp_path):
    folder = tmp_path / "out"
    shutil.copytree(checkpoint, folder)
    (folder / "notes.txt").write_text("mine")
    done = quantkit(hub, tmp_path, "push", folder, "ann/tiny-int8")
    assert done.returncode == 0, done.stderr
    assert "private" in done.stdout and f"/commit/{SHA}" in done.stdout and "notes.txt" in done.stderr
    held = hub.repos["ann/tiny-int8"]
    assert hub.private["ann/tiny-int8"] is True
    expected = {p.name: p.read_bytes() for p in checkpoint.iterdir()}
    assert {n: d for n, d in held.items() if n != ".gitattributes"} == expected
    weights = expected["model.safetensors"]
    assert hub.blobs == {hashlib.sha256(weights).hexdigest(): weights}


def test_public_on_request_and_json(hub, checkpoint, tmp_path):
    done = quantkit(hub, tmp_path, "push", checkpoint, "ann/open", "--public", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["private"] is False is hub.private["ann/open"] and said["url"].endswith(SHA)


def test_a_repository_with_a_model_is_left_alone(hub, checkpoint, tmp_path):
    hub.repos["ann/old"], hub.private["ann/old"] = {"model.safetensors": b"old"}, True
    done = quantkit(hub, tmp_path, "push", checkpoint, "ann/old")
    assert done.returncode == 2 and "holds a model already" in done.stderr
    assert hub.repos["ann/old"] == {"model.safetensors": b"old"}


def test_what_shall_be_private_does_not_go_where_everybody_may_see_it(hub, checkpoint, tmp_path):
    hub.repos["ann/seen"], hub.private["ann/seen"] = {"README.md": b"soon"}, False
    done = quantkit(hub, tmp_path, "push", checkpoint, "ann/seen")
    assert done.returncode == 2 and "everybody may see it" in done.stderr and "--public" in done.stderr
    assert hub.repos["ann/seen"] == {"README.md": b"soon"} and not hub.blobs
    assert quantkit(hub, tmp_path, "push", checkpoint, "ann/seen", "--public").returncode == 0
    assert "model.safetensors" in hub.repos["ann/seen"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("status", [401, 403])
def test_a_token_that_may_not_write(hub, checkpoint, tmp_path, status):
    hub.refuses = status
    done = quantkit(hub, tmp_path, "push", checkpoint, "bob/theirs")
    assert done.returncode == 1 and "next: hf auth login" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("error", [OSError, type("ConnectError", (Exception,), {})])
def test_a_hub_out_of_reach(checkpoint, monkeypatch, error):
    def create_repo(*_, **__):
        raise error("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create_repo)
    with pytest.raises(QuantkitError, match="can't be reached") as caught:
        push(checkpoint, "ann/tiny")
    assert caught.value.why == "no route" and "check the connection" in caught.value.next


def test_a_dry_run_reaches_no_network(hub, checkpoint, tmp_path):
    done = quantkit(hub, tmp_path, "push", checkpoint, "ann/tiny", "--dry-run", token="")
    assert done.returncode == 0, done.stderr
    assert "model.safetensors" in done.stdout and "would be uploaded to ann/tiny (private)" in done.stdout
    assert hub.requests == []


def test_what_verify_rejects_is_not_pushed(checkpoint, tmp_path):
    folder = tmp_path / "out"
    shutil.copytree(checkpoint, folder)
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match="verify rejects") as caught:
        push(folder, "ann/tiny", dry_run=True)
    assert "model.safetensors" in caught.value.why
    (folder / "quantkit.json").unlink()
    with pytest.raises(CheckpointError):
        push(folder, "ann/tiny", dry_run=True)


@pytest.mark.parametrize("name", ["", "a/b/c", "ann/..", "ann/a b", "tiny", "-x/y"])
def test_names_that_can_not_be(checkpoint, name):
    with pytest.raises(UsageError):
        push(checkpoint, name, dry_run=True)


def test_a_folder_that_can_not_be():
    with pytest.raises(UsageError, match="can't be a path"):
        push("~nobody-of-that-name/x", "ann/tiny", dry_run=True)


def evaluated(checkpoint, folder):
    """A results.json with a row of the checkpoint's manifest."""
    result = sample_results()["ordinary"]
    manifest = (checkpoint / "quantkit.json").read_bytes()
    result.rows[1].manifest_sha256 = hashlib.sha256(manifest).hexdigest()
    (folder / "results.json").write_text(json.dumps(result.to_dict()))
    return folder / "results.json"


def test_results_go_into_the_card_and_what_is_downloaded_is_whole(hub, checkpoint, tmp_path):
    before = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    results = evaluated(checkpoint, tmp_path)
    done = quantkit(hub, tmp_path, "push", checkpoint, "ann/tiny", "--results", results)
    assert done.returncode == 0, done.stderr
    after = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    assert after == before, "the folder is as it was"
    files = dict(hub.repos["ann/tiny"])
    del files[".gitattributes"]
    card = files["README.md"].decode()
    assert "<!-- quantkit:eval -->\n## Evaluation" in card and card.count("\n---\n") >= 1
    values = {item.metric_type: item.metric_value
              for item in huggingface_hub.ModelCard(card).data.eval_results}
    assert values["kl_mean"] == 0.004
    assert {name: data for name, data in files.items() if name != "README.md"} == {
        name: data for name, data in before.items() if name != "README.md"}
    folder = tmp_path / "downloaded"
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    assert verify(folder).ok
    (folder / "README.md").write_bytes(files["README.md"].replace(b"tiny", b"huge"))
    assert not verify(folder).ok
    (folder / "README.md").write_bytes(files["README.md"])
    again = quantkit(hub, tmp_path, "push", folder, "ann/again", "--results", results)
    assert again.returncode == 0 and hub.repos["ann/again"]["README.md"] == files["README.md"]


def test_results_of_another_checkpoint_are_refused(hub, checkpoint, tmp_path):
    (tmp_path / "results.json").write_text(json.dumps(sample_results()["ordinary"].to_dict()))
    done = quantkit(hub, tmp_path, "push", checkpoint, "ann/tiny", "--results", tmp_path / "results.json")
    assert done.returncode == 2 and "no row of" in done.stderr and not hub.requests


def test_a_dry_run_shows_the_size_of_the_card_with_results(hub, checkpoint, tmp_path):
    results = evaluated(checkpoint, tmp_path)
    plain, full = (json.loads(quantkit(hub, tmp_path, "push", checkpoint, "ann/tiny", "--dry-run", "--json",
                                       *more).stdout)["files"] for more in ((), ("--results", results)))
    assert full.keys() == plain.keys() and full["README.md"] > plain["README.md"]
    assert full["model.safetensors"] == plain["model.safetensors"] and not hub.requests
