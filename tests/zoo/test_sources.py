"""Broken sources, each a correct one with one fault, and what ``check_source`` says of each."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.sources.base import SourceIdentity, SourceKind
from quantkit.sources.local import LocalSource
from quantkit.support.errors import PluginError, SourceError
from quantkit.testing import check_source

PREFIX = "copy:"
URI = "copy:{folder}"
COUNT = itertools.count()


class Sound(LocalSource):
    """A folder under another prefix."""

    def __init__(self, uri: str) -> None:
        super().__init__(Path(uri.removeprefix(PREFIX)), uri, SourceIdentity("copy", uri))


def kind(source: Any = Sound, **changes: Any) -> SourceKind:
    def opened(uri: str, revision: str | None) -> Any:
        if revision is not None:
            raise SourceError(f"{uri} has no revisions")
        return source(uri)

    sound = SourceKind(lambda uri: uri.startswith(PREFIX), opened, "copy:FOLDER")
    return dataclasses.replace(sound, **changes)


def connects(uri: str) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", 9), timeout=0.1).close()
    return uri.startswith(PREFIX)


class OwnConfig(Sound):
    def config(self):
        return self._config


class NoConfig(Sound):
    def config(self):
        return None


class OtherConfig(Sound):
    def config(self):
        return {**super().config(), "hidden_size": 128}


class UnknownFamily(Sound):
    def config(self):
        return {**super().config(), "model_type": "copied"}


class TensorLess(Sound):
    def tensors(self):
        return {name: info for name, info in super().tensors().items() if name != "model.norm.weight"}


class OtherNames(Sound):
    def tensors(self):
        return {name: dataclasses.replace(info, name="x") for name, info in super().tensors().items()}


class OtherDtype(Sound):
    def tensor(self, name):
        return super().tensor(name).float()


class Drifts(Sound):
    def tensor(self, name):
        return super().tensor(name) + 0.5 * next(COUNT)


class AfterRelease(Sound):
    released = False

    def release(self):
        self.released = True

    def tensor(self, name):
        return super().tensor(name) * (0 if self.released else 1)


class KeyErrors(Sound):
    def tensor(self, name):
        return self._tensors.infos[name] and super().tensor(name)


class Speechless(Sound):
    def tensor(self, name):
        try:
            return super().tensor(name)
        except SourceError:
            raise SourceError("no such tensor there") from None


class Invents(Sound):
    def tensor(self, name):
        return super().tensor(name) if name in self.tensors() else torch.zeros(1)


class TextFiles(Sound):
    def side_files(self):
        return {name: content.decode() for name, content in super().side_files().items()}


class NoTokenizer(Sound):
    def side_files(self):
        return {name: content for name, content in super().side_files().items() if name != "tokenizer.json"}


class Escapes(Sound):
    def side_files(self):
        return {**super().side_files(), "../tokenizer.json": b"{}"}


class BrokenTokenizer(Sound):
    def side_files(self):
        return {**super().side_files(), "tokenizer.json": b"{"}


class ShortHash(Sound):
    def identity(self):
        known = super().identity()
        return dataclasses.replace(known, files={name: digest[:8] for name, digest in known.files.items()})


class NoIdentity(Sound):
    def identity(self):
        return SourceIdentity("copy", self.uri)


class ChangingIdentity(Sound):
    def identity(self):
        return dataclasses.replace(super().identity(), revision=str(next(COUNT)))


class ClosesOnce(Sound):
    closed = False

    def close(self):
        if self.closed:
            raise ValueError("closed already")
        self.closed = True
        super().close()


ZOO = {
    "takes every name": (kind(matches=lambda uri: True), "matches takes 'smollm2'"),
    "takes folders": (kind(matches=lambda uri: uri.startswith(("copy:", "/"))), "matches takes '/nowhere"),
    "doesn't take its own": (kind(matches=lambda uri: False), "doesn't take its own name"),
    "matches with a match": (kind(matches=lambda uri: uri if uri.startswith(PREFIX) else ""),
                             "doesn't take its own name"),
    "says None": (kind(matches=lambda uri: uri.startswith(PREFIX) or None), "neither True nor False"),
    "fails for an empty name": (kind(matches=lambda uri: uri[0] == "c" and uri.startswith(PREFIX)),
                                "raises IndexError"),
    "connects": (kind(matches=connects), "opened a connection"),
    "its own dictionary": (kind(OwnConfig), "config returns its own dictionary"),
    "no config": (kind(NoConfig), "config returned a NoneType"),
    "another config": (kind(OtherConfig), "its config means"),
    "an unknown family": (kind(UnknownFamily), "reading its config raises UnsupportedModelError"),
    "a tensor less": (kind(TensorLess), "model.norm.weight is missing"),
    "other names": (kind(OtherNames), "must map each name to its TensorInfo"),
    "another dtype": (kind(OtherDtype), "announced as torch.bfloat16"),
    "drifts": (kind(Drifts), "has other values when it is read again"),
    "loses what is released": (kind(AfterRelease), "has other values when it is read again"),
    "a KeyError": (kind(KeyErrors), "raises KeyError"),
    "an error without the name": (kind(Speechless), "doesn't name the tensor"),
    "invents tensors": (kind(Invents), "'no.such.tensor'.* returned something"),
    "text for bytes": (kind(TextFiles), "must map file names to bytes"),
    "no tokenizer": (kind(NoTokenizer), "has no tokenizer.json"),
    "a name with a path": (kind(Escapes), "no plain file name"),
    "a broken tokenizer": (kind(BrokenTokenizer), "reading its tokenizer.json raises"),
    "a short hash": (kind(ShortHash), "not the hex digits of a sha256"),
    "no identity": (kind(NoIdentity), "neither hashes nor a fixed meaning"),
    "another identity each time": (kind(ChangingIdentity), "identity differs the second time"),
    "closes once": (kind(ClosesOnce), "close of what is closed raises ValueError"),
    "ignores revisions": (kind(open=lambda uri, revision: Sound(uri)), "ignores the revision"),
    "opens nothing": (kind(lambda uri: [][0]), "open raises IndexError"),
    "no order": (kind(order="last"), "order is 'last'"),
    "no kind": (Sound, "not a SourceKind"),
}


@pytest.mark.parametrize("fault", ZOO)
def test_the_kit_notices(fault: str) -> None:
    broken, message = ZOO[fault]
    with pytest.raises(PluginError, match=message):
        check_source(broken, URI)


def test_a_sound_source_passes() -> None:
    check_source(kind(), URI)
