"""The evaluation of one variant as a section of a model card, with the metadata that the hub reads."""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.checkpoint.card_block import CLOSING, OPENING, CardBlock
from quantkit.checkpoint.reader import read_manifest
from quantkit.evaluation.keys import PER_ITEM, PER_RUN
from quantkit.evaluation.metric_table import MetricInfo
from quantkit.evaluation.paired import DISTANCES, differences
from quantkit.evaluation.report import quality_grids
from quantkit.evaluation.report.base import Reporter, head, megabytes, number, shown
from quantkit.evaluation.result import EvalResult, ModelResult, PairedDifference, short_names
from quantkit.kv.spec import setting_of
from quantkit.support.errors import UsageError

if TYPE_CHECKING:
    from huggingface_hub import EvalResult as HubResult

_VERDICTS = {"indistinguishable": "indistinguishable within ε", "better": "better", "worse": "worse",
             "undecided": "undecided"}
_UNSAFE = re.compile(r"[^\w ./:;+=,()@%-]")
_TASK = "text-generation"


def card_block(result: EvalResult, row: ModelResult) -> CardBlock:
    """The evaluation of a row beside the reference, which is the result's first row."""
    reference = result.rows[0]
    name = _plain(short_names(result.rows)[_index(result, row)])
    infos = {key: info for key, info in result.measured.items() if key in row.metrics}
    beside = row is not reference
    lines = ["## Evaluation", "", _introduction(result, row, name), "",
             "| | this model |" + (f" {_plain(short_names(result.rows)[0])} |" if beside else ""),
             "|---|---|" + ("---|" if beside else "")]
    rows = [("file", megabytes(row.file_bytes), megabytes(reference.file_bytes)),
            ("bits a weight", number(row.bits_per_weight), number(reference.bits_per_weight))]
    rows += [(_title(info), _cell(row, key, info), _cell(reference, key, info))
             for key, info in infos.items() if beside or key not in DISTANCES]
    lines += [f"| {' | '.join(cells[:3 if beside else 2])} |" for cells in rows]
    if beside and (tests := _tests(result, row)):
        lines += ["", "Paired with the reference, window by window and item by item:", "",
                  "| | difference | 95% | p | |", "|---|---|---|---|---|", *tests]
    lines += ["", *(f"- {_plain(line)}" for line in result.protocol.lines())]
    return CardBlock(_metadata(result, row, name, infos), "\n".join(lines) + "\n")


def block_of_checkpoint(result: EvalResult, folder: Path) -> CardBlock:
    """The evaluation of the checkpoint in a folder.

    The row must be of its manifest. Of several, with KV settings each, it is that with the checkpoint's own
    setting, else the first.

    Raises:
        CheckpointError: the folder is no checkpoint of quantkit's.
        UsageError: the result has no row of it.
    """
    manifest = read_manifest(folder)
    digest = hashlib.sha256(manifest.to_bytes()).hexdigest()
    rows = [row for row in result.rows if row.manifest_sha256 == digest]
    if not rows:
        known = [f"{name} ({row.manifest_sha256[:12]})"
                 for name, row in zip(short_names(result.rows), result.rows) if row.manifest_sha256]
        raise UsageError(f"the results have no row of {folder}",
                         why=f"its manifest is {digest[:12]}; evaluated: {', '.join(known) or 'none'}"[:300],
                         next="quantkit eval MODEL " + str(folder) + " --out OUT")
    saved = str(setting_of(manifest.recipe))
    return card_block(result, next((row for row in rows if row.kv in (None, saved)), rows[0]))


def render(result: EvalResult) -> str:
    """The block of every variant but the reference, between the markers that a card has them in, and its
    metadata in a comment before."""
    rows = result.rows[1:] or result.rows
    parts = []
    for row in rows:
        block = card_block(result, row)
        parts.append(f"```yaml\n{block.metadata}```\n\n{OPENING.decode()}{block.markdown}{CLOSING.decode()}")
    return "".join(parts)


def _introduction(result: EvalResult, row: ModelResult, name: str) -> str:
    tool = f", run by {_plain(row.tool)}" if row.tool else ""
    kv = f", KV cache `{_plain(row.kv)}`" if row.kv else ""
    return (f"Measured by quantkit {_plain(result.protocol.quantkit)} as `{name}` "
            f"({_plain(row.method)}{kv}{tool}); fingerprint of the protocol `{result.protocol.fingerprint}`. "
            "Intervals are 95%.")


def _tests(result: EvalResult, row: ModelResult) -> list[str]:
    pairs = row.differences or differences(result.rows[0], row, result.metrics, floors=result.floors)
    return [_test(pair, result) for pair in pairs if not pair.text]


def _test(pair: PairedDifference, result: EvalResult) -> str:
    info = result.measured.get(pair.metric) or MetricInfo(pair.metric)
    share = info.unit == "%"
    ends = [pair.difference, pair.low, pair.high]
    if pair.metric == "perplexity":
        ends, unit = [100 * math.expm1(end) if end < 700 else math.inf for end in ends], "%"
    else:
        ends = [100 * end if share else end for end in ends]
        unit = " pp" if share else f" {info.unit}".rstrip()
    p = "" if pair.p is None else f"{number(pair.p, 2)} ({pair.test})"
    cells = (_plain(info.title), number(ends[0]) + unit, f"{number(ends[1])} to {number(ends[2])}", p,
             quality_grids.worse(pair) or _VERDICTS[pair.verdict])
    return f"| {' | '.join(cells)} |"


def _metadata(result: EvalResult, row: ModelResult, name: str, infos: dict[str, MetricInfo]) -> str:
    """``model-index`` in YAML. Speeds aren't in it: they are the machine's."""
    from huggingface_hub import ModelCardData

    results = []
    tables = dict(row.texts) or {result.protocol.text: row.metrics}
    for text, metrics in tables.items():
        results += [_hub_result(text, key, info, metrics[key].value)
                    for key, info in infos.items() if key in metrics and info.per not in (PER_ITEM, PER_RUN)]
    for key, info in infos.items():
        if info.per == PER_ITEM:
            task, _, metric = key.partition("/")
            results.append(_hub_result(task, metric, info, row.metrics[key].value))
    finite = [entry for entry in results if math.isfinite(entry.metric_value)]
    return ModelCardData(model_name=name, eval_results=finite).to_yaml() + "\n" if finite else ""


def _hub_result(dataset: str, metric: str, info: MetricInfo, value: float) -> HubResult:
    """One value; ``dataset.type`` has the letters that a name on the hub has."""
    from huggingface_hub import EvalResult as HubResult

    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", dataset).strip("-.") or "text"
    return HubResult(task_type=_TASK, dataset_type=slug, dataset_name=_plain(dataset), metric_type=metric,
                     metric_name=_plain(info.title),
                     metric_value=round(value, 6) if math.isfinite(value) else value)


def _index(result: EvalResult, row: ModelResult) -> int:
    return next(index for index, other in enumerate(result.rows) if other is row)


def _title(info: MetricInfo) -> str:
    return _plain(", ".join(filter(None, head(info))))


def _cell(row: ModelResult, key: str, info: MetricInfo) -> str:
    value, interval = shown(row.metrics.get(key), info)
    return value + (f" ({interval})" if interval else "")


def _plain(text: str) -> str:
    """Without markup, and without what could end a marker."""
    return _UNSAFE.sub("?", " ".join(text.split()).replace("·", "/").replace("--", "–"))


REPORTER = Reporter("model_card", "model-card.md", render)
