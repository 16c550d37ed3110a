"""Writes a checkpoint so that it exists whole or not at all, and so that a killed run resumes.

``OUT.partial/`` holds, while a run lasts::

    lock                          held by the one writer
    state.json                    which run this is; at last, the hash of the manifest that OUT gets
    part-UNIT.safetensors, .json  a finished unit: its tensors; then its rows and hash
    part-work-NAME…               the same for what only the run needs
    states/                       hidden states between two layers, which are made anew by the next attempt
    checkpoint/                   being assembled from the parts, verified, renamed to OUT

Every file is written to a temporary name, fsynced and renamed. A unit exists once its ``.json``
does, and a checkpoint once ``OUT`` does; until all of it is written there is no ``config.json`` in
``checkpoint/``, without which no engine reads a folder. What else lies there is nobody's to touch;
``state.json`` is removed last, so that until then the same run knows its own ``OUT``.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from quantkit.checkpoint import durable
from quantkit.checkpoint.assemble import assemble
from quantkit.checkpoint.differences import changed_lines, pinned
from quantkit.checkpoint.durable import FolderLock, disk_errors, hash_file, write_file
from quantkit.checkpoint.manifest import MANIFEST, MAX_BYTES, LayerRow, Manifest
from quantkit.checkpoint.shards import SHARD_BYTES, LazyTensor, stored_tensors, tensor_chunks
from quantkit.checkpoint.unfinished import LOCK as _LOCK
from quantkit.checkpoint.unfinished import PARTIAL, STATE
from quantkit.sources.base import TensorInfo
from quantkit.support.errors import CheckpointError, QuantkitError, UsageError
from quantkit.support.paths import local_path, open_regular, typed_path
from quantkit.support.strict_json import parse_object, read_object
from quantkit.support.units import human_bytes

LAYOUT_VERSION = 2
_UNIT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PART = re.compile(rf"part-{_UNIT.pattern}\.(safetensors|json)")
_STATES = "states"
_ASSEMBLED = "checkpoint"
_PUBLISHED = "published"
WORK = "work-"
"""A unit whose name begins so is kept while the run lasts, and is no part of the checkpoint."""


class CheckpointWriter:
    """One run's writer. Use it in a ``with``, or :meth:`close` it.

    Args:
        out: the folder to make; nothing may be there.
        identity: plain JSON data that says which run this is: two runs of equal identity write
            the same bytes. Recipe, source hashes and calibration belong in it.
        needed_bytes: free space that the whole run needs (``Plan.needed_disk_bytes``); what
            earlier attempts already wrote is taken off.
        shard_bytes: the largest size of a weight file.

    Attributes:
        states: a folder for what a run writes and reads back, and a later one needn't find.
        finished: an earlier attempt was stopped after ``OUT`` was complete; :meth:`finish` has
            only to clean up.

    Raises:
        CheckpointError: ``out`` exists, is being written by another process, belongs to another
            run, can't be written, or there is too little space. Nothing was changed then.
    """

    def __init__(self, out: str | Path, identity: Mapping[str, Any], *, needed_bytes: int = 0,
                 shard_bytes: int = SHARD_BYTES) -> None:
        self.out, self.partial = _folders(out)
        self.states = self.partial / _STATES
        self.finished = False
        self._shard_bytes = shard_bytes
        self._units: set[str] = set()  # those whose bytes this process wrote or checked
        self._lock: FolderLock | None = None
        self._state = {"layout": LAYOUT_VERSION, "identity": json.loads(json.dumps(dict(identity)))}
        refuse_existing(self.out)
        with disk_errors(f"{self.partial} can't be made", "nothing was written"):
            self._refuse_strangers()
            if new := not os.path.lexists(self.partial):
                self._check_space(needed_bytes)
            durable.make_folder(self.partial)
            self._lock = FolderLock(self.partial / _LOCK)
        try:
            with disk_errors(f"{self.partial} can't be used", "nothing was lost"):
                if not new:  # under the lock, since another run would rename what is measured
                    self._check_space(needed_bytes)
                self._resume()
        except BaseException:
            self.close()
            raise

    # -- units

    def units(self) -> list[str]:
        """The checkpoint's units that are on disk, in natural order (``layer.2`` before ``layer.10``)."""
        names = [f.stem.removeprefix("part-") for f in self.partial.glob("part-*.json")]
        return sorted((name for name in names if not name.startswith(WORK)), key=natural)

    def has(self, unit: str) -> bool:
        """Whether a unit is on disk and its bytes are those that were written."""
        if unit in self._units:
            return True
        part, record = self._paths(unit)
        try:
            known = _record(record)
            intact = hash_file(part) == (known["sha256"], known["bytes"])
            _rows(known)
        except (OSError, QuantkitError, KeyError, TypeError, ValueError):
            return False
        if intact:
            self._units.add(unit)
        return intact

    def get(self, unit: str) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
        """Tensors and rows of a unit. Raises CheckpointError if it isn't on disk."""
        with self._reading(unit) as part:
            return load_file(part), [row.to_dict() for row in _rows(_record(self._paths(unit)[1]))]

    def tensor(self, unit: str, name: str) -> torch.Tensor:
        """One tensor of a unit, without reading the others. Raises CheckpointError if it isn't on disk."""
        with self._reading(unit) as part, safe_open(part, "pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor

    @contextmanager
    def _reading(self, unit: str) -> Iterator[Path]:
        if not self.has(unit):
            raise CheckpointError(f"unit {unit!r} is not in {self.partial}")
        part, _ = self._paths(unit)
        with disk_errors(f"{part} can't be read", "the other units are kept"):
            yield part

    def put(self, unit: str, tensors: Mapping[str, torch.Tensor | LazyTensor],
            rows: Sequence[Mapping[str, Any]]) -> None:
        """Store a unit; durable when it returns.

        Args:
            unit: its name: letters, digits, dots and dashes; units are assembled in natural order.
            tensors: by full name; no two units hold the same one. Those unread are read one at a time.
            rows: ``LayerRow.to_dict()`` of its Linears, kept ones too.

        Raises:
            CheckpointError: the disk is full or fails; earlier units are kept.
        """
        part, record = self._paths(unit)
        plain = [LayerRow.model_validate(dict(row)).to_dict() for row in rows]
        with disk_errors(f"unit {unit!r} can't be written to {self.partial}",
                         "every finished layer is kept"):
            self._units.discard(unit)
            record.unlink(missing_ok=True)
            digest, size = write_file(part, tensor_chunks(tensors))
            facts = {"sha256": digest, "bytes": size, "rows": plain}
            write_file(record, [json.dumps(facts, sort_keys=True, allow_nan=False).encode()])
        self._units.add(unit)

    def drop(self, unit: str) -> None:
        """Remove a unit that nothing will ask for again. Raises CheckpointError if it can't be."""
        part, record = self._paths(unit)
        self._units.discard(unit)
        with disk_errors(f"unit {unit!r} can't be removed from {self.partial}", "nothing is lost"):
            for path in (record, part):
                durable.step(f"remove {path.name}")
                path.unlink(missing_ok=True)

    def drop_all(self, prefix: str) -> None:
        """Remove all units whose names begin so, and what is left of them where a drop was interrupted."""
        for unit in sorted({path.stem.removeprefix("part-") for end in ("json", "safetensors")
                            for path in self.partial.glob(f"part-{prefix}*.{end}")}, key=natural):
            self.drop(unit)

    # -- the end

    def finish(self, config: Mapping[str, Any], side_files: Mapping[str, bytes], manifest: Manifest) -> Path:
        """Assemble, verify and publish the checkpoint; returns ``OUT``.

        The shards are streamed from the units. All is reread before the last rename: hashes, that
        every layer has its format's tensors, that scales are finite and codes in range.

        Args:
            config: the model's ``config.json``; ``quantization_config`` is added here, from the rows.
            side_files: copied unchanged, by plain name.
            manifest: without layers and files, which are filled in here.

        Raises:
            CheckpointError: a value or a hash is wrong, or the disk is full; the units are kept.
        """
        with disk_errors(f"{self.out} can't be completed", "every finished layer is kept"):
            if not self.finished:
                if os.path.lexists(self.out):
                    raise _exists(self.out)
                self._publish(config, side_files, manifest)
            self._clean()
        self.close()
        return self.out

    def _publish(self, config: Mapping[str, Any], side_files: Mapping[str, bytes],
                 manifest: Manifest) -> None:
        units = self.units()
        for unit in units:
            if not self.has(unit):
                raise CheckpointError(f"unit {unit!r} of {self.partial} is damaged",
                                      why="its bytes are not those that were written",
                                      next="run the same command again: it is made anew")
        rows = [row for unit in units for row in _rows(_record(self._paths(unit)[1]))]
        tensors = [tensor for unit in units for tensor in stored_tensors(self._paths(unit)[0])]
        folder = self.partial / _ASSEMBLED
        durable.step("remove an earlier attempt")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        digest = assemble(folder, tensors, rows, config, side_files, manifest, self._shard_bytes)
        self._write_state({_PUBLISHED: digest})
        durable.step("publish the checkpoint")
        durable.rename(folder, self.out)

    def _clean(self) -> None:
        for path in sorted(self.partial.iterdir()):
            if path.name not in (_LOCK, STATE) and _is_ours(path.name):
                durable.step(f"remove {path.name}")
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        durable.sync_folder(self.partial)
        durable.step("forget the run")
        (self.partial / STATE).unlink(missing_ok=True)
        self._remove_folder()

    def abandon(self) -> None:
        """Remove the unfinished run: it can't be completed."""
        with disk_errors(f"{self.partial} can't be removed", "it holds an unfinished run"):
            self._clean()
        self.close()

    def close(self) -> None:
        """Let another writer in; what is finished stays on disk."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the beginning

    def _paths(self, unit: str) -> tuple[Path, Path]:
        if not _UNIT.fullmatch(unit):
            raise CheckpointError(f"{unit!r} can't name a unit", why="letters, digits, dots and dashes only")
        return self.partial / f"part-{unit}.safetensors", self.partial / f"part-{unit}.json"

    def _check_space(self, needed: int) -> None:
        if os.path.lexists(self.out):
            return  # all that is left to do is to tidy up
        folder, have = self.partial, durable.bytes_in(self.partial)
        while not folder.is_dir() and folder != folder.parent:
            folder = folder.parent
        free, missing = shutil.disk_usage(folder).free, needed - have
        if missing > free:
            raise CheckpointError(
                f"{self.out} doesn't fit on its disk",
                why=f"{human_bytes(missing)} are needed (the finished layers, and the checkpoint made of "
                    f"them), {human_bytes(free)} are free", next="free some space, or choose another --out")

    def _resume(self) -> None:
        self._refuse_strangers()  # now that nobody else is at work there
        if not (self.partial / STATE).is_file():
            if os.path.lexists(self.out):
                self._remove_folder()
                raise _exists(self.out)
            self._write_state({})
            return
        self._compare()
        if os.path.lexists(self.out):
            if not _is_published(self.out, self.partial):
                raise _exists(self.out)
            self.finished = True
        for leftover in self.partial.glob("*" + durable.TEMPORARY):
            if _is_ours(leftover.name):
                durable.step(f"remove {leftover.name}")
                leftover.unlink()

    def _write_state(self, more: dict[str, str]) -> None:
        content = json.dumps(self._state | more, sort_keys=True, indent=1)
        write_file(self.partial / STATE, [content.encode()])

    def _remove_folder(self) -> None:
        durable.step("remove the folder")
        (self.partial / _LOCK).unlink()
        with suppress(OSError):  # something of somebody else's is in it
            self.partial.rmdir()

    def _refuse_strangers(self) -> None:
        """Raise CheckpointError for a folder that no run made."""
        names = durable.names_in(self.partial)
        begun = STATE in names or (self.partial / STATE).is_file()
        strange = sorted(name for name in names if not (
            _is_ours(name) if begun else name in (_LOCK, STATE + durable.TEMPORARY)))
        if strange and _read_state(self.partial) is None:
            raise CheckpointError(f"{self.partial} is not a quantkit run's folder",
                                  why=f"it holds {', '.join(strange[:3])} and no {STATE}"
                                      + (" of a run" if begun else ""),
                                  next="choose another --out, or move that folder away")

    def _compare(self) -> None:
        state = _read_state(self.partial)
        if state and {key: value for key, value in state.items() if key != _PUBLISHED} == self._state:
            return
        drop = "choose another --out"
        if all(_is_ours(path.name) for path in self.partial.iterdir()):
            drop += f", or drop that run: rm -r {shlex.quote(str(self.partial))}"
        if state is None:
            raise CheckpointError(f"{self.partial} belongs to another run", next=drop,
                                  why=f"nobody can read in its {STATE} which")
        old, new = ({"layout": state.get("layout"), **state["identity"]} for state in (state, self._state))
        versions = pinned(old, new)
        raise CheckpointError(
            f"{self.partial} belongs to another run",
            why="\n  ".join(["it was begun with (then → now):", *changed_lines(old, new)]),
            next=f"to end it, install {' and '.join(versions)} again; or {drop}" if versions else drop)


class WorkStore:
    """Units that only the run needs, to resume from; they never get into the checkpoint. Each is written
    atomically, hashed and durable, as layers are.

    Args:
        writer: the writer of the run.
        name: the name of the work: letters, digits and dashes.
    """

    def __init__(self, writer: CheckpointWriter, name: str) -> None:
        self._writer, self._prefix = writer, f"{WORK}{name}."

    def has(self, key: str) -> bool:
        """Whether a unit is on disk and its bytes are those that were written."""
        return self._writer.has(self._prefix + key)

    def put(self, key: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Store tensors by name; durable when it returns. Raises CheckpointError if the disk fails."""
        self._writer.put(self._prefix + key, tensors, [])

    def get(self, key: str) -> dict[str, torch.Tensor]:
        """Copies of what was put, which the files may be removed under. Raises CheckpointError if it isn't
        there."""
        return {name: tensor.clone() for name, tensor in self._writer.get(self._prefix + key)[0].items()}

    def tensor(self, key: str, name: str) -> torch.Tensor:
        """One tensor of what was put, and no others are read. Raises CheckpointError if it isn't there."""
        return self._writer.tensor(self._prefix + key, name)

    def put_batches(self, key: str, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype,
                    batches: Iterable[torch.Tensor]) -> None:
        """Store tensors of these shapes and one dtype, each made when it is written, so that it is alone in
        memory; durable when it returns. Raises CheckpointError if the disk fails, and what
        ``batches`` raises."""
        iterator = iter(batches)
        self._writer.put(self._prefix + key, {
            _batch(i): LazyTensor(TensorInfo(_batch(i), shape, dtype), lambda: next(iterator))
            for i, shape in enumerate(shapes)}, [])

    def batch(self, key: str, index: int) -> torch.Tensor:
        """One of those that :meth:`put_batches` stored. Raises CheckpointError if it isn't there."""
        return self._writer.tensor(self._prefix + key, _batch(index))

    def drop(self, key: str) -> None:
        """Remove a unit that nothing will ask for again. Raises CheckpointError if it can't be."""
        self._writer.drop(self._prefix + key)

    def clear(self) -> None:
        """Remove all units. Raises CheckpointError if one can't be."""
        self._writer.drop_all(self._prefix)


def _batch(index: int) -> str:
    """Names that sort as numbers do: tensors of one dtype are written in the order of their names."""
    return f"{index:08d}"


def refuse_existing(out: str | Path, source: str | None = None) -> None:
    """Raise CheckpointError if something is at ``out``, unless a run only has to be tidied up there.

    Cheap, so that a caller can ask before any work. Nobody is told to remove what ``source`` lies in.
    """
    path, partial = _folders(out)
    if not os.path.lexists(path):
        return
    with suppress(OSError):
        if {entry.name for entry in partial.iterdir()} == {_LOCK} or _is_published(path, partial):
            return
    raise _exists(path, source)


def _folders(out: str | Path) -> tuple[Path, Path]:
    """``OUT`` and ``OUT.partial``. Raises CheckpointError if ``out`` can't name a checkpoint."""
    why = f"it needs a name that doesn't end in {PARTIAL}"
    try:
        path = typed_path(out).resolve()
        if path.name and path.suffix != PARTIAL:
            return path, path.with_name(path.name + PARTIAL)
    except UsageError as error:
        why = error.why or error.what
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links
        why = str(error)
    raise CheckpointError(f"{out} can't be a checkpoint's folder", why=why, next="choose another --out")


def _is_ours(name: str) -> bool:
    """Whether a run makes something of that name in its folder."""
    name = name.removesuffix(durable.TEMPORARY)
    return name in (_LOCK, STATE, _STATES, _ASSEMBLED) or _PART.fullmatch(name) is not None


def _read_state(partial: Path) -> dict[str, Any] | None:
    """Which run a folder is of; ``None`` if nobody can read that there."""
    try:
        with open_regular(partial / STATE) as file:
            state = parse_object(file.read(MAX_BYTES), STATE, error=CheckpointError)
    except (FileNotFoundError, QuantkitError):  # another OSError is the disk's, not another run's
        return None
    return state if isinstance(state.get("identity"), dict) else None


def _record(path: Path) -> dict[str, Any]:
    """What a run wrote of itself. Raises CheckpointError if it can't be read."""
    return read_object(path, MAX_BYTES, error=CheckpointError)


def _rows(record: Mapping[str, Any]) -> list[LayerRow]:
    """The rows of a unit. Raises KeyError, TypeError or ValueError if the file was changed."""
    return [LayerRow.model_validate(row) for row in record["rows"]]


def _is_published(out: Path, partial: Path) -> bool:
    """Whether the run in ``partial`` made ``out``."""
    manifest, state = out / MANIFEST, _read_state(partial)
    return state is not None and manifest.is_file() and state.get(_PUBLISHED) == hash_file(manifest)[0]


def _exists(path: Path, source: str | None = None) -> CheckpointError:
    next = "choose another --out"
    with suppress(OSError, RuntimeError):
        used = [Path.cwd(), *filter(None, [local_path(source or "")])]
        if (path / MANIFEST).is_file() and not any(file.resolve().is_relative_to(path) for file in used):
            next += f", or remove it: rm -r {shlex.quote(str(path))}"
    return CheckpointError(f"{path} already exists", why="nothing is ever written over", next=next)


def natural(name: str) -> list[tuple[int, int, str]]:
    """A sort key by which numbers inside names count as numbers."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part)
            for part in re.split(r"(\d+)", name) if part]
