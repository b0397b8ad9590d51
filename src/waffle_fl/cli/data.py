"""`waffle data`: download, verify and describe a data set."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.box import SIMPLE_HEAD
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from waffle_fl import data
from waffle_fl.cli.console import console_for
from waffle_fl.cli.flags import parse
from waffle_fl.cli.progress import Output
from waffle_fl.config import Settings, check_run
from waffle_fl.errors import WaffleError, suggest, writable
from waffle_fl.experiment import federation_of
from waffle_fl.federation import Federation


def data_command(arguments: Sequence[str]) -> int:
    """Download, verify and describe a data set: waffle data NAME."""

    @dataclass(frozen=True)
    class Data:
        """Verify and describe a data set. Files that are missing are downloaded."""

        name: tyro.conf.Positional[str]
        """digits, mnist, fashion-mnist, cifar10 or synthetic."""
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

    args = parse(Data, arguments, "data")
    if args.name not in data.NAMES:
        raise WaffleError(f"unknown data set {args.name!r}{suggest(args.name, data.NAMES)}")
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
