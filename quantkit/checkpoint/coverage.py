"""Reports how well a calibration text covers a model, before any layer is quantized."""

from __future__ import annotations

from pydantic import Field

from quantkit.support.frozen import Frozen

FEWEST_DISTINCT = 0.01
"""Of the vocabulary: a text with fewer different tokens says little about the rest."""
SHARED = 0.2
"""Of a window's 13-grams: from here on it counts as taken from the other text, as in Llama 2,
https://arxiv.org/abs/2307.09288, appendix A.6."""


class SourceFile(Frozen):
    """A file that calibration text was read from, by a name without this machine's folders."""

    name: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    revision: str | None = None


class Overlap(Frozen):
    """What the windows share with a text that models are evaluated on.

    Attributes:
        text: the name of the text.
        windows: the number of windows that share at least a fifth of their 13-grams with it.
        largest: the largest share of one window.
    """

    text: str
    windows: int = Field(ge=0)
    largest: float = Field(ge=0, le=1)


class Coverage(Frozen):
    """What a model gets to see.

    Attributes:
        documents: documents that the tokens were chosen from.
        chats: documents that are conversations.
        available: tokens that there were.
        used: tokens in the windows.
        distinct: different tokens among those.
        vocabulary: tokens that the model knows.
        widest: inputs of the widest calibrated Linear.
        short: documents of fewer tokens than a window.
        cut: documents whose end had no room in their window.
        lost: tokens of those ends.
        left_out: conversations in which someone writes a special token of the model.
        unusable: rows that are broken, of no known form, or refused by the chat template.
        unusable_first: the fault of the first of these rows.
        avoided: windows or documents left out for what they share with texts to avoid.
        same: windows equal to an earlier one.
        similar: other windows that repeat earlier ones by half.
        overlaps: with texts that models are evaluated on.
        fallback: the text that was asked for and can't be used, and why.
    """

    documents: int
    chats: int = 0
    available: int
    used: int = 0
    distinct: int = 0
    vocabulary: int
    widest: int
    short: int = 0
    cut: int = 0
    lost: int = 0
    left_out: int = 0
    unusable: int = 0
    unusable_first: str | None = None
    avoided: int = 0
    same: int = 0
    similar: int = 0
    overlaps: tuple[Overlap, ...] = Field(default=(), strict=False)
    fallback: str | None = None

    def lines(self) -> list[str]:
        """The report, a sentence each."""
        share = self.distinct / self.vocabulary
        facts = [f"{self.used:,} of {self.available:,} tokens, from {self.documents:,} "
                 + ("documents" if self.documents != 1 else "document")
                 + (f" ({self.chats:,} conversations)" if self.chats else ""),
                 f"{self.distinct:,} different tokens, {share:.1%} of the vocabulary",
                 f"{self.same:,} windows equal an earlier one, {self.similar:,} repeat earlier ones by half"]
        if self.cut:
            facts.append(f"{self.cut:,} documents cut at a window's end, {self.lost:,} tokens of them lost")
        if self.short:
            facts.append(f"{self.short:,} documents shorter than a window")
        if self.left_out:
            facts.append(f"{self.left_out:,} conversations left out: a special token is written in them")
        if self.unusable:
            facts.append(f"{self.unusable:,} rows left out: they can't be used")
        if self.avoided:
            facts.append(f"{self.avoided:,} left out for what they share with texts to avoid")
        facts += [f"up to {overlap.largest:.1%} of a window's 13-grams are in {overlap.text}"
                  for overlap in self.overlaps]
        return facts

    def warnings(self, length: int) -> list[str]:
        """What is bad about it, a sentence each; ``length`` is that of a window."""
        warnings = self.row_warnings()
        if self.used < self.widest:
            warnings.append(f"{self.used:,} calibration tokens are fewer than the {self.widest:,} inputs of "
                            "the widest layer: its Hessian has no full rank, and damping decides the rest; "
                            f"--windows {-(-self.widest // length)} would do")
        if self.distinct < FEWEST_DISTINCT * self.vocabulary:
            warnings.append(f"the calibration text has {self.distinct:,} different tokens, "
                            f"{self.distinct / self.vocabulary:.2%} of the vocabulary: more text covers more")
        if self.same or self.similar:
            warnings.append(f"of the calibration windows {self.same} are equal to an earlier one and "
                            f"{self.similar} repeat earlier ones by half: such text counts twice")
        if self.lost > self.used:
            warnings.append(f"{self.lost:,} tokens were cut off at windows' ends, more than the "
                            f"{self.used:,} that are used: a larger --window keeps more of each document")
        return warnings + self.overlap_warnings("calibration")

    def row_warnings(self) -> list[str]:
        """That rows can't be used, a sentence."""
        rows = "1 row is" if self.unusable == 1 else f"{self.unusable:,} rows are"
        return [f"{rows} left out of the calibration data, where --strict would stop; the first: "
                f"{self.unusable_first}"] if self.unusable else []

    def overlap_warnings(self, kind: str) -> list[str]:
        """What windows of this kind share with texts that models are evaluated on, a sentence each."""
        return [f"{overlap.windows} {kind} windows share up to {overlap.largest:.0%} of their 13-grams with "
                f"{overlap.text}: measured on that, the result looks better than it is"
                for overlap in self.overlaps if overlap.windows]
