"""One document of ``index.html`` and the files that it names, and the policy that allows nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

_LINK = re.compile(r'<link rel="stylesheet" href="([a-z_]+\.css)">')
_SCRIPT = re.compile(r'<script src="([a-z_]+\.js)"></script>')


def page() -> tuple[str, str]:
    """The page and its ``Content-Security-Policy``.

    Styles and scripts are written into the document and allowed by their hashes, and requests go to this
    server only: nothing that a model writes can load or run anything. As the document names no file, it needs
    no further route, no further key and no knowledge of the path under which a proxy offers it.
    """
    html = _LINK.sub(lambda match: f"<style>\n{_read(match[1])}</style>", _read("index.html"))
    html = _SCRIPT.sub(lambda match: f"<script>\n{_read(match[1])}</script>", html)
    policy = ("default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
              f"frame-ancestors 'none'; script-src {_hashes(html, 'script')}; "
              f"style-src {_hashes(html, 'style')}")
    return html, policy


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hashes(html: str, tag: str) -> str:
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
                    for text in re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL))
