"""Read finished runs from their folders or from condensed records, and compute the scores in tables and charts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import isnan, nan
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal, NamedTuple, TypeAlias

from waffle_fl.algorithms import ALGORITHMS, title_of
from waffle_fl.atomic_files import check_regular
from waffle_fl.config import RunConfig, Settings, check_trusted
from waffle_fl.delta_encoding import Tables, after, since
from waffle_fl.errors import WaffleError
from waffle_fl.manifest import Warn, no_warning, verify, verify_all
from waffle_fl.records import read_json, read_rounds

Protocol: TypeAlias = Literal["best", "last", "selected"]
PROTOCOLS: dict[Protocol, str] = {
    "best": "best round on test data (the paper's protocol)",
    "last": "last round",
    "selected": "round selected on validation data",
}


Details: TypeAlias = Literal["all", "figures", "accuracy", "late", "none"]  # values per round in a condensed record
SCORES = ("best", "last", "selected", "metrics")  # of a result, which a record of late rounds leaves out
LATE = (0.94, 1.0)  # shares of the rounds: the last one before WAFFLE's Alice trains alone, and the end

WEIGHING = ("waffle", "waffle-paper", "weight-erosion")
ROW_SETTINGS = ("split", "shift", "seed", "shares", "alice")  # settings in the name of a row, and the seed


class Measure(NamedTuple):
    """The main metric of a run."""

    key: str  # in a round and in a result
    title: str
    scale: float  # factor from the record to the table
    sign: int  # -1 if smaller is better

    def text(self, value: float, decimals: int = 2) -> str:
        return f"{self.scale * value:.{decimals}f}" if self.sign > 0 else f"{self.scale * value:.4g}"


ACCURACY = Measure("accuracy", "Accuracy in percent", 100.0, 1)
RMSE = Measure("rmse", "Root mean squared error", 1.0, -1)  # in the unit of the target


def measure_of(content: Mapping[str, Any]) -> Measure:
    """Return the measure of a round, or of the best round of a result."""
    return RMSE if RMSE.key in content else ACCURACY


@dataclass(frozen=True)
class FinishedRun:
    """The content of the folder of a finished run."""

    folder: Path
    config: RunConfig
    provenance: dict[str, Any]
    result: dict[str, Any]
    rounds: list[dict[str, Any]]
    variant: str = ""  # what distinguishes its row from others of the same split, see `with_variants`

    @property
    def title(self) -> str:
        return title_of(self.config.method)

    @property
    def row(self) -> str:
        return row_of(self.config) + (f", {self.variant}" if self.variant else "")


def row_of(config: RunConfig) -> str:
    """Return a run's row in a table: its split, plus Alice if she is not agent 0; for your own data Alice's name."""
    s = config.settings
    if s.is_own:
        return s.alice
    star = "*" if s.split.endswith("*") else ""
    shift = f" {s.shift}" if s.shift else ""
    alice = f" for {s.alice}" if s.alice != Settings.alice else ""
    return (f"own shares{star}{shift}" if s.shares else s.column) + alice


@dataclass(frozen=True)
class Score:
    """Mean and standard deviation of the measure over seeds."""

    mean: float  # NaN if every seed diverged in its first round
    std: float | None
    seeds: int
    diverged: int
    measure: Measure = ACCURACY

    def text(self, plus_minus: str = " ± ", decimals: int = 2) -> str:
        if isnan(self.mean):
            return "diverged"
        spread = plus_minus + self.measure.text(self.std, decimals) if self.std is not None else ""
        return self.measure.text(self.mean, decimals) + spread + (" (diverged)" if self.diverged else "")


def table_of_rounds(*paths: str | Path, trust: bool = False) -> list[dict[str, Any]]:
    """Return one dictionary per run and round, for `pandas.DataFrame(table_of_rounds("runs"))`.

    Paths are run folders, folders of runs and records (.jsonl). Each row has the run's method, data, split, shift,
    Alice and seed, and the round's measurements as documented in `Measured`.
    """
    return [
        {
            "method": run.config.method,
            "data": run.config.settings.data_name,
            "split": run.config.settings.split,
            **{name: getattr(run.config.settings, name) for name in ("shift", "alice", "seed")},
            **line,
        }
        for run in read_runs([Path(path) for path in paths], trust=trust)
        for line in run.rounds
    ]


def read_runs(
    paths: Iterable[Path], *, trust: bool = False, force: bool = False, warn: Warn | None = None
) -> list[FinishedRun]:
    """Return all finished runs in run folders, folders of runs, and condensed records (.jsonl).

    Run folders inside a run folder are its baselines. Folders are checked as by `manifest.verify`. `trust` allows
    importing the code that a config refers to."""
    runs: list[FinishedRun] = []
    folders: list[Path] = []
    for path in paths:
        if path.suffix == ".jsonl":
            runs += read_condensed(path, trust)
            continue
        if not path.is_dir():
            raise WaffleError(f"expected a run folder, a folder of runs or a .jsonl record, but {path} does not exist")
        inner = sorted(p.parent for p in path.glob("*/config.json"))
        known = {folder.resolve() for folder in folders}
        found = [path, *inner] if (path / "config.json").exists() else inner
        read = [(f, run) for f in found if f.resolve() not in known and (run := _read(f, trust, force, model=False))]
        folders += [folder for folder, _ in read]
        runs += [run for _, run in read]
    if not runs:
        where = ", ".join(map(str, paths))
        raise WaffleError(f"no finished run in {where}: give a run folder or a folder of runs, or let them finish")
    verify_all(folders, force=force, warn=warn)
    return runs


def read_run(folder: Path, *, trust: bool = False, force: bool = False, model: bool = False) -> FinishedRun:
    """Return a finished run without checking its files against the manifest.

    Set `model` if the model will be built: a config with the user's own model then needs `trust`."""
    if not (folder / "config.json").is_file():
        raise WaffleError(f"{folder} is not a run folder: it has no config.json")
    run = _read(folder, trust, force, model)
    if run is None:
        raise WaffleError(f"the run in {folder} is not finished: resume it with `waffle resume {folder}`")
    return run


def config_of(folder: Path, trust: bool, force: bool, model: bool = True) -> RunConfig:
    """Return the config of a run folder. Code that it refers to is imported only if trusted and if unchanged.

    `model` says whether the model will be built too."""
    path = folder / "config.json"
    content = read_json(path)
    if check_trusted(content, path, trust, model):
        verify(folder, force=force, warn=no_warning)  # the caller prints warnings
    return RunConfig.from_json(content)


def named_weights(provenance: Mapping[str, Any], weights: Sequence[float]) -> dict[str, float]:
    """Return each agent's weight by name; only Alice's for a method that trains Alice alone."""
    names = provenance["agents"] if len(weights) > 1 else [provenance["agents"][provenance["alice"]]]
    return dict(zip(names, weights, strict=True))


def mean_weights(folder: Path) -> dict[str, float]:
    """Return each agent's weight in the model of a run folder, mean over the rounds; empty if there are none."""
    found, lines = read_json(folder / "provenance.json") or {}, read_rounds(folder / "rounds.jsonl")
    rounds = [named_weights(found, line["weights"]) for line in lines if line.get("weights")]
    return {name: mean(line[name] for line in rounds) for name in (rounds[0] if rounds else ())}


def _read(folder: Path, trust: bool, force: bool, model: bool) -> FinishedRun | None:
    result = read_json(folder / "result.json")
    if result is None:
        return None
    config = config_of(folder, trust, force, model)
    rounds = read_rounds(folder / "rounds.jsonl")
    return FinishedRun(folder, config, read_json(folder / "provenance.json") or {}, result, rounds)


def condense(runs: Sequence[FinishedRun], details: Details = "all") -> Iterator[str]:
    """Yield one JSON line per run, small enough to commit. Sufficient for all tables; for charts use details="all".

    The first line has the full config and provenance, each other line the changes since the line before it.
    """
    first: dict[tuple[str, str], int] = {}
    for run in runs:
        key, seed = (run.row, run.config.method), run.config.settings.seed
        first[key] = min(first.get(key, seed), seed)
    before: Tables | None = None
    for run in runs:
        first_seed = run.config.settings.seed == first[run.row, run.config.method]
        columns = _columns(run, details, first_seed)
        tables = _tables(run, details, columns.pop("round", []))
        named = {} if run.folder.name == run.config.label else {"run": run.folder.name}
        shown = {"tables": tables} if before is None else {"since": since(before, tables)}
        yield json.dumps({**named, **shown, "values": columns}, separators=(",", ":"))
        before = tables


def _tables(run: FinishedRun, details: Details, rounds: Sequence[int]) -> Tables:
    config = run.config.to_json()
    late = details == "late" and run.result["status"] == "finished"
    return {
        "settings": config.pop("settings"),
        "options": config.pop("options"),
        "config": config,
        "provenance": run.provenance,
        "result": {key: value for key, value in run.result.items() if not (late and key in SCORES)},
        "rounds": {"round": rounds},
    }


def _columns(run: FinishedRun, details: Details, first_seed: bool) -> dict[str, list[Any]]:
    """Return the rounds of a run by column."""
    kept = {"round", "accuracy", "rmse", "attackers_weight", "backdoor"} if details != "none" else set()
    if details in ("all", "figures"):
        kept |= {"omega", "weights"} if first_seed and run.config.method in WEIGHING else set()
    if details == "all":
        kept |= {"loss", "validation_accuracy", "validation_rmse", "omega", "screened"}
    shown = run.rounds
    if details == "late":
        kept -= set() if run.config.method in WEIGHING else {"attackers_weight"}
        shown = list({line["round"]: line for share in LATE if (line := round_at(run, share))}.values())
    rounds = [{key: _short(value) for key, value in line.items() if key in kept} for line in shown]
    return {key: [line.get(key) for line in rounds] for key in sorted(set().union(*rounds))}


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return [_short(v) for v in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def read_condensed(path: Path, trust: bool = False) -> list[FinishedRun]:
    """Return the runs of a condensed record."""
    runs: list[FinishedRun] = []
    tables: Tables = {}
    check_regular(path)
    try:
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            tables = line["tables"] if "tables" in line else after(tables, line["since"])
            config = {**tables["config"], "settings": tables["settings"], "options": tables["options"]}
            check_trusted(config, path, trust, model=False)
            found = RunConfig.from_json(config)
            columns = {**tables["rounds"], **line["values"]} if "rounds" in tables else line["rounds"]
            rounds = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
            result = _with_last(tables["result"], rounds) if "result" in tables else line["result"]
            folder = Path(line.get("run", found.label))
            runs.append(FinishedRun(folder, found, dict(tables["provenance"]), result, rounds))
    except OSError as error:
        raise WaffleError(f"cannot read {path}: {error.strerror}") from None
    except WaffleError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WaffleError(f"{path} is not a record of runs ({error})") from None
    return runs


def _with_last(result: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a result with the score of its last round, if only the rounds have it."""
    if "last" in result or not rounds or rounds[-1]["round"] != result["rounds"]:
        return dict(result)
    scored = {measure.key: rounds[-1][measure.key] for measure in (ACCURACY, RMSE) if measure.key in rounds[-1]}
    return {**result, "last": {"round": result["rounds"], **scored}}


def round_at(run: FinishedRun, share: float) -> dict[str, Any] | None:
    """Return the round at a share of the configured rounds, or None if the run diverged before it."""
    r = max(1, int(share * run.config.settings.rounds))
    return next((line for line in run.rounds if line["round"] == r), None)


def methods_of(runs: Sequence[FinishedRun]) -> list[str]:
    """Return the methods of these runs in table order. Methods from outside the package come last."""
    present = dict.fromkeys(run.config.method for run in runs)
    return [*(m for m in ALGORITHMS if m in present), *(m for m in present if m not in ALGORITHMS)]


def rows_of(runs: Sequence[FinishedRun]) -> list[str]:
    """Return the rows in the paper's order: A, B, C, starred splits, then shifts in order of occurrence."""
    seen = {run.row: row_of(run.config) for run in runs}
    return sorted(seen, key=lambda row: (1, False, "") if "(" in seen[row] else (0, seen[row].endswith("*"), seen[row]))


def scores(runs: Sequence[FinishedRun], protocol: Protocol) -> dict[tuple[str, str], Score]:
    """Return the score over seeds for each (row, method)."""
    cells: dict[tuple[str, str], list[FinishedRun]] = {}
    for run in runs:
        cells.setdefault((run.row, run.config.method), []).append(run)
    return {key: _score(group, protocol) for key, group in cells.items()}


def _score(group: Sequence[FinishedRun], protocol: Protocol) -> Score:
    measure = measure_of_runs(group)
    values = [run.result[protocol][measure.key] for run in group if protocol in run.result]
    diverged = sum(run.result["status"] == "diverged" for run in group)
    spread = stdev(values) if len(values) > 1 else None
    return Score(mean(values) if values else nan, spread, len(group), diverged, measure)


def measure_of_runs(runs: Sequence[FinishedRun]) -> Measure:
    """Return the measure of the runs of one table."""
    return next((measure_of(run.result["best"]) for run in runs if "best" in run.result), ACCURACY)


def with_variants(runs: Sequence[FinishedRun]) -> list[FinishedRun]:
    """Return the runs in separate rows if runs of one split differ in a setting or an option of their method.

    The name of a row states the differing values that are not defaults."""
    settings = _varying(runs, lambda run: (row_of(run.config),), "settings")
    options = _varying(runs, lambda run: (row_of(run.config), run.config.method), "options")
    named = []
    for run in runs:
        row, method = row_of(run.config), run.config.method
        given, defaults = run.config.contents, _defaults(method)
        varying = {("settings", name) for name in settings[(row,)]} | {
            ("options", name) for name in options[row, method]
        }
        shown = {
            name: given[part][name]
            for part in ("settings", "options")
            for name in given[part]
            if (part, name) in varying and given[part][name] != defaults[part].get(name)
        }
        named.append(replace(run, variant=", ".join(f"{name} {_plain(value)}" for name, value in shown.items())))
    return named


def remarks(runs: Sequence[FinishedRun]) -> list[str]:
    """Return notes on a table: the defaults that row names do not state, and the settings that differ by row."""
    within = _varying(runs, lambda run: (row_of(run.config),), "settings")
    options = _varying(runs, lambda run: (row_of(run.config), run.config.method), "options")
    named = dict.fromkeys(name for names in (*within.values(), *options.values()) for name in names)
    at_default: dict[str, dict[str, None]] = {}
    for run in runs:
        given, defaults = run.config.contents, _defaults(run.config.method)
        for part, names in (
            ("settings", within[row_of(run.config),]),
            ("options", options[row_of(run.config), run.config.method]),
        ):
            for name in names:
                if given[part][name] == defaults[part][name]:
                    at_default.setdefault(name, {})[_plain(given[part][name]) or "none"] = None
    (overall,) = _varying(runs, lambda run: ("",), "settings").values()
    lines = []
    if named:
        listed = ", ".join(f"{name} {' or '.join(values)}" for name, values in at_default.items())
        default = f" Settings that a row does not state are at their default: {listed}." if at_default else ""
        lines.append(f"Rows state the settings in which runs of one split differ.{default}")
    for name in (name for name in overall if name not in named):
        rows: dict[str, list[str]] = {}
        for row, run in {row_of(run.config): run for run in runs}.items():
            rows.setdefault(_plain(getattr(run.config.settings, name)), []).append(row)
        lines.append(f"{name} is " + "; ".join(f"{value} in {', '.join(names)}" for value, names in rows.items()) + ".")
    return lines


@cache
def _defaults(method: str) -> dict[str, Any]:
    return RunConfig(method=method, settings=Settings()).to_json()


def _varying(
    runs: Sequence[FinishedRun], key: Callable[[FinishedRun], tuple[str, ...]], part: str
) -> dict[tuple[str, ...], list[str]]:
    """Return, for each group of runs, the names of settings (except ROW_SETTINGS) or options that differ within it."""
    first: dict[tuple[str, ...], dict[str, Any]] = {}
    found: dict[tuple[str, ...], dict[str, None]] = {}
    for run in runs:
        content = run.config.contents[part]
        known = first.setdefault(key(run), content)
        differing = (name for name in content if name not in ROW_SETTINGS and content[name] != known.get(name))
        found.setdefault(key(run), {}).update(dict.fromkeys(differing))
    return {group: [name for name in first[group] if name in names] for group, names in found.items()}


def _plain(value: Any) -> str:
    """Return a setting's value for the name of a row, without parentheses, which mark shifts."""
    if isinstance(value, list | tuple):
        return "/".join(_plain(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def check_alike(runs: Sequence[FinishedRun], ignoring: tuple[str, ...]) -> list[FinishedRun]:
    """Return the runs after checking that they differ only in method and in the settings `ignoring`."""
    known: dict[Any, tuple[dict[str, Any], FinishedRun]] = {}
    for run in runs:
        config = run.config.contents
        shared = {k: v for k, v in config["settings"].items() if k not in ignoring}
        for key, content in (("settings", shared), ((run.row, run.config.method), config["options"])):
            first, other = known.setdefault(key, (content, run))
            differs = next((name for name in content if content[name] != first.get(name)), None)
            if differs:
                raise WaffleError(
                    f"{run.folder.name} and {other.folder.name} differ in {differs} "
                    f"({content[differs]!r}, {first[differs]!r}): "
                    "they cannot be averaged; report them separately"
                )
    return list(runs)


def best_of(cells: dict[tuple[str, str], Score], row: str) -> set[str]:
    """Return the methods with the best printed mean of a row."""
    found = {method: score for (r, method), score in cells.items() if r == row and not isnan(score.mean)}
    means = {method: s.measure.sign * float(s.measure.text(s.mean)) for method, s in found.items()}
    return {method for method, value in means.items() if value == max(means.values())}
