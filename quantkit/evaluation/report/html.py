"""The interactive report: one file that holds all it shows, its scripts too, and loads nothing."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from importlib import resources

import jinja2

from quantkit.evaluation.report.base import Reporter, variant_looks
from quantkit.evaluation.report.headline import headline, recommended
from quantkit.evaluation.result import EvalResult


def render(result: EvalResult) -> str:
    """The page. Everything that comes from results is escaped, and the policy in its head lets no script run
    but the two that stand in it."""
    from quantkit.evaluation.report.page.sections import sections

    shown = sections(result)
    charts = {chart.identifier: chart.spec for section in shown for chart in section.charts}
    bundle, script = (_bundle() if charts else ""), _read("report.js")
    title = "What each variant costs and saves"
    if result.rows:
        title = f"{variant_looks(result.rows)[0].model}: what each variant costs and saves"
    return _template().render(
        title=title, verdict=recommended(result), headline=headline(result), command=result.command,
        sections=shown,
        version=result.protocol.quantkit, policy=_policy(bundle, script), style=_read("style.css"),
        charts=_json(charts), bundle=bundle, script=script) + "\n"


def _policy(*scripts: str) -> str:
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
                      for text in scripts if text)
    # vega-embed and the tooltips write their style into the page
    return (f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
            "base-uri 'none'; form-action 'none'")


def _json(value: object) -> str:
    """JSON that can't end the script element that it stands in."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@functools.cache
def _bundle() -> str:
    """Vega, Vega-Lite and vega-embed as one script, 0.9 MB, from the package vl-convert."""
    import vl_convert

    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(_read("report.html"))


def _read(name: str) -> str:
    return resources.files("quantkit.evaluation.report.page").joinpath(name).read_text(encoding="utf-8")


REPORTER = Reporter("html", "report.html", render)
