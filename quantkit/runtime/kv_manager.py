"""Keys and values of the requests with one KV setting: their cache, their pages, the prefixes they share."""

from __future__ import annotations

from quantkit.kv.base import PAGE
from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.prefix import PrefixBudget, PrefixMatch, block_names, build_prefix_cache
from quantkit.kv.spec import KVSpec
from quantkit.memory.kv import LOOKAHEAD
from quantkit.memory.serving import spare_bytes
from quantkit.runtime.loader import LoadedModel
from quantkit.runtime.page_reservation import PageReservation
from quantkit.runtime.request import Request

STATES = 8
"""States that a prefix cache of a fixed size holds where texts can't be taken up at every block."""


class KVCacheManager:
    """Gives requests their sequences and pages.

    Args:
        loaded: the model.
        spec: how keys and values are kept.
        memory: bytes that caches take at once; ``None``: they grow, and on a GPU take what is left.
        parts: caches that share them evenly; this one takes its part.
        sequences: requests that run side by side, at most.
        context: tokens of the longest one.
        chunk: prompt tokens that go through the model at once; policies that act after every chunk act after
            this number of tokens.
        budget: of prefixes that are kept, shared with other managers; ``None``: none are kept.

    Attributes:
        cache: the KV cache.
        reservation: which request has how many of its pages, if its size is fixed.
        prefixes: what is kept of texts that were read; ``None``: nothing.
        invariant: whether a text gives the same bits however it is cut into chunks.
        mixes: whether prompts and decoding requests go through the model together.
        ends_alone: whether the last chunk of a prompt goes through the model by itself, because its policy
            then has work to do.
        one_prompt: whether one prompt is read at a time.
        drafts: whether several tokens of a text that decodes may go through the model at once, without an
            effect on each other.
        requests: that use it and haven't ended, those that wait included.
        prefix_queries, prefix_hits: prompt tokens that were looked up, and those of them that were found.

    Raises:
        UsageError: the setting doesn't fit the model, or the memory isn't enough.
    """

    def __init__(self, loaded: LoadedModel, spec: KVSpec, *, memory: int | None, parts: int, sequences: int,
                 context: int, chunk: int, budget: PrefixBudget | None) -> None:
        model = loaded.model
        self.cache = cache = KVCache(loaded.config, spec, loaded.dtype, model.device)
        model.check_cache(cache)
        self._chunk, self._rope = chunk, loaded.config.rope
        self._ahead = LOOKAHEAD if model.runs_ahead else 0
        self.invariant = model.chunk_invariant(Batch(cache, []))
        self.mixes = model.mixes and self.invariant
        self._one_text = model.decodes_as_it_reads and self.invariant  # an answer is as if it had been read
        self.drafts = self.mixes and self._one_text
        if memory is None:
            memory = spare_bytes(model, cache, sequences, chunk)
        self.reservation = None
        if memory is not None:
            self.reservation = PageReservation(cache, memory // parts, sequences, context, chunk,
                                               STATES if budget is not None and not cache.divisible else 0)
        self.prefixes = None if budget is None else build_prefix_cache(
            cache, budget, None if self.reservation is None else STATES)
        policies = [layer.policy for layer in cache.layers]
        self.ends_alone = any(policy.reread_prompt or (policy.acts_after("prefill_end")
                                                       and policy.visible is None) for policy in policies)
        self.one_prompt = self.reservation is not None and not cache.divisible
        self._acts_on_chunks = any(policy.on_prefill == "chunk" for policy in policies)
        self.requests: set[Request] = set()
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

    def begin(self, request: Request) -> bool:
        """Begin a request's sequence with the longest prefix that is there; returns whether there are pages
        for its text so far."""
        match = self._match(request)
        number, fits = self._add(request, match), True
        try:
            if self.reservation is not None:
                self.reservation.reserve(number, min(request.max_length, request.length + LOOKAHEAD))
                # what it begins with is its own by now, and isn't given up
                fits = self.reservation.make_room(self.prefixes)
        except BaseException:
            self._end(number)
            raise
        if not fits:
            self._end(number)
            return False
        request.sequence, request.computed_tokens = number, 0 if match is None else match.tokens
        if not request.preemptions:
            request.result.cached_tokens = request.computed_tokens
            if self.prefixes is not None and request.reuses_prefix:
                self.prefix_queries += len(request.prompt)
                self.prefix_hits += request.computed_tokens
        return True

    def extend(self, request: Request) -> bool:
        """Before a decoding request's next token: whether there is a page for it."""
        if (reservation := self.reservation) is None:
            return True
        number, limit = request.sequence, request.max_length
        least = min(limit, self.cache.seen(number) + 1 + self._ahead)
        return (reservation.reserved(number) >= least
                or reservation.extend(number, min(limit, least + LOOKAHEAD))
                or reservation.extend(number, least, self.prefixes))

    def room_for_draft(self, request: Request, count: int) -> int:
        """How many of ``count`` drafted tokens a decoding request can take beside its next token.

        A step ends where a policy acts, and where queries that are accumulated together end: what comes then
        depends on which tokens were kept.
        """
        cache, number = self.cache, request.sequence
        sequence = cache.sequence(number)
        for layer, state in zip(cache.layers, sequence.layers):
            if (interval := layer.policy.decode_interval) is not None:
                count = min(count, interval - state.steps % interval - 1)
        if (block := Batch(cache, [number], "decode").block) is not None:
            count = min(count, block - cache.seen(number) % block - 1)
        if count > 0 and (reservation := self.reservation) is not None:
            room = reservation.reserved(number) - cache.seen(number) - 1
            if count > room and not reservation.extend(
                    number, min(request.max_length, cache.seen(number) + 1 + count)):
                count = room
        return max(count, 0)

    def restart(self, request: Request) -> None:
        """A request that hasn't computed anything itself: begin with a longer prefix if there is one now."""
        match = self._match(request)
        if match is None or match.tokens <= request.computed_tokens:
            return
        before, request.sequence = request.sequence, self._add(request, match)
        if self.reservation is not None:
            self.reservation.reserve(request.sequence, self.reservation.reserved(before))
        self._end(before)
        self.prefix_hits += match.tokens - request.computed_tokens
        request.computed_tokens = request.result.cached_tokens = match.tokens

    def prompt_ended(self, request: Request) -> None:
        """A request's prompt was read, and its policy has done what it does then."""
        if self.reservation is not None:
            self.reservation.shrink_to_answer(request.sequence)
        self.keep_prefix(request)

    def keep_prefix(self, request: Request) -> None:
        """Keep what was computed of a request's text so far, if another text may begin with it."""
        if self.prefixes is None or request.sequence < 0 or request.spoiled or not request.reuses_prefix:
            return
        cache, number = self.cache, request.sequence
        seen = min(cache.seen(number), len(request.history))
        if not self._one_text:
            seen = min(seen, len(request.prompt))
        if not self.invariant:  # a chunk that wasn't whole would have had other bits in a longer text
            seen = seen // self._chunk * self._chunk
        if seen < PAGE or not cache.reusable(number):
            return
        names = block_names(request.history[:seen], request.block_names, self._salt(request))
        request.block_names = max(names, request.block_names, key=len)
        self.prefixes.insert(names[:seen // PAGE], number)
        # pages that a state holds too must be copied before they are written to
        if self.reservation is not None and not cache.divisible and not self.reservation.make_room(
                self.prefixes):
            self.prefixes.clear()

    def keep_beginning(self, other: Request, request: Request) -> None:
        """Keep what was read so far of another's prompt if a request that comes now begins like it."""
        if self.prefixes is not None and self.cache.divisible and request.reuses_prefix and other.begun and (
                self._names(other)[:1] == self._names(request)[:1] != []):
            self.keep_prefix(other)

    def free(self, request: Request) -> None:
        """A request has ended, or waits again: give back its pages."""
        if request.sequence < 0:
            return
        try:
            self.keep_prefix(request)
        finally:  # whatever fails there, the pages are given back
            number, request.sequence = request.sequence, -1
            self._end(number)

    # -- chunks

    def chunk_end(self, request: Request, limit: int) -> int:
        """Where a request's next chunk ends, of at most ``limit`` tokens.

        A chunk ends where a policy acts, where a state is kept for other texts, and, if results depend on
        chunks, always at the same places. What a request had generated before it was preempted is decoded
        again in chunks; one token at a time where results depend on that.
        """
        start, length, total = request.computed_tokens, len(request.prompt), request.length
        if start >= length:
            interval = self.cache.policy.decode_interval
            if not self._one_text:
                return start + 1
            steps = limit if interval is None else interval - (start - length) % interval
            return min(total, start + limit, start + steps)
        boundary = (start // self._chunk + 1) * self._chunk
        if not self.invariant:
            return min(length, boundary)
        end = min(length, start + limit)
        keeps_states = self.prefixes is not None and not self.cache.divisible
        if self._acts_on_chunks or keeps_states:
            end = min(end, boundary)
        if keeps_states and start < (last := _last_block(request)):
            end = min(end, last)
        return end

    def after_chunk(self, request: Request) -> None:
        """A chunk of a prompt went through the model: keep what another text can begin with. Blocks can be
        kept at the prompt's end, all at once, if nobody waits for them."""
        at = request.computed_tokens
        if self.prefixes is None or at >= len(request.prompt):
            return
        if request.awaited if self.cache.divisible else (at % self._chunk == 0 or at == _last_block(request)):
            self.keep_prefix(request)

    def waits_for(self, request: Request, other: Request) -> bool:
        """Whether a request of which nothing is computed should wait because another's prompt, which is being
        read, begins like its own and that part isn't read yet: it can then begin behind that."""
        if self.prefixes is None or not request.reuses_prefix or not other.reuses_prefix:
            return False
        names, others = self._names(request), self._names(other)
        shared = 0
        for name, other_name in zip(names, others):
            if name != other_name:
                break
            shared += 1
        usable = min(shared * PAGE, len(request.prompt) - 1, len(other.prompt))
        last = _last_block(other)  # where its last state is kept
        if not self.invariant or (not self.cache.divisible and usable < last):
            usable = usable // self._chunk * self._chunk
        elif not self.cache.divisible:
            usable = last
        return usable >= request.computed_tokens + PAGE and other.computed_tokens < usable

    def _match(self, request: Request) -> PrefixMatch | None:
        """The longest prefix of a request's text so far. Its last token must be computed for its logits, if
        there is no answer yet."""
        if self.prefixes is None or not request.reuses_prefix:
            return None
        limit, names = len(request.prompt) - 1, self._names(request)
        if request.result.token_ids and self.cache.divisible and self._one_text:
            limit = request.length
            names = request.block_names = block_names(request.tokens, names, self._salt(request))
        return self.prefixes.match(names, limit, PAGE if self.invariant else self._chunk)

    def _names(self, request: Request) -> list[bytes]:
        """Of a request's blocks, those of its prompt at least."""
        if len(request.block_names) < len(request.prompt) // PAGE:
            request.block_names = block_names(request.prompt, (), self._salt(request))
        return request.block_names

    def _salt(self, request: Request) -> bytes:
        """What its blocks' names depend on beside its tokens. Keys of a text whose rotation is for long ones
        differ, and who has another salt shares nothing."""
        rope = self._rope
        long = rope.kind == "longrope" and request.max_length > rope.original_max_positions
        return (b"long" if long else b"") + request.cache_salt

    def _add(self, request: Request, match: PrefixMatch | None) -> int:
        """Begin a sequence for a request, with what was found for it."""
        if match is None or self.prefixes is None:
            return self.cache.add(request.max_length)
        return self.prefixes.take(match, request.max_length)

    def _end(self, number: int) -> None:
        """Give back a sequence's pages."""
        if self.reservation is not None:
            self.reservation.release(number)
        if self.prefixes is not None:
            self.prefixes.release(number)
        self.cache.free([number])


def _last_block(request: Request) -> int:
    """Where a prompt's last whole block ends that has a token behind it: that one must be computed."""
    return (len(request.prompt) - 1) // PAGE * PAGE
