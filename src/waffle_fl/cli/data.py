"""`waffle data`: download, verify and describe a data set, or show what would be read from a data folder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from waffle_fl import data
from waffle_fl.cli.console import console_for
from waffle_fl.cli.flags import parse, reading_class
from waffle_fl.cli.folder_display import show_folder
from waffle_fl.cli.progress import Output
from waffle_fl.config import Settings, check_run
from waffle_fl.errors import WaffleError, suggest, writable
from waffle_fl.experiment import federation_of, own_folder
from waffle_fl.federation import Federation
from waffle_fl.user_data import CollectedData, ReadOptions, read_folder
from waffle_fl.user_data.folder_reader import agents_in
from waffle_fl.user_data.table_report import report_tables


def data_command(arguments: Sequence[str]) -> int:
    """Describe a data set, or check your own folder: waffle data NAME."""

    @dataclass(frozen=True)
    class Data:
        """Verify and describe a data set, or show what would be read from your own data folder.

        A data set's missing files are downloaded. For a folder, all problems are listed at once."""

        name: tyro.conf.Positional[str]
        """digits, mnist, fashion-mnist, cifar10 or synthetic; or your own folder with one file per agent."""
        split: str = ""
        """Also show the number of samples per agent and label under this split (A, B, C, A*, B*)."""
        shift: str = ""
        """Additional heterogeneity, such as rotate(45) or dirichlet(0.1). Uses split A unless --split is given."""
        agents: int = 10
        """Number of agents of the split."""
        samples_per_agent: int = 0
        """Training samples per agent. 0 means all."""
        direction: Literal["left", "right"] = "left"
        """Direction in which the split's list of shares is rotated from agent to agent."""
        out: Path = Path("labels.png")
        """File of the split's chart (.png, .pdf or .svg)."""
        data_dir: str = ""
        """Folder of the data sets. Default: $WAFFLE_DATA, or else the user's cache folder."""
        allow_unverified: bool = False
        """Accept files whose checksum is not the official one."""
        output: Output = field(default_factory=Output)

    reading = reading_class()
    kind = dataclasses.make_dataclass(
        "DataFlags", [("reading", reading, field(default_factory=reading))], bases=(Data,), frozen=True
    )
    kind.__doc__ = Data.__doc__
    args: Any = parse(kind, arguments, "data")
    options = ReadOptions(**dataclasses.asdict(args.reading))
    if args.name not in data.NAMES:
        return _describe_folder(args, options)
    if options != ReadOptions():
        raise WaffleError(f"{args.name} is a data set, and target and the like are for your own tables: leave them out")
    _fetch(args.name, args.data_dir, args.output.quiet)
    found = data.load(args.name, args.data_dir, args.allow_unverified)
    facts: dict[str, Any] = {
        "name": found.name,
        "origin": found.origin,
        "verified": found.verified,
        "note": found.note,
        "sample": list(found.x_train.shape[1:]),
        "classes": list(found.class_names),
        "train": len(found.y_train),
        "test": len(found.y_test),
    }
    counts: list[list[int]] = []
    if args.split or args.shift:
        settings = {"data": args.name, "split": args.split or "A", "shift": args.shift, "agents": args.agents,
                    "samples_per_agent": args.samples_per_agent, "direction": args.direction}  # fmt: skip
        config = check_run("fedavg", settings, {})
        federation = federation_of(config.settings, args.data_dir, args.allow_unverified)
        counts = federation.label_counts().tolist()
        s = config.settings
        facts |= {"split": s.split, "label_counts": counts, "split_hash": federation.digest()}
        if s.shift:
            facts |= {"shift": s.shift, "shifted": dict(federation.shifted)}
        _draw(s, federation, args.out)
        facts["picture"] = str(args.out)
    if args.output.json:
        print(json.dumps(facts))
        return 0
    _describe(facts, counts)
    return 0


def _describe_folder(args: Any, options: ReadOptions) -> int:
    """Print what would be read from the user's own folder; raise WaffleError if it has problems."""
    folder = Path(args.name) if Path(args.name).exists() else own_folder(args.name, args.data_dir)
    if folder is None:
        known = suggest(args.name, data.NAMES)
        raise WaffleError(f"unknown data set {args.name!r}{known} (or the path of a data folder)")
    if args.split or args.shift:
        raise WaffleError(f"split and shift divide a data set among agents; in {folder} each agent has its own")
    kinds = {layout for layout, _ in agents_in(folder).values()}
    if kinds != {"tables"}:
        return _describe_samples(read_folder(folder, options), folder, args.output)
    report = report_tables(folder, options)
    if args.output.json:
        print(json.dumps(dataclasses.asdict(report)))
    else:
        show_folder(report, console_for())
    if report.problems:
        count = len(report.problems)
        raise WaffleError(
            f"{folder} cannot be used yet: {count} problem{'s' * (count > 1)} listed above; fix the files, or use the "
            "options named there"
        )
    return 0


def _describe_samples(found: CollectedData, folder: Path, output: Output) -> int:
    """Print the agents of a folder of arrays or images, with their samples per class."""
    counts = {
        name: [int((agent.y == k).sum()) for k in range(len(found.class_names))] for name, agent in found.agents.items()
    }
    shape = list(next(iter(found.agents.values())).x.shape[1:])
    facts = {
        "folder": str(folder),
        "task": found.task,
        "sample": shape,
        "classes": list(found.class_names),
        "agents": {
            n: {"train": len(a.train) + len(a.validation), "test": len(a.test)} for n, a in found.agents.items()
        },
        "label_counts": counts,
        "preprocessing": found.scalings[0].scope if found.scalings else "none",
        "scaling": {n: own.to_json() for n, own in zip(found.agents, found.scalings, strict=False)},
        "notes": list(found.notes),
    }
    if output.json:
        print(json.dumps(facts))
        return 0
    console = console_for()
    rows = sum(len(agent.y) for agent in found.agents.values())
    sides = "x".join(map(str, shape))
    console.print(f"{folder}: {len(counts)} agents, {rows:,} samples of shape {sides}, {found.task}", highlight=False)
    console.print(f"inputs are {_scaling_words(found)}", highlight=False)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for head in ("agent", "train", "test", *found.class_names):
        table.add_column(escape(head), justify="left" if head == "agent" else "right")
    for name, agent in found.agents.items():
        sizes = (len(agent.train) + len(agent.validation), len(agent.test), *counts[name])
        table.add_row(escape(name), *(f"{n:,}" if n else "·" for n in sizes))
    console.print(table)
    for note in found.notes:
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
    return 0


def _scaling_words(found: CollectedData) -> str:
    """Return how arrays or images are standardised."""
    if not found.scalings:
        return "used as given"
    sample = next(iter(found.agents.values())).x.shape[1:]
    whose = "all agents'" if found.scalings[0].scope == "federated" else "each agent's own"
    targets = "; so are the targets, with those of all agents" if found.task == "regression" else ""
    per = "feature" if len(sample) < 2 else "channel"
    return f"standardised per {per} with the mean and deviation of {whose} training samples{targets}"


def _fetch(name: str, folder: str, quiet: bool) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console_for(stderr=True), disable=quiet) as progress:
        tasks: dict[str, Any] = {}

        def advance(file: str, done: int, total: int) -> None:
            task = tasks.setdefault(file, None)
            if task is None:
                task = tasks[file] = progress.add_task(file, total=total)
            progress.update(task, completed=done)

        data.fetch(name, folder, advance)


def _draw(s: Settings, federation: Federation, out: Path) -> None:
    import vl_convert

    from waffle_fl.report.charts import label_chart, to_svg
    from waffle_fl.report.shifts import shift_chart

    drawers: dict[str, Callable[[Any], bytes]] = {
        ".png": lambda chart: vl_convert.vegalite_to_png(chart.to_json()),
        ".pdf": lambda chart: vl_convert.vegalite_to_pdf(chart.to_json()),
        ".svg": lambda chart: to_svg(chart).encode(),
    }
    if out.suffix not in drawers:
        raise WaffleError(f"expected --out to end in .png, .pdf or .svg, got {out}")
    counts = federation.label_counts().tolist()
    chart = shift_chart(federation, s.shift, s.split_seed) if s.shift else label_chart({s.split: counts})
    with writable(out):
        out.write_bytes(drawers[out.suffix](chart))


def _describe(facts: dict[str, Any], counts: list[list[int]]) -> None:
    console = console_for()
    verified = "official checksums verified" if facts["verified"] else "NOT verified"
    shape = "x".join(map(str, facts["sample"]))
    console.print(f"[bold]{facts['name']}[/bold]: {facts['origin']}; {verified}", highlight=False)
    console.print(
        f"{facts['train']:,} training and {facts['test']:,} test samples of shape {shape}, "
        f"{len(facts['classes'])} classes: {', '.join(facts['classes'])}",
        highlight=False,
    )
    if facts["note"]:
        console.print(facts["note"], highlight=False)
    if counts:
        title = f"Training samples under split {facts['split']}" + (
            f" and {facts['shift']}" if "shift" in facts else ""
        )
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for name in ("agent", *map(str, range(len(counts[0]))), "all"):
            table.add_column(name, justify="left" if name == "agent" else "right", no_wrap=True)
        for i, line in enumerate(counts):
            table.add_row(str(i), *(str(n) if n else "·" for n in line), str(sum(line)))
        console.print(table)
        for shift, groups in facts.get("shifted", {}).items():
            console.print(
                f"{shift}: groups of the agents: {', '.join(map(str, groups))}; Alice is in group 0", highlight=False
            )
        console.print(f"picture: {facts['picture']}", highlight=False)
