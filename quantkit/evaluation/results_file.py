"""Reads ``results.json`` back: strictly, because the file may be a stranger's."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from quantkit.evaluation.keys import MEASURED, RESERVED_KEYS
from quantkit.evaluation.metric_table import MetricInfo, builtin_infos
from quantkit.evaluation.metrics import Interval
from quantkit.evaluation.protocol import Protocol
from quantkit.evaluation.report.base import Reporter
from quantkit.evaluation.result import VERSION, EvalResult, ModelResult, printable
from quantkit.plugins.manager import BUILTIN
from quantkit.support.errors import UsageError
from quantkit.support.strict_json import read_object

RESULTS = "results.json"
MAX_BYTES = 128 * 2**20
"""Of a file; a hundred variants with ten texts and ten thousand items each have a third of that."""
_AGAIN = "run quantkit eval again with --out"
Number = Annotated[float, BeforeValidator(lambda value: math.inf if value is None else value)]
"""One that isn't finite is written as ``null``."""
Ends = tuple[Number, Number, Number]


def read_results(path: str | Path) -> EvalResult:
    """Read a result that ``quantkit eval --out`` wrote.

    Args:
        path: a ``results.json``, or the folder that has one.

    Raises:
        UsageError: there is none, it is of another version, or it isn't what quantkit writes; the field is
            named.
    """
    file = Path(path)
    if file.is_dir():
        file = file / RESULTS
    if not file.is_file():
        raise UsageError(f"{file} is no file", next="name a results.json, or the folder of a report")
    return result_from_dict(read_object(file, MAX_BYTES, error=UsageError, next=_AGAIN), str(file))


def result_from_dict(data: Mapping[str, Any], where: str = RESULTS) -> EvalResult:
    """The result that :meth:`~quantkit.evaluation.result.EvalResult.to_dict` made ``data`` of. A number that
    wasn't finite, and is ``None`` there, is infinite.

    Args:
        data: plain data, as JSON has it.
        where: a name for the data, for errors.

    Raises:
        UsageError: it isn't what quantkit writes.
    """
    version = data.get("version")
    if version != VERSION or isinstance(version, bool):
        raise UsageError(f"{where} has no version that this quantkit reads",
                         why=f"its version is {version!r:.40}, and {VERSION} is read", next=_AGAIN)
    reader = _Reader(where)
    fields = {field.name for field in dataclasses.fields(EvalResult)}
    reader.known(data, {*fields - {"rows"}, "version", "results", "noise_floor_kl"}, "")
    protocol = reader.protocol(data.get("protocol"))
    rows = data.get("results")
    if not isinstance(rows, list):
        raise reader.error("results", "it is no list")
    infos = reader.infos(data.get("metrics"))
    simple = {name: data[name] for name in fields - {"protocol", "rows", "metrics", "floors"} if name in data}
    floors = reader.intervals(data.get("floors", {}), "floors")
    models = [reader.row(row, f"results[{index}]") for index, row in enumerate(rows)]
    # what is simple is read by the types of EvalResult itself; the rest is there already
    result: EvalResult = reader.typed(EvalResult, {
        "protocol": dataclasses.asdict(protocol), "rows": [], "metrics": {}, "floors": {}, **simple}, "")
    return dataclasses.replace(result, protocol=protocol, rows=models, metrics=infos, floors=floors)


class _Reader:
    def __init__(self, where: str) -> None:
        self.where = where

    def error(self, field: str, why: str) -> UsageError:
        return UsageError(f"{self.where} is not what quantkit eval writes",
                          why=printable(f"{field}: {why}" if field else why)[:300], next=_AGAIN)

    def mapping(self, value: object, field: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.error(field, "it is no object")
        return value

    def known(self, data: Mapping[str, Any], names: set[str], field: str) -> None:
        for key in data:
            if key not in names:
                raise self.error(field, f"unknown key {key[:80]!r}")

    def typed(self, kind: Any, value: Any, field: str) -> Any:
        """A value of a type, without any coercion but that of lists to tuples."""
        try:
            return TypeAdapter(kind).validate_json(json.dumps(value), strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, (*([field] if field else []), *first["loc"])))
            raise self.error(place[:120], first["msg"]) from None

    def protocol(self, value: object) -> Protocol:
        data = dict(self.mapping(value, "protocol"))
        names = {field.name for field in dataclasses.fields(Protocol)}
        derived = {name: data.pop(name, None) for name in ("stride", "scored", "fingerprint")}
        self.known(data, names, "protocol")
        protocol: Protocol = self.typed(Protocol, data, "protocol")
        for name, stated in derived.items():
            if stated != getattr(protocol, name):
                raise self.error(f"protocol.{name}", f"{stated!r:.60} doesn't follow from the other fields")
        return protocol

    def intervals(self, value: object, field: str) -> dict[str, Interval]:
        return {key: Interval(*ends) for key, ends in self.typed(dict[str, Ends], value, field).items()}

    def row(self, value: object, field: str) -> ModelResult:
        data = dict(self.mapping(value, field))
        ends = self.typed(dict[str, tuple[Number, Number]], data.pop("intervals", None),
                          f"{field}.intervals")
        if missing := ends.keys() - data.keys():
            raise self.error(f"{field}.intervals.{min(missing)[:80]}", "the row has no such value")
        metrics = {key: Interval(self.typed(Number, data.pop(key), f"{field}.{key[:80]}"), *pair)
                   for key, pair in ends.items()}
        for key in MEASURED:
            if data.pop(key, None) is not None:
                raise self.error(f"{field}.{key}", "it has no interval")
        names = {item.name for item in dataclasses.fields(ModelResult)}
        for key in metrics.keys() & names:
            raise self.error(f"{field}.intervals.{key}", "it is no metric")
        self.known(data, names - {"metrics"}, field)
        texts = {text[:200]: self.intervals(table, f"{field}.texts.{text[:40]}")
                 for text, table in self.mapping(data.pop("texts", {}), f"{field}.texts").items()}
        means = {text[:200]: table for text, table in self.typed(
            dict[str, dict[str, list[Number]]], data.pop("window_means", {}),
            f"{field}.window_means").items()}
        items = self.typed(dict[str, list[Number]], data.pop("items", {}), f"{field}.items")
        row: ModelResult = self.typed(ModelResult, data, field)
        return dataclasses.replace(row, metrics=metrics, texts=texts, window_means=means, items=items)

    def infos(self, value: object) -> dict[str, MetricInfo]:
        """The built-in ones, and those of the file's plugins."""
        infos = builtin_infos()
        for key, entry in self.mapping(value, "metrics").items():
            place = f"metrics.{key[:80]}"
            data = dict(self.mapping(entry, place))
            self.known(data, {"title", "unit", "direction", "per", "distribution"}, place)
            data["owner"] = data.pop("distribution", None)
            info: MetricInfo = self.typed(MetricInfo, data, place)
            if info.direction not in ("lower", "higher", ""):
                raise self.error(f"{place}.direction", "it is neither lower nor higher")
            if info.owner != BUILTIN and key in RESERVED_KEYS:
                raise self.error(place, "the key is one of quantkit's")
            if info.owner != BUILTIN:
                infos[key] = info
        return infos


def render(result: EvalResult) -> str:
    """One object: ``results``, ``protocol``, ``noise_floor_kl``, ``metrics``, ``question``, ``command``."""
    return json.dumps(result.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


REPORTER = Reporter("json", "results.json", render)
