"""One self-contained HTML page: tables, charts and provenance, readable offline."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from waffle_fl import __version__
from waffle_fl.atomic_files import write_atomically
from waffle_fl.config import Settings
from waffle_fl.errors import writable
from waffle_fl.experiment.factories import model_name
from waffle_fl.report.tables import protocols_of, to_csv, to_html, to_latex, to_markdown
from waffle_fl.results import PROTOCOLS, FinishedRun, measure_of_runs, remarks, with_variants


def write_report(runs: Sequence[FinishedRun], out: Path, title: str, images: bool = True) -> Path:
    """Write the page, the tables, and the charts as PNG and PDF into the folder; return the page."""
    import vl_convert

    from waffle_fl.report.charts import charts_of, specification  # Altair takes seconds to import

    runs = with_variants(runs)
    with writable(out):
        out.mkdir(parents=True, exist_ok=True)
    for name, text in (("table.csv", to_csv(runs)), ("table.md", to_markdown(runs)), ("table.tex", to_latex(runs))):
        put(out / name, text.encode())
    charts = {name: (caption, specification(chart)) for name, (caption, chart) in charts_of(runs).items()}
    for name, (_, chart) in charts.items() if images else ():
        svg = vl_convert.vegalite_to_svg(chart)  # drawn once; each of the others would draw it again
        put(out / f"{name}.png", vl_convert.svg_to_png(svg, scale=2))
        put(out / f"{name}.pdf", vl_convert.svg_to_pdf(svg))
    page = _page(runs, charts, title)
    return put(out / "index.html", page.encode())


def put(path: Path, content: bytes) -> Path:
    """Write a file atomically; raise WaffleError if that fails."""
    with writable(path):
        write_atomically(path, content)
    return path


def _page(runs: Sequence[FinishedRun], charts: dict[str, tuple[str, dict[str, Any]]], title: str) -> str:
    style = resources.files("waffle_fl.report").joinpath("page.css").read_text(encoding="utf-8")
    tables = "".join(
        f"<section><h2>{html.escape(measure_of_runs(runs).title)}, {html.escape(PROTOCOLS[p])}</h2>"
        '<p class="caption">Mean ± standard deviation over seeds; the best of each row in colour.</p>'
        f'<div class="scroll">{to_html(runs, p)}</div></section>'
        for p in protocols_of(runs)
    )
    figures = "".join(
        f'<section><h2>{html.escape(caption)}</h2><div class="scroll"><div id="{name}"></div></div></section>'
        for name, (caption, _) in charts.items()
    )
    specifications = script_json({name: chart for name, (_, chart) in charts.items()})
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title><style>{style}</style></head>
<body><main><h1>{html.escape(title)}</h1><p class="lead">{html.escape(_lead(runs))}</p>
{tables}{_remarks(runs)}{figures}<section><h2>Where this comes from</h2>{_origin(runs)}</section></main>
<script type="module">{bundle()}</script>
<script type="module">
const charts = {specifications};
const actions = {{export: true, source: false, compiled: false, editor: false}};
for (const [name, chart] of Object.entries(charts)) await window.vegaEmbed("#" + name, chart, {{actions}});
document.body.dataset.charts = Object.keys(charts).length;
</script></body></html>
"""


def script_json(content: Any) -> str:
    """Return JSON that is safe inside a script element: no text in it can close the element or open another."""
    return json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")


@cache
def bundle() -> str:
    """Return the JavaScript that draws charts in a browser, for inclusion in a page."""
    import vl_convert

    return str(vl_convert.javascript_bundle()).replace("</script", "<\\/script")  # type: ignore[call-arg]


def _lead(runs: Sequence[FinishedRun]) -> str:
    data = sorted({run.config.settings.data_name for run in runs})
    seeds = {run.config.settings.seed for run in runs}
    methods = {run.config.method for run in runs}
    return (
        f"{len(runs)} runs on {', '.join(data)}: {len(methods)} methods, {len(seeds)} seeds. Alice is the agent that "
        "the model is trained for; every number is measured on her own test data."
    )


def _remarks(runs: Sequence[FinishedRun]) -> str:
    return "".join(f'<p class="caption">{html.escape(line)}</p>' for line in remarks(runs))


def _verified(found: bool | None) -> str:
    return "user data" if found is None else "checksums verified" if found else "not verified"


def facts_of(*runs: FinishedRun) -> dict[str, str]:
    """Return software, data and training settings of the runs for the foot of a page; differing values are joined."""
    found = [_facts(run) for run in runs]
    names = dict.fromkeys(name for facts in found for name in facts)
    return {name: "; ".join(dict.fromkeys(facts.get(name, "none") for facts in found)) for name in names}


def _facts(run: FinishedRun) -> dict[str, str]:
    s, binding, parameters = run.config.settings, _binding(run), run.provenance.get("parameters", 0)
    return {
        "software": f"waffle-fl {__version__}, torch {binding.get('torch')}, on {binding.get('device')}",
        "data": f"{s.data_name}, {_verified(run.provenance.get('data_verified'))}",
        "training": training_text(s),
        "model": f"{_model(run)}, {f'{parameters:,}' if isinstance(parameters, int) else parameters} parameters",
        "statistics": str(run.provenance.get("statistics")),
        **({"differential privacy": _privacy(run)} if s.guarantee else {}),
    }


def _privacy(run: FinishedRun) -> str:
    """Return the guarantee of one run; the runs of a page add up."""
    simulated = run.provenance.get("privacy", {}).get("noise") != "secret"
    return f"{run.config.settings.guarantee}, per run{'; simulated: noise derives from the seed' * simulated}"


def training_text(s: Settings) -> str:
    """Return how the agents train: rounds, the round whose model is used if it is chosen, optimiser, augmentation."""
    selected = (
        f"model of round {s.final_round}" if s.final_round else "model of the round with the best validation score"
    )
    used = [selected] if s.final_model == "selected" else []
    optimiser = ["Adam"] if s.optimiser == "adam" else ["SGD", f"momentum {s.momentum}"]
    moved = ["shifts and flips" if s.flips else "shifts"] if s.augment else []
    rates = [f"lr {s.lr}", f"weight decay {s.weight_decay}"]
    length = f"{s.rounds} rounds of {_round_length(s)}"
    return ", ".join([length, *used, f"batch {s.batch_size}", *optimiser, *rates, *moved])


def _round_length(s: Settings) -> str:
    number, what = (s.steps_per_round, "step") if s.steps_per_round else (s.epochs, "epoch")
    return f"{number} {what}{'s' * (number != 1)}"


def _model(run: FinishedRun) -> str:
    """Return the name of the network; records of earlier versions say `auto`, which the sample shape resolves."""
    named, shape = run.provenance.get("model"), run.provenance.get("sample")
    return (
        named if isinstance(named, str) else model_name(run.config.settings, shape if isinstance(shape, list) else ())
    )


def _test_samples(runs: Sequence[FinishedRun]) -> str:
    """Return the number of Alice's test samples, per row if the rows differ."""
    rows: dict[str, dict[str, None]] = {}
    for run in runs:
        count = run.provenance.get("test_samples")
        rows.setdefault(f"{count:,}" if isinstance(count, int) else "not known", {})[run.row] = None
    return "; ".join(f"{count} in {', '.join(names)}" if len(rows) > 1 else count for count, names in rows.items())


def _ended(run: FinishedRun) -> str:
    """Return the table cells of status, rounds and split hash."""
    found = (run.result.get("status"), run.result.get("rounds"), str(_binding(run).get("data", ""))[:12])
    return "".join(f"<td>{html.escape(str(value))}</td>" for value in found)


def _binding(run: FinishedRun) -> dict[str, Any]:
    found = run.provenance.get("binding")
    return found if isinstance(found, dict) else {}


def _origin(runs: Sequence[FinishedRun]) -> str:
    facts = {**facts_of(*runs), "Alice's test samples": _test_samples(runs)}
    listing = "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in facts.items())
    rows = "".join(f"<tr><th>{html.escape(run.folder.name)}</th>{_ended(run)}</tr>" for run in runs)
    head = "<thead><tr><th>run</th><th>status</th><th>rounds</th><th>split hash</th></tr></thead>"
    return f"<dl>{listing}</dl><details><summary>All runs</summary><table>{head}<tbody>{rows}</tbody></table></details>"
