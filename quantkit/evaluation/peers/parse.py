"""The short way to write a peer: ``transformers(FOLDER)``, ``llama.cpp(FILE.gguf)``, ``openai(URL)``."""

from __future__ import annotations

from quantkit.evaluation.peers.base import Peer
from quantkit.evaluation.peers.llama_peer import LlamaPeer
from quantkit.evaluation.peers.openai_peer import OpenAIPeer
from quantkit.evaluation.peers.transformers_peer import TransformersPeer
from quantkit.support.call_text import made_with, named_options, read_call
from quantkit.support.errors import UsageError, did_you_mean

MAX_LENGTH = 2048
PEERS: dict[str, type[Peer]] = {kind.name: kind for kind in (TransformersPeer, LlamaPeer, OpenAIPeer)}
_NEXT = 'quantkit eval MODEL --peer "llama.cpp(FILE.gguf, bin=FOLDER)"'
_SEE = "docs/evaluation.md"


def parse_peer(text: str) -> Peer:
    """A peer with its options.

    Raises:
        UsageError: it can't be read, names another tool, or an option is off.
    """
    if len(text) > MAX_LENGTH:
        raise UsageError(f"a peer of {len(text)} characters", why=f"{MAX_LENGTH} are allowed", next=_NEXT)
    name, written = read_call(text, _NEXT)
    if name not in PEERS:
        raise UsageError(f"no peer is called {name!r}", why=did_you_mean(name, PEERS), next=_NEXT)
    options = named_options(written, PEERS[name].first, text, _NEXT)
    return made_with(PEERS[name], options, f"peer {name!r}", _SEE, f"see {_SEE}")
