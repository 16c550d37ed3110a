"""Keys and values of the requests with one KV setting: their cache, their pages, the prefixes they share.

Where a cache's memory is fixed its pages exist from the beginning, and sequences reserve those that they will
take soon (:mod:`~quantkit.runtime.page_reservation`).
"""

from __future__ import annotations

from quantkit.kv.base import PAGE
from quantkit.kv.batch import block_of
from quantkit.kv.cache import KVCache
from quantkit.kv.prefix import PrefixBudget, PrefixMatch, block_names, build_prefix_cache
from quantkit.kv.spec import KVSpec
from quantkit.models.config import BlockDiffusion
from quantkit.runtime.loader import LoadedModel
from quantkit.runtime.memory.kv import LOOKAHEAD, NO_DRAFTS, DraftMemory
from quantkit.runtime.memory.scratch import prompt_portion
from quantkit.runtime.memory.serving import spare_bytes
from quantkit.runtime.page_reservation import PageReservation
from quantkit.support.errors import QuantkitError, UsageError

PROMPTS = 8
"""Prompts that are read side by side in a cache of a fixed size where each takes pages of its own."""
STATES = 8
"""States that a prefix cache of a fixed size holds where texts can't be taken up at every block."""


class CachedText:
    """A request's text, and what of it is in a KV cache. The cache's manager alone writes it.

    Args:
        prompt, answer: token ids; the answer grows.
        max_length: tokens of both, at most.
        diffusion: says how the model writes blocks, if it does.
        reuses_prefix: whether it may begin with keys and values that are there: nothing else of its prompt is
            needed.
        salt: only texts with the same salt share prefixes.

    Attributes:
        manager: the manager of its KV setting.
        sequence: its number in the KV cache; −1 until it is admitted.
        computed_tokens: tokens of :attr:`tokens` whose keys and values are in the cache.
        cached_tokens: prompt tokens whose keys and values were there when it began.
        preemptions: how often it gave up its pages.
        block_names: names of its blocks, see :func:`quantkit.kv.prefix.block_names`.
    """

    def __init__(self, prompt: list[int], answer: list[int], max_length: int, *, reuses_prefix: bool = True,
                 salt: bytes = b"", diffusion: BlockDiffusion | None = None) -> None:
        self.prompt = prompt
        self.answer = answer
        self._block = None if diffusion is None else diffusion.block_size
        self.max_length = max_length if self._block is None else -(-max_length // self._block) * self._block
        self.reuses_prefix, self.salt = reuses_prefix, salt
        self.manager: KVCacheManager
        self.sequence = -1
        self.computed_tokens = self.cached_tokens = self.preemptions = 0
        self.block_names: list[bytes] = []

    @property
    def history(self) -> list[int]:
        return self.prompt + self.answer

    @property
    def tokens(self) -> list[int]:
        """The tokens that must be in the cache before the next one can be chosen, but for the one that is fed
        for it."""
        return self.history[:self.length]

    @property
    def length(self) -> int:
        if self._block is not None:  # of a block that isn't complete nothing is kept
            return self._whole_blocks(len(self.prompt) + len(self.answer))
        return len(self.prompt) + max(0, len(self.answer) - 1)

    @property
    def prompt_end(self) -> int:
        """Where in the prompt the answer's first step begins."""
        return len(self.prompt) if self._block is None else self._whole_blocks(len(self.prompt))

    def chunk_end(self, start: int, end: int) -> int:
        """Where a chunk ends that begins at ``start`` and may end at ``end``: never within a block."""
        if self._block is None:
            return end
        return max(self._whole_blocks(end), min(start + self._block, self.length))

    def _whole_blocks(self, tokens: int) -> int:
        return tokens if self._block is None else tokens // self._block * self._block

    @property
    def begun(self) -> bool:
        """Whether something of the prompt was computed for it."""
        return self.computed_tokens > self.cached_tokens or self.preemptions > 0

    def tokens_between(self, start: int, end: int) -> list[int]:
        return self.prompt[start:end] if end <= len(self.prompt) else self.tokens[start:end]

    def codec_fault(self) -> QuantkitError | None:
        """Why a plugin's codec is to blame if the model's output isn't finite; ``None`` if it isn't."""
        return None if self.sequence < 0 else self.manager.cache.codec_fault(self.sequence)


class KVCacheManager:
    """Gives requests their sequences and pages.

    Args:
        spec: how keys and values are kept.
        memory: bytes that caches take at once; ``None``: they grow, and on a GPU take what is left.
        parts: caches that share them evenly; this one takes its part.
        sequences: requests that run side by side, at most.
        context: tokens of the longest one.
        chunk: prompt tokens after which policies act that act after every chunk.
        budget: the memory of prefixes, shared with other managers; ``None``: none are kept.
        drafts: what drafts take beside the cache, where the memory is what is left.

    Attributes:
        reservation: shares out its pages among requests, if its size is fixed.
        prefixes: keeps texts that were read; ``None``: nothing is kept.
        invariant: whether a text gives the same bits however it is cut into chunks.
        supports_mixed_batches: whether prompts and decoding requests go through the model together.
        supports_batched_prefill: whether several prompts do.
        needs_own_last_chunk: whether the last chunk of a prompt goes through the model by itself, because its
            policy then has work to do.
        prompts: those that are read side by side, at most.
        drafts: whether several tokens of a text that decodes may go through the model at once, without an
            effect on each other.
        texts: the texts that use it and haven't ended, those that wait included.
        prefix_queries, prefix_hits: prompt tokens that were looked up, and those of them that were found.

    Raises:
        UsageError: the setting doesn't fit the model, or the memory isn't enough.
    """

    def __init__(self, loaded: LoadedModel, spec: KVSpec, *, memory: int | None, parts: int, sequences: int,
                 context: int, chunk: int, budget: PrefixBudget | None,
                 drafts: DraftMemory = NO_DRAFTS) -> None:
        model = loaded.model
        self.cache = cache = KVCache(loaded.config, spec, loaded.dtype, model.device)
        model.check_cache(cache)
        check_blocks_in(cache, loaded.model.chunk_invariant(cache))
        self._chunk, self._rope = chunk, loaded.config.rope
        self._ahead = LOOKAHEAD if model.runs_ahead else 0
        if (diffusion := loaded.config.diffusion) is not None:
            self._ahead = 2 * diffusion.block_size  # a block whose keys aren't there yet, and the next one
            context = -(-context // diffusion.block_size) * diffusion.block_size
        self.invariant = model.chunk_invariant(cache)
        self.supports_mixed_batches = model.supports_mixed_batches and self.invariant
        self.supports_batched_prefill = model.supports_batched_prefill and self.invariant
        # an answer is as if it had been read
        self._one_text = model.decode_matches_prefill and self.invariant
        self.drafts = model.supports_drafts and self.invariant
        portion = prompt_portion(model, cache, chunk)
        if memory is None and (spare := spare_bytes(model, cache, sequences, portion)) is not None:
            memory = drafts.left_for_cache(spare, cache.bytes_per_token)
        policies = [layer.policy for layer in cache.layers]
        # a prompt whose policy acts at its end is held whole until then, for which there is memory once
        waits = any(not policy.keeps_all and policy.visible is None for policy in policies)
        self.prompts = sequences if memory is None or cache.divisible else 1 if waits else min(
            PROMPTS, sequences)
        self.reservation = None
        if memory is not None:
            forks = STATES if budget is not None and not cache.divisible else 0
            self.reservation = PageReservation(cache, memory // parts, sequences, context, portion,
                                               self.prompts, forks)
        self.prefixes = None if budget is None else build_prefix_cache(
            cache, budget, None if self.reservation is None else STATES)
        self.needs_own_last_chunk = any(
            policy.reread_prompt or (policy.acts_after("prefill_end") and policy.visible is None)
            for policy in policies)
        self._has_chunk_policy = any(policy.on_prefill == "chunk" for policy in policies)
        self.texts: set[CachedText] = set()
        self.prefix_queries = self.prefix_hits = 0

    @property
    def held_prefix_bytes(self) -> int:
        """Bytes that prefixes hold and no running request."""
        return 0 if self.prefixes is None else self.prefixes.held_bytes

    # -- requests come and go

    def check(self, tokens: int) -> None:
        """Raises UsageError: even alone a request of this length doesn't fit."""
        if self.reservation is not None:
            self.reservation.check(tokens)

    def begin(self, text: CachedText) -> bool:
        """Begin a request's sequence with the longest prefix that is there; returns whether there are pages
        for its text so far."""
        match = self._match(text)
        number, fits = self._add(text, match), True
        try:
            if self.reservation is not None:
                self.reservation.reserve(number, min(text.max_length, text.length + LOOKAHEAD))
                # what it begins with is its own by now, and isn't given up
                fits = self.reservation.make_room(self.prefixes)
        except BaseException:
            self._end(number)
            raise
        if not fits:
            self._end(number)
            return False
        text.sequence, text.computed_tokens = number, 0 if match is None else match.tokens
        if not text.preemptions:
            text.cached_tokens = text.computed_tokens
            if self.prefixes is not None and text.reuses_prefix:
                self.prefix_queries += len(text.prompt)
                self.prefix_hits += text.computed_tokens
        return True

    def extend(self, text: CachedText) -> bool:
        """Before a decoding request's next token: whether there is a page for it."""
        if (reservation := self.reservation) is None:
            return True
        number, limit = text.sequence, text.max_length
        least = min(limit, self.cache.seen(number) + 1 + self._ahead)
        return (reservation.reserved(number) >= least
                or reservation.extend(number, min(limit, least + LOOKAHEAD))
                or reservation.extend(number, least, self.prefixes))

    def room_for_draft(self, text: CachedText, count: int) -> int:
        """How many of ``count`` drafted tokens a decoding request can take beside its next token.

        A step ends where a policy acts, and where queries that are accumulated together end: what comes then
        depends on which tokens were kept.
        """
        cache, number = self.cache, text.sequence
        sequence = cache.sequence(number)
        for layer, state in zip(cache.layers, sequence.layers):
            if (interval := layer.policy.decode_interval) is not None:
                count = min(count, interval - state.steps % interval - 1)
        if (block := block_of(cache, ["decode"])) is not None:
            count = min(count, block - cache.seen(number) % block - 1)
        if count > 0 and (reservation := self.reservation) is not None:
            room = reservation.reserved(number) - cache.seen(number) - 1 - self._ahead
            if count > room and not reservation.extend(
                    number, min(text.max_length, cache.seen(number) + 1 + count + self._ahead)):
                count = room
        return max(count, 0)

    def restart(self, text: CachedText) -> None:
        """A request that hasn't computed anything itself: begin with a longer prefix if there is one now."""
        match = self._match(text)
        if match is None or match.tokens <= text.computed_tokens:
            return
        before, text.sequence = text.sequence, self._add(text, match)
        if self.reservation is not None:
            self.reservation.reserve(text.sequence, self.reservation.reserved(before))
        self._end(before)
        self.prefix_hits += match.tokens - text.computed_tokens
        text.computed_tokens = text.cached_tokens = match.tokens

    def prompt_ended(self, text: CachedText) -> None:
        """A request's prompt was read, and its policy has done what it does then."""
        if self.reservation is not None:
            self.reservation.shrink_to_answer(text.sequence)
        self.keep_prefix(text)

    def keep_prefix(self, text: CachedText, resumes: bool = False) -> None:
        """Keep what was computed of a request's text so far, if another text may begin with it, or this one
        ``resumes`` later."""
        if self.prefixes is None or text.sequence < 0 or not text.reuses_prefix:
            return
        cache, number = self.cache, text.sequence
        seen = min(cache.seen(number), len(text.history))
        if not (self._one_text or (resumes and self.drafts and cache.divisible)):
            seen = min(seen, len(text.prompt))
        if not self.invariant:  # a chunk that wasn't whole would have had other bits in a longer text
            seen = seen // self._chunk * self._chunk
        if seen < PAGE or not cache.reusable(number):
            return
        names = block_names(self._marked(text)[:seen], text.block_names, self._salt(text))
        text.block_names = max(names, text.block_names, key=len)
        self.prefixes.insert(names[:seen // PAGE], number)
        # pages that a state holds too must be copied before they are written to
        if self.reservation is not None and not cache.divisible and not self.reservation.make_room(
                self.prefixes):
            self.prefixes.clear()

    def keep_beginning(self, other: CachedText, text: CachedText) -> None:
        """Keep what was read so far of another's prompt if a request that comes now begins like it."""
        if self.prefixes is not None and self.cache.divisible and text.reuses_prefix and other.begun and (
                self._names(other)[:1] == self._names(text)[:1] != []):
            self.keep_prefix(other)

    def preempt(self, text: CachedText, *, keep: bool = True) -> None:
        """A request gives up its pages and waits again; arguments as for :meth:`free`."""
        self.free(text, keep=keep, resumes=True)
        text.computed_tokens = 0
        text.preemptions += 1

    def free(self, text: CachedText, *, keep: bool = True, resumes: bool = False) -> None:
        """Give back a request's pages.

        Args:
            keep: keep what others may begin with. Not after a step that failed in the middle.
            resumes: it will go on later, and may begin with its own.
        """
        if text.sequence < 0:
            return
        try:
            if keep:
                self.keep_prefix(text, resumes)
        finally:  # whatever fails there, the pages are given back
            number, text.sequence = text.sequence, -1
            self._end(number)

    # -- chunks

    def chunk_end(self, text: CachedText, limit: int) -> int:
        """Where a request's next chunk ends, of at most ``limit`` tokens.

        A chunk ends where a policy acts, where a state is kept for other texts, and, if results depend on
        chunks, always at the same places. What a request had generated before it was preempted is decoded
        again in chunks; one token at a time where results depend on that.
        """
        start = text.computed_tokens
        length = text.prompt_end
        total = text.length
        if start >= length:
            interval = self.cache.policy.decode_interval
            if not self.drafts:
                return start + 1
            steps = limit if interval is None else interval - (start - length) % interval
            return text.chunk_end(start, min(total, start + limit, start + steps))
        boundary = (start // self._chunk + 1) * self._chunk
        if not self.invariant:
            return min(length, boundary)
        end = min(length, start + limit)
        keeps_states = self.prefixes is not None and not self.cache.divisible
        if self._has_chunk_policy or keeps_states:
            end = min(end, boundary)
        if keeps_states and start < (last := _last_block(text)):
            end = min(end, last)
        return text.chunk_end(start, end)

    def advance(self, text: CachedText, end: int, is_awaited: bool) -> None:
        """A chunk went through the model: keep what another text can begin with. Blocks can be kept at the
        prompt's end, all at once, if nobody waits for them.

        Args:
            end: tokens of it that are computed now.
            is_awaited: whether another request waits for its prompt.
        """
        text.computed_tokens = end
        if self.prefixes is None or end >= text.prompt_end:
            return
        if is_awaited if self.cache.divisible else (end % self._chunk == 0 or end == _last_block(text)):
            self.keep_prefix(text)

    def should_wait_for(self, text: CachedText, other: CachedText) -> bool:
        """Whether a request of which nothing is computed should wait because another's prompt, which is being
        read, begins like its own and that part isn't read yet: it can then begin behind that."""
        if self.prefixes is None or not text.reuses_prefix or not other.reuses_prefix:
            return False
        names, others = self._names(text), self._names(other)
        shared = 0
        for name, other_name in zip(names, others):
            if name != other_name:
                break
            shared += 1
        usable = min(shared * PAGE, len(text.prompt) - 1, len(other.prompt))
        last = _last_block(other)  # where its last state is kept
        if not self.invariant or (not self.cache.divisible and usable < last):
            usable = usable // self._chunk * self._chunk
        elif not self.cache.divisible:
            usable = last
        return usable >= text.computed_tokens + PAGE and other.computed_tokens < usable

    def _match(self, text: CachedText) -> PrefixMatch | None:
        """The longest prefix of a request's text so far. Its last token must be computed for its logits, if
        there is no answer yet."""
        if self.prefixes is None or not text.reuses_prefix:
            return None
        limit, names = text.prompt_end - 1, self._names(text)
        if text.answer and self.cache.divisible and self.drafts:
            limit = text.length
            names = text.block_names = block_names(self._marked(text)[:limit], names, self._salt(text))
        return self.prefixes.match(names, limit, PAGE if self.invariant else self._chunk)

    def _names(self, text: CachedText) -> list[bytes]:
        """Of a request's blocks, those of its prompt at least."""
        if len(text.block_names) < len(text.prompt) // PAGE:
            text.block_names = block_names(text.prompt, (), self._salt(text))
        return text.block_names

    def _marked(self, text: CachedText) -> list[int]:
        """The ids that its blocks are named by. Where a token has other bits decoded than read, its answer's
        are marked: nobody begins with them but this text, when it resumes, or one with the same answer."""
        return text.history if self._one_text else [*text.prompt, *(~token for token in text.answer)]

    def _salt(self, text: CachedText) -> bytes:
        """What its blocks' names depend on beside its tokens. Keys of a text whose rotation is for long ones
        differ, and who has another salt shares nothing."""
        rope = self._rope
        long = rope.kind == "longrope" and text.max_length > rope.original_max_positions
        return (b"long" if long else b"") + text.salt

    def _add(self, text: CachedText, match: PrefixMatch | None) -> int:
        """Begin a sequence for a request, with what was found for it."""
        if match is None or self.prefixes is None:
            return self.cache.add(text.max_length)
        return self.prefixes.take(match, text.max_length)

    def _end(self, number: int) -> None:
        if self.reservation is not None:
            self.reservation.release(number)
        if self.prefixes is not None:
            self.prefixes.release(number)
        self.cache.free([number])


def check_blocks_in(cache: KVCache, has_kernel: bool = True) -> None:
    """Raises UsageError: blocks can't be written with this KV setting.

    Args:
        cache: of the model.
        has_kernel: whether the model's program runs over it.
    """
    policy, diffusion = cache.policy, cache.config.diffusion
    if diffusion is None:
        return
    size, why = diffusion.block_size, None
    if policy.tracks_queries("decode"):
        why = "it looks at queries while an answer is written"
    elif policy.tracks and policy.query_window % size:
        why = "it looks at the queries of a part of a block"
    elif policy.visible is not None and policy.visible[0] < size:
        why = "its window is shorter than a block"
    elif not has_kernel:
        why = "there is no kernel for it"
    if why is not None:
        raise UsageError(f"the KV setting {cache.spec} isn't for blocks of {size} tokens", why=why,
                         next=f"give --kv int8, or --kv 'window({max(1024, 4 * size)})'")


def _last_block(text: CachedText) -> int:
    """Where a prompt's last whole block ends that has a token behind it: that one must be computed."""
    return (len(text.prompt) - 1) // PAGE * PAGE
