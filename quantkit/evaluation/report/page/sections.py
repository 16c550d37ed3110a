"""The page's sections, each there only if its data is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quantkit.evaluation.effect import NATS
from quantkit.evaluation.report import quality_grids, speed_grids
from quantkit.evaluation.report.base import TextGrid, VariantLook, pair, spread, variant_looks, withheld
from quantkit.evaluation.report.charts import frontier, quality, roofline, speed
from quantkit.evaluation.report.charts.base import Spec
from quantkit.evaluation.report.frontier import frontiers
from quantkit.evaluation.report.headline import recommended
from quantkit.evaluation.report.page.passage import ShadedText, largest, shaded, summary
from quantkit.evaluation.result import EvalResult, short_names

_UNFOLDED = 5
"""Rows of what is looked at least that are shown without being asked for."""


@dataclass(frozen=True)
class PageChart:
    """A chart on the page: its identifier, its specification and what stands above it."""

    identifier: str
    spec: Spec
    caption: str


@dataclass(frozen=True)
class PagePassage:
    """A text as a variant sees it: whose name it has, sentences about it, its tokens, and a table."""

    name: str
    texts: Sequence[str]
    text: ShadedText
    grids: Sequence[TextGrid]


@dataclass(frozen=True)
class PageSection:
    """A part of the page with a title.

    Attributes:
        identifier: in the page's address.
        title: the title of the section.
        texts: sentences below the title.
        charts, grids: below them.
        passages: a text by token, a variant each; one is shown at a time.
        answers: names and generated texts.
        items: the items of a list.
        folded: whether grids and answers are shown when they are asked for.
    """

    identifier: str
    title: str
    texts: Sequence[str] = ()
    charts: Sequence[PageChart] = ()
    grids: Sequence[TextGrid] = ()
    passages: Sequence[PagePassage] = ()
    answers: Sequence[tuple[str, str]] = ()
    items: Sequence[str] = ()
    folded: bool = False

    @property
    def empty(self) -> bool:
        """Whether it has nothing but a title and sentences."""
        return not (self.charts or self.grids or self.passages or self.answers or self.items)


def sections(result: EvalResult) -> list[PageSection]:
    """All that have something to show, in the order of the page."""
    looks = variant_looks(result.rows)
    return [section for section in _all(result, looks) if not section.empty]


def _all(result: EvalResult, looks: Sequence[VariantLook]) -> Iterator[PageSection]:
    yield PageSection("variants", "All variants", [
        "The first variant is the reference. Below a value is its interval: a 95% bootstrap over windows for "
        "quality, the range of the timed runs for speed. Cost is the KL in a word, by the upper end of its "
        f"interval: negligible below {NATS[0]:g}, small below {NATS[1]:g}, visible below {NATS[2]:g}, else "
        "broken. Grey: another variant is closer to the reference and also faster or smaller.",
        *withheld(result)], grids=[quality_grids.variants(result)] if result.rows else [])
    yield _frontier(result, looks)
    yield PageSection("texts", "Quality by text",
                      charts=_charts(("texts", quality.texts_spec(result, looks), "KL on each text")),
                      grids=_grids(quality_grids.by_text(result)))
    yield PageSection("differences", "What the differences mean", [
        "Each variant is compared with the reference item by item. Indistinguishable: the 90% interval of "
        "the difference lies within ε of zero (two one-sided tests at 5%). Better and worse: the 95% "
        "interval excludes zero; where a metric has words, they say how much worse. p says how sure a "
        "difference is, and nothing of its size. Undecided: neither; more items could tell.",
        *(f"{text}." for text in quality_grids.floors(result))],
        grids=_grids(quality_grids.differences(result), _exact(result)))
    yield PageSection("tasks", "Tasks", charts=_charts(
        ("tasks", quality.tasks_spec(result, looks),
         "Difference to the reference over the same items, with 95% intervals")),
        grids=_grids(quality_grids.tasks(result)))
    yield from _speed(result, looks)
    yield PageSection("sensitivity", "Layer sensitivity", [
        "What 4 bits cost in each Linear alone, in nats of KL. The brighter, the more."],
        charts=_charts(("sensitivity", quality.sensitivity_spec(result), "Layers and kinds of Linears")))
    advice = recommended(result)
    taken = short_names(result.rows)[advice.index] if advice else ""
    diffs = sorted((diff for diff in (result.diff, *result.other_diffs) if diff is not None),
                   key=lambda diff: diff.candidate != taken)
    yield PageSection("diff", "Token by token", passages=[
        PagePassage(diff.candidate, summary(diff), shaded(diff), _grids(largest(diff))) for diff in diffs])
    folded = len(result.rows) > _UNFOLDED
    yield PageSection("kernels", "Kernels", grids=_grids(_kernels(result)), folded=folded)
    yield PageSection("answers", f"Answers to “{result.question or ''}”", folded=folded, answers=[
        (name, row.answer.strip()) for name, row in zip(short_names(result.rows), result.rows) if row.answer])
    yield PageSection("protocol", "Protocol", items=result.protocol.lines())


def _speed(result: EvalResult, looks: Sequence[VariantLook]) -> Iterator[PageSection]:
    """Decoding, prefill, memory and the roofline."""
    yield PageSection("decode", "Decode", charts=_charts(
        ("decode-by-batch", speed.by_batch(result, looks),
         "Tokens a second by batch, at the shortest context"),
        ("decode-by-context", speed.by_context(result, looks), "Tokens a second by context"),
        ("gaps", speed.gaps(result, looks),
         "Gaps between two tokens of an answer: median, and a line to the 99th percentile")),
        grids=[*speed_grids.decode_grids(result), *_grids(speed_grids.gaps(result))])
    yield PageSection("prefill", "Prefill", charts=_charts(
        ("prefill", speed.prefill(result, looks), "Prompt tokens a second"),
        ("first-token", speed.first_token(result, looks), "Time to the first token")),
        grids=speed_grids.prefill_grids(result))
    yield PageSection("memory", "Memory", ["Weights, workspace and the cache of one sequence, by context."],
                      _charts(("memory", speed.memory(result, looks), "Bytes by context")),
                      _grids(speed_grids.memory(result)))
    yield PageSection("roofline", "Roofline", [
        "Each point is an operator of one decoder step at a number of rows: tokens that go through it at "
        "once. Left of the ridge it can only be as fast as memory is read, right of it as fast as the "
        "arithmetic goes. The line above a point ends where it was predicted to be."],
        _charts(*((f"roofline-{number}", roofline.roofline_spec(model), f"Roofline of {model.label}")
                  for number, model in enumerate(result.roofline, 1))),
        [speed_grids.roofline_grid(model) for model in result.roofline])


def _frontier(result: EvalResult, looks: Sequence[VariantLook]) -> PageSection:
    """Both pictures, and who is missing in them."""
    pictures = frontiers(result)
    drawn = {point.index for picture in pictures for point in picture.points}
    missing = [look.name for index, look in enumerate(looks) if index not in drawn]
    texts = ["A variant on the line has no other that is at least as close to the reference and as fast (or "
             "as small) and better in one of the two. Hollow points are beaten by another. Point at a mark "
             "for its numbers."]
    texts += [picture.floor.sentence for picture in pictures[:1]]
    if missing:
        texts.append("Not drawn, because KL or the other value is missing or not finite: "
                     f"{', '.join(missing)}.")
    return PageSection("frontier", "The frontier", texts, [
        PageChart(f"frontier-{picture.key}", frontier.frontier_spec(result, picture, looks),
                  f"KL against {picture.title} ({'right' if picture.higher else 'left'} and down is better)")
        for picture in pictures])


def _charts(*charts: tuple[str, Spec | None, str]) -> list[PageChart]:
    return [PageChart(name, spec, caption) for name, spec, caption in charts if spec is not None]


def _grids(*grids: TextGrid | None) -> list[TextGrid]:
    return [grid for grid in grids if grid is not None]


def _exact(result: EvalResult) -> TextGrid | None:
    """KL from float32 arithmetic, and what of it is above the reference's own."""
    exact = quality_grids.exact_rows(result)
    if not exact:
        return None
    rows = [(row.name, pair(*spread(row.kl)), "–" if row.above is None else quality_grids.signed(row.above))
            for row in exact]
    return TextGrid("KL from the reference in float32 arithmetic",
                    ("variant", "KL\nnats", "above the\nnoise floor"), tuple(rows),
                    ("The first is the noise floor: what the reference's own arithmetic costs.",))


def _kernels(result: EvalResult) -> TextGrid | None:
    """How many Linears each kernel runs."""
    phases = list(dict.fromkeys(phase for row in result.rows for phase in row.kernels))
    if not phases:
        return None
    rows = tuple((name, *(speed_grids.kernel_counts(row, phase) for phase in phases))
                 for name, row in zip(short_names(result.rows), result.rows))
    return TextGrid("Linears by kernel", ("variant", *phases), rows)
