"""The chat page at ``/``: one file, with a content security policy that allows only its own script."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources


def page() -> tuple[str, str]:
    """The page and its ``Content-Security-Policy``.

    Its one script and its one style are allowed by their hashes, requests to this server only:
    whatever a model writes, there is nothing that it could load or run.
    """
    html = resources.files("quantkit.serve").joinpath("page.html").read_text(encoding="utf-8")
    policy = ("default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
              f"frame-ancestors 'none'; script-src {_hash(html, 'script')}; style-src {_hash(html, 'style')}")
    return html, policy


def _hash(html: str, tag: str) -> str:
    (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"
