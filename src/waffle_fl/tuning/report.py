"""Output of a search: best.toml for `waffle bench`, trials.jsonl with every trial, and a chart of the trials."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from waffle_fl.atomic_files import write_atomically
from waffle_fl.config import SCHEMA, RunConfig, Settings, option_types
from waffle_fl.errors import writable
from waffle_fl.records import read_json
from waffle_fl.tuning.search import DEFAULT, SearchResult, Trial
from waffle_fl.tuning.space import SETTINGS

BEST, RECORD, CHART = "best.toml", "trials.jsonl", "trials.png"
COLORS = {"finished": "#4c78a8", "pruned": "#bab0ac", "diverged": "#e4a11b", "best": "#d1495b"}


def write(result: SearchResult, space: Mapping[str, Any], out: Path) -> None:
    """Write best.toml, trials.jsonl and the chart into the folder of the search."""
    import vl_convert

    with writable(out):
        write_atomically(out / BEST, experiment_file(result.best.config).encode())
        lines = (json.dumps(entry, separators=(",", ":")) for entry in record(result, space))
        write_atomically(out / RECORD, "".join(f"{line}\n" for line in lines).encode())
        if result.trials:
            write_atomically(out / CHART, vl_convert.vegalite_to_png(chart(result).to_json(), scale=2))


def record(result: SearchResult, space: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """Yield one entry per trial, the default first. Only the default and the best trial have test scores."""
    for trial in (result.default, *result.trials):
        entry: dict[str, Any] = {
            "trial": "default" if trial.number == DEFAULT else trial.number,
            "state": trial.state,
            "values": values_of(trial.config, space),
            "score": trial.score,
            f"validation_{result.measure.key}": trial.validation,
            "rounds": trial.rounds,
        }
        if trial in (result.default, result.best):
            entry[f"test_{result.measure.key}"] = test_of(trial, result.measure.key)
        yield entry


def values_of(config: RunConfig, space: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config's values of the hyperparameters in the search space."""
    content = config.to_json()
    names = [name for name in space if name in option_types(config.method) or name in SETTINGS]
    return {name: content["options"].get(name, content["settings"].get(name)) for name in names}


def test_of(trial: Trial, key: str) -> float | None:
    """Return the test score in the round selected on validation data, averaged over the Alices."""
    results = [read_json(path) or {} for path in sorted(trial.folder.glob("*/result.json"))]
    scores = [result["selected"][key] for result in results if "selected" in result]
    return mean(scores) if scores else None


def experiment_file(config: RunConfig) -> str:
    """Return a run as an experiment file: the settings that differ from the defaults, and all given options."""
    s, defaults = config.settings, Settings()
    lines = [f"schema = {SCHEMA}", f"methods = [{_toml(config.method)}]", f"splits = [{_toml(s.split)}]"]
    lines += [f"seeds = [{s.seed}]", ""]
    for field in dataclasses.fields(s):
        value = getattr(s, field.name)
        if field.name not in ("split", "seed") and (value != getattr(defaults, field.name) or field.name == "data"):
            lines.append(f"{field.name} = {_toml(value)}")
    if config.options:
        table = _toml(config.method) if ":" in config.method else config.method
        lines += ["", f"[{table}]", *(f"{name} = {_toml(value)}" for name, value in config.options.items())]
    return "\n".join(lines) + "\n"


def command(config: RunConfig) -> str:
    """Return the `waffle run` command of a run, with flags for all values that differ from the defaults."""
    s, defaults = config.settings, Settings()
    settings = {
        f.name: getattr(s, f.name)
        for f in dataclasses.fields(s)
        if f.name != "shares" and getattr(s, f.name) != getattr(defaults, f.name)
    }
    usual = RunConfig(method=config.method, settings=s).to_json()["options"]
    options = {name: value for name, value in config.options.items() if value != usual[name]}
    flags = [f"--{name.replace('_', '-')}{_flag(value)}" for name, value in {**settings, **options}.items()]
    return " ".join(["waffle run", config.method, *flags])


def chart(result: SearchResult) -> Any:
    """Return a chart of every trial's validation score, the best so far, and the default as a dashed line."""
    import altair as alt  # takes seconds

    from waffle_fl.report.charts import HEIGHT, WIDTH, inline, styled

    measure, best, values, line = result.measure, result.default, [], []
    for trial in result.trials:
        if trial.state == "finished" and (trial.score or -1e300) > (best.score or -1e300):
            best = trial
        line.append({"trial": trial.number, "score": _scaled(best, result), "kind": "best so far"})
        if trial.validation is not None:
            state = "best" if trial.number == result.best.number else trial.state
            values.append({"trial": trial.number, "score": _scaled(trial, result), "state": state})
    x = alt.X("trial:Q", title="trial", axis=alt.Axis(grid=False, tickMinStep=1))
    y = alt.Y("score:Q", title=f"{measure.title.lower()}, validation data", scale=alt.Scale(zero=False))
    states = alt.Scale(domain=list(COLORS), range=list(COLORS.values()))
    legend = alt.Legend(orient="top", title=None)
    dots = alt.Chart(inline(values)).mark_circle(size=70, opacity=0.9)
    steps = alt.Chart(inline(line)).mark_line(interpolate="step-after", color="#d1495b", strokeWidth=1.3)
    default = alt.Chart(inline([{"score": _scaled(result.default, result)}]))
    rule = default.mark_rule(strokeDash=[5, 4], color="#444")
    layers = [
        rule.encode(y=y),
        steps.encode(x=x, y=y),
        dots.encode(x=x, y=y, color=alt.Color("state:N", scale=states, legend=legend)),
    ]
    return styled(alt.layer(*layers).properties(width=WIDTH * 1.8, height=HEIGHT * 1.2))


def _scaled(trial: Trial, result: SearchResult) -> float:
    return round(result.measure.scale * (trial.validation or 0.0), 5)


def _toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)  # JSON is valid TOML for strings, numbers, booleans and lists


def _flag(value: Any) -> str:
    if isinstance(value, bool):  # all of them default to False
        return ""
    return "".join(map(_flag, value)) if isinstance(value, tuple) else f" {shlex.quote(str(value))}"
