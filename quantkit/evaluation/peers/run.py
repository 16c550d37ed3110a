"""Runs one peer: the same windows, scored against the same reference as every other row, and its speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

import numpy as np
import torch

from quantkit.evaluation.metric_table import registered_metrics
from quantkit.evaluation.peers.base import Peer, PeerPrediction, PeerSession
from quantkit.evaluation.peers.openai_peer import OpenAIPeer
from quantkit.evaluation.peers.process import LlamaPeer, TransformersPeer
from quantkit.evaluation.peers.row import PeerData
from quantkit.evaluation.peers.scores import PeerScores
from quantkit.evaluation.quality.hidden_states import HiddenStates
from quantkit.evaluation.sweep.store import MeasurementResult
from quantkit.runtime.loader import LoadedModel
from quantkit.support.call_text import made_with, named_options, read_call
from quantkit.support.errors import QuantkitError, UsageError, did_you_mean
from quantkit.support.frozen import Frozen
from quantkit.support.progress import Listener, ProgressEvent, silent

PROBE = 2
"""Windows of each text whose text the tool must split into the same tokens."""


class PeerSpeedSettings(Frozen):
    """The speed test of a peer, as that of a model.

    Attributes:
        prefill: tokens of a prompt.
        decode: tokens after it.
        repeats: timed runs, after a warm-up.
        threads: the threads that the tool computes with.
    """

    prefill: int
    decode: int
    repeats: int
    threads: int


def measure_peer(peer: str, states: Mapping[str, HiddenStates], prompt: int, loaded: LoadedModel,
                 speed: PeerSpeedSettings | None = None,
                 progress: Listener = silent) -> MeasurementResult[PeerData]:
    """Measure a peer.

    Args:
        peer: the tool as it is written in ``--peer``.
        states: text → what the reference left of it; none: only speed is measured.
        prompt: tokens at the beginning of a window that aren't scored.
        loaded: the reference, whose layers aren't needed.
        speed: ``None``: speed isn't measured.
        progress: told before each window and the speed test.

    Returns:
        What :func:`~quantkit.evaluation.peers.row.peer_row` makes a row of.

    Raises:
        UsageError: the peer can't be read, or its tokens are others.
        QuantkitError: the tool isn't there, can't open the model, or failed.
    """
    tool = parse_peer(peer)
    texts = {name: left.tokens for name, left in states.items()}
    lengths = [windows.shape[1] for windows in texts.values()]
    if speed:
        lengths.append(speed.prefill + speed.decode + 2)
    threads = speed.threads if speed else torch.get_num_threads()
    total = sum(len(windows) for windows in texts.values()) + (speed is not None)
    progress(ProgressEvent(0, total, f"{tool.name} opens {tool.uri}"))
    with closing(tool.open(max(lengths, default=1), threads, loaded.tokenizer)) as session:
        facts = session.facts
        _check_tokens(tool, session, texts, loaded)
        data = PeerData(uri=tool.uri, facts=facts)
        arrays: dict[str, np.ndarray] = {}
        done = 0
        if speed:  # first, while the process's largest memory is that of running, not of logits
            progress(ProgressEvent(done, total, f"speed of {tool.name}"))
            times = session.time(_ids(texts, loaded, speed), speed.decode)
            data = data.model_copy(update={"times": times, "prefill": speed.prefill})
            done += 1
        if texts:
            means, arrays = _scored(tool, session, states, prompt, lambda number: progress(
                ProgressEvent(done + number, total, f"{tool.name} {facts.method}")))
            data = data.model_copy(update={"texts": means})
    progress(ProgressEvent(total, total, "scored"))
    return MeasurementResult(data, arrays)


def _check_tokens(tool: Peer, session: PeerSession, texts: Mapping[str, torch.Tensor],
                  loaded: LoadedModel) -> None:
    """Refuse a tool that means other tokens by the same ids. Raises UsageError."""
    size = session.facts.vocab_size
    for name, windows in texts.items():
        if size is not None and int(windows.max()) >= size:
            raise UsageError(f"{tool.uri} has a vocabulary of {size} tokens",
                             why=f"the text {name} has the token {int(windows.max())}",
                             next="compare models of one family")
        text = loaded.tokenizer.decode(windows[:PROBE].flatten().tolist(), skip_special=False)
        ours, theirs = loaded.tokenizer.encode(text, special=False), session.encode(text)
        if theirs is not None and theirs != ours:
            place = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b),
                         min(len(ours), len(theirs)))
            raise UsageError(
                f"{tool.name} splits the text {name} into other tokens than {loaded.uri}",
                why=f"{len(theirs)} tokens in place of {len(ours)}; token {place} is "
                    f"{theirs[place] if place < len(theirs) else 'missing'}, not "
                    f"{ours[place] if place < len(ours) else 'there'}",
                next="compare models of one family")


@torch.inference_mode()
def _scored(tool: Peer, session: PeerSession, states: Mapping[str, HiddenStates], prompt: int,
            at: Callable[[int], None]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Each text's means of each window, and arrays; nothing if the tool predicts no given tokens."""
    metrics, number = registered_metrics(), 0
    means: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    for name, left in states.items():
        scores = PeerScores(metrics)
        for place, window in enumerate(left.tokens):
            at(number)
            number += 1
            prediction = session.predict(window.tolist(), prompt)
            if prediction is None:
                return {}, {}
            _check_finite(tool, prediction)
            scores.add(left.window(place)[:], prediction, window[1 + prompt:])
        means[name] = scores.means()
        arrays |= {f"{name}/{key}": array for key, array in scores.arrays().items()}
    return means, arrays


def _check_finite(tool: Peer, prediction: PeerPrediction) -> None:
    for values in (prediction.logits, prediction.following):
        if values is not None and not (values < torch.inf).all():
            raise QuantkitError(f"{tool.name} gives logits of {tool.uri} that are not finite",
                                why="its activations overflow, or its weights are damaged")


def _ids(texts: Mapping[str, torch.Tensor], loaded: LoadedModel, speed: PeerSpeedSettings) -> list[list[int]]:
    """A prompt for the warm-up and each run: the texts' tokens, each from another place on."""
    ids: list[int] = torch.cat([windows.flatten() for windows in texts.values()]).tolist() if texts else [
        token % loaded.config.vocab_size for token in range(7, 7 + speed.prefill + speed.repeats)]
    ids = (ids * (2 + speed.prefill // len(ids)))[:speed.prefill + len(ids)]
    return [ids[run:run + speed.prefill] for run in range(speed.repeats + 1)]


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
