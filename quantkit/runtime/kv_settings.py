"""The KV settings that requests of an engine have: the default one, and those that requests choose."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from quantkit.kv.build import build_policy
from quantkit.kv.prefix import PrefixBudget
from quantkit.kv.spec import KVSpec
from quantkit.runtime.core import EngineFull
from quantkit.runtime.kv_manager import CachedText, KVCacheManager
from quantkit.runtime.loader import LoadedModel
from quantkit.runtime.memory.kv import NO_DRAFTS, DraftMemory, default_prefix_bytes
from quantkit.support.errors import UsageError

MAX_QUERIES = 256
"""Queries that a setting which a request chooses may keep: each takes a vector of every head and layer."""
MAX_SETTINGS = 8
"""Settings beside the default that are kept ready; one that nobody uses makes room for another."""


class KVSettings:
    """Makes and keeps a :class:`~quantkit.runtime.kv_manager.KVCacheManager` for each setting.

    Args:
        default: the setting of requests that choose none.
        more: settings that requests may choose if the memory is fixed.
        memory: bytes for all caches; ``None``: they grow, and on a GPU take what is left.
        sequences, context, chunk: see :class:`~quantkit.runtime.kv_manager.KVCacheManager`.
        prefix_bytes: bytes of prefixes that all keep together; 0: none. ``None``: a default where caches
            grow, and where their size is fixed the pages that nobody needs.
        drafts: what drafts take beside the caches.

    Attributes:
        default: the manager of the default setting.

    Raises:
        UsageError: a setting doesn't fit the model, or the memory isn't enough.
    """

    def __init__(self, loaded: LoadedModel, default: KVSpec, more: Sequence[KVSpec], *, memory: int | None,
                 sequences: int, context: int, chunk: int, prefix_bytes: int | None,
                 drafts: DraftMemory = NO_DRAFTS) -> None:
        self._loaded, self._drafts = loaded, drafts
        self._sequences = sequences
        self._context = context
        self._chunk = chunk
        grows = memory is None and loaded.model.device.type != "cuda"
        if prefix_bytes is None and grows:
            prefix_bytes = default_prefix_bytes()
        self._budget = None if prefix_bytes == 0 else PrefixBudget(prefix_bytes)
        self._making, self._lock = threading.Lock(), threading.Lock()  # of one setting; of what there is
        self._dropped_queries = self._dropped_hits = 0
        specs = {str(spec): spec for spec in (default, *more)}
        self._managers: dict[str, KVCacheManager] = {}  # by the setting's text
        for index, (name, spec) in enumerate(specs.items()):
            # on a device each takes its part of what those before have left
            self._managers[name] = self._make(spec, memory, len(specs) if memory else len(specs) - index)
        self.default = self._managers[str(default)]
        self._fixed, self._kept = self.default.reservation is not None, len(specs)

    @property
    def managers(self) -> list[KVCacheManager]:
        return list(self._managers.values())

    @property
    def prefix_queries(self) -> int:
        """Prompt tokens that were looked up in prefix caches so far."""
        return self._dropped_queries + sum(manager.prefix_queries for manager in self.managers)

    @property
    def prefix_hits(self) -> int:
        """Prompt tokens that were found there."""
        return self._dropped_hits + sum(manager.prefix_hits for manager in self.managers)

    def prepare(self, spec: KVSpec) -> KVCacheManager:
        """The manager of a setting, made if it is new, with the kernels that read its cache. It may be
        dropped until a request uses it.

        Raises:
            UsageError: it doesn't fit the model, or isn't among those that the memory was divided for.
            EngineFull: there are too many others in use.
        """
        manager = self._of(spec)
        self._loaded.model.prepare(manager.cache)
        return manager

    def use(self, text: CachedText, kv: KVSpec | KVCacheManager | None) -> None:
        """Give a text its manager; from now on the manager is in use, until the text is removed from its
        ``texts``.

        Args:
            text: a request's, which begins to wait.
            kv: its setting, or the manager from :meth:`prepare`, which spares the making of one.

        Raises:
            UsageError, EngineFull: as :meth:`prepare`.
        """
        if kv is not None and not isinstance(kv, KVCacheManager):
            kv = self._of(kv)
        manager = kv or self.default
        with self._lock:
            name = str(manager.cache.spec)
            if name not in self._managers:  # it was dropped, and comes back
                self._make_room()
            manager = self._managers.setdefault(name, manager)
            manager.texts.add(text)
        text.manager = manager

    def _of(self, spec: KVSpec) -> KVCacheManager:
        """The manager of a setting, made if it is new. Whoever needs none that is made doesn't wait."""
        with self._making:
            if (manager := self._managers.get(str(spec))) is not None:
                return manager
            if (queries := build_policy(spec).query_window) > MAX_QUERIES:
                raise UsageError(f"the KV setting {spec} keeps {queries:,} queries",
                                 why=f"a request may choose one that keeps at most {MAX_QUERIES}",
                                 next="choose a smaller window")
            if self._fixed:
                raise UsageError(f"no memory is set aside for the KV setting {spec}",
                                 why=f"there is some for {', '.join(self._managers)}",
                                 next="choose one of them, or start with another --kv")
            with self._lock:
                self._make_room()
            manager = self._make(spec, None, 1)
            with self._lock:
                self._managers[str(spec)] = manager
            return manager

    def clear(self) -> None:
        for manager in self.managers:
            if manager.prefixes is not None:
                manager.prefixes.clear()

    def _make(self, spec: KVSpec, memory: int | None, parts: int) -> KVCacheManager:
        return KVCacheManager(self._loaded, spec, memory=memory, parts=parts, sequences=self._sequences,
                              context=self._context, chunk=self._chunk, budget=self._budget,
                              drafts=self._drafts)

    def _make_room(self) -> None:
        """Drop settings that nobody uses until there is room for another.

        Raises:
            EngineFull: all are in use.
        """
        for name, manager in list(self._managers.items())[self._kept:]:
            if len(self._managers) - self._kept < MAX_SETTINGS:
                return
            if not manager.texts:
                self._dropped_queries += manager.prefix_queries
                self._dropped_hits += manager.prefix_hits
                del self._managers[name]
                manager.prefix_queries = manager.prefix_hits = 0  # it may come back
        if len(self._managers) - self._kept >= MAX_SETTINGS:
            raise EngineFull(f"{MAX_SETTINGS} other KV settings are in use",
                             why="each has a cache of its own", next="wait for them, or use the default")
