"""What a search leaves behind: best.toml for `waffle bench`, trials.jsonl with every trial, and a chart of them."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import altair as alt
import vl_convert

from waffle_fl.atomic_files import write_atomically
from waffle_fl.config import SCHEMA, RunConfig, Settings, option_types
from waffle_fl.errors import writable
from waffle_fl.records import read_json
from waffle_fl.report.charts import HEIGHT, WIDTH, styled
from waffle_fl.tuning.search import DEFAULT, Found, Trial
from waffle_fl.tuning.space import SETTINGS

BEST, RECORD, CHART = "best.toml", "trials.jsonl", "trials.png"
COLORS = {"finished": "#4c78a8", "pruned": "#bab0ac", "diverged": "#e4a11b", "best": "#d1495b"}


def write(found: Found, space: Mapping[str, Any], out: Path) -> None:
    """Write all three into the search's folder."""
    with writable(out):
        write_atomically(out / BEST, experiment_file(found.best.config).encode())
        lines = (json.dumps(entry, separators=(",", ":")) for entry in record(found, space))
        write_atomically(out / RECORD, "".join(f"{line}\n" for line in lines).encode())
        if found.trials:
            write_atomically(out / CHART, vl_convert.vegalite_to_png(chart(found).to_json(), scale=2))


def record(found: Found, space: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """One entry a trial, the default first; only it and the winner are judged on test data."""
    for trial in (found.default, *found.trials):
        entry: dict[str, Any] = {
            "trial": "default" if trial.number == DEFAULT else trial.number,
            "state": trial.state,
            "values": values_of(trial.config, space),
            "score": trial.score,
            f"validation_{found.measure.key}": trial.validation,
            "rounds": trial.rounds,
        }
        if trial in (found.default, found.best):
            entry[f"test_{found.measure.key}"] = test_of(trial, found.measure.key)
        yield entry


def values_of(config: RunConfig, space: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters that were searched, as a run has them."""
    content = config.to_json()
    names = [name for name in space if name in option_types(config.method) or name in SETTINGS]
    return {name: content["options"].get(name, content["settings"].get(name)) for name in names}


def test_of(trial: Trial, key: str) -> float | None:
    """On test data, in the round that validation data selects; mean over the Alices."""
    results = [read_json(path) or {} for path in sorted(trial.folder.glob("*/result.json"))]
    found = [result["selected"][key] for result in results if "selected" in result]
    return mean(found) if found else None


def experiment_file(config: RunConfig) -> str:
    """A run as an experiment file: the settings that are not the default, and all options that were given."""
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
    """What of a run differs from the default, as flags of `waffle run`."""
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


def chart(found: Found) -> Any:
    """Every trial's score on validation data, the best so far, and the default as a line across."""
    measure, best, values, line = found.measure, found.default, [], []
    for trial in found.trials:
        if trial.state == "finished" and (trial.score or -1e300) > (best.score or -1e300):
            best = trial
        line.append({"trial": trial.number, "score": _scaled(best, found), "kind": "best so far"})
        if trial.validation is not None:
            state = "best" if trial.number == found.best.number else trial.state
            values.append({"trial": trial.number, "score": _scaled(trial, found), "state": state})
    x = alt.X("trial:Q", title="trial", axis=alt.Axis(grid=False, tickMinStep=1))
    y = alt.Y("score:Q", title=f"{measure.title.lower()}, validation data", scale=alt.Scale(zero=False))
    states = alt.Scale(domain=list(COLORS), range=list(COLORS.values()))
    legend = alt.Legend(orient="top", title=None)
    dots = alt.Chart(alt.InlineData(values=values)).mark_circle(size=70, opacity=0.9)
    steps = alt.Chart(alt.InlineData(values=line)).mark_line(interpolate="step-after", color="#d1495b", strokeWidth=1.3)
    default = alt.Chart(alt.InlineData(values=[{"score": _scaled(found.default, found)}]))
    rule = default.mark_rule(strokeDash=[5, 4], color="#444")
    layers = [
        rule.encode(y=y),
        steps.encode(x=x, y=y),
        dots.encode(x=x, y=y, color=alt.Color("state:N", scale=states, legend=legend)),
    ]
    return styled(alt.layer(*layers).properties(width=WIDTH * 1.8, height=HEIGHT * 1.2))


def _scaled(trial: Trial, found: Found) -> float:
    return round(found.measure.scale * (trial.validation or 0.0), 5)


def _toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)  # of texts, numbers, booleans and lists JSON is TOML


def _flag(value: Any) -> str:
    if isinstance(value, bool):  # all of them are off unless they are asked for
        return ""
    return "".join(map(_flag, value)) if isinstance(value, tuple) else f" {shlex.quote(str(value))}"
