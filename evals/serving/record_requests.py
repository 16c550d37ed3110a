"""Records what a client sends, reduced to keys, types and sizes: a proxy between a client and a server.

    quantkit serve-local MODEL --port 8000
    python evals/serving/record_requests.py --upstream http://127.0.0.1:8000 --port 8100 --out client.json

Point the client at port 8100 and use it; Ctrl-C ends the recording. ``tests/serving/clients/`` has such
recordings, and ``tests/serving/test_clients.py`` posts them to a server.

Of a client's texts only the tool calls that it repeats and the regular expressions of its schemas are kept:
look through a recording before you share it. Any other string that isn't a short identifier becomes
``~LENGTH``, and :func:`expand` makes a filler of the same length of it.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_IDENTIFIER = re.compile(r"[\w.:/$#@*+-]{0,80}")
_KEPT_KEYS = {"type", "role", "model", "name", "namespace", "tool_choice", "effort", "verbosity", "summary",
              "keep", "ttl", "scope", "syntax", "execution", "status", "phase", "include", "required", "enum",
              "const", "format", "$schema", "$ref", "default", "search_context_size", "id", "call_id",
              "tool_use_id", "tool_call_id", "mode"}
_KEPT_TEXTS = {"pattern", "arguments"}
"""Regular expressions, and calls that the client repeats from an earlier answer."""
_KEPT_HEADERS = {"anthropic-version", "anthropic-beta", "user-agent", "content-type", "openai-beta"}
_LARK = 'start: "*** Begin Patch" LF line+ "*** End Patch" LF?\nline: /[^*].*/ LF\n%import common.LF\n'


def reduce(value: Any, key: str = "") -> Any:
    """A request's body without its texts; objects keep their keys, lists their lengths."""
    if isinstance(value, dict):
        call = value.get("type") == "custom_tool_call"  # its arguments are called input, as prompts are
        return {name: reduce(item, "arguments" if call and name == "input" else name)
                for name, item in value.items()}
    if isinstance(value, list):
        return [reduce(item, key) for item in value]
    if not isinstance(value, str) or key in _KEPT_TEXTS:
        return value
    if key in _KEPT_KEYS and _IDENTIFIER.fullmatch(value):
        return value
    return f"~{len(value)}"


def expand(value: Any, key: str = "") -> Any:
    """The opposite of :func:`reduce`, with fillers of the same lengths; a grammar becomes one of our own."""
    if isinstance(value, dict):
        return {name: expand(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [expand(item, key) for item in value]
    if not isinstance(value, str) or not re.fullmatch(r"~\d+", value):
        return value
    length = int(value[1:])
    if key == "definition":
        return _LARK
    return ("the cat sat here " * (length // 17 + 1))[:length]


def _handler(upstream: str, out: Path, recorded: list[dict[str, Any]]) -> type[BaseHTTPRequestHandler]:
    address = urlsplit(upstream)

    class Recorder(BaseHTTPRequestHandler):
        """Sends each request on, and its answer back as it comes."""

        def _forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            headers = {name: value for name, value in self.headers.items()
                       if name.lower() not in ("host", "connection", "accept-encoding")}
            connection = http.client.HTTPConnection(address.hostname or "127.0.0.1", address.port)
            connection.request(self.command, self.path, body or None, headers)
            answer = connection.getresponse()
            recorded.append({"method": self.command, "path": self.path,
                             "headers": {name.lower(): value for name, value in self.headers.items()
                                         if name.lower() in _KEPT_HEADERS},
                             **({"body": reduce(json.loads(body))} if body else {})})
            out.write_text("[\n" + ",\n".join(json.dumps(request) for request in recorded) + "\n]\n")
            print(self.command, self.path, len(body), "bytes:", answer.status, flush=True)
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "connection", "date", "server"):
                    self.send_header(name, value)
            self.send_header("connection", "close")
            self.end_headers()
            while piece := answer.read1(65536):
                self.wfile.write(piece)
                self.wfile.flush()

        do_GET = do_HEAD = do_POST = _forward

        def log_message(self, format: str, *args: Any) -> None:
            """Each request has its own line."""

    return Recorder


def main() -> None:
    """Record until Ctrl-C."""
    parser = argparse.ArgumentParser(description="Record what a client sends, without its texts.")
    parser.add_argument("--upstream", default="http://127.0.0.1:8000", help="the server's address")
    parser.add_argument("--port", type=int, default=8100, help="the loopback port where the client connects")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file that is written")
    arguments = parser.parse_args()
    server = ThreadingHTTPServer(("127.0.0.1", arguments.port),
                                 _handler(arguments.upstream, arguments.out, []))
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
