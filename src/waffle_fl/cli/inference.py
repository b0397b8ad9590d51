"""The commands that use a finished run: predict and export."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from waffle_fl.atomic_files import write_atomically
from waffle_fl.cli.flags import parse
from waffle_fl.cli.progress import Folder, Notes
from waffle_fl.errors import WaffleError, writable
from waffle_fl.inference import exporting, predicting
from waffle_fl.inference.trained_run import open_run


def predict(arguments: Sequence[str]) -> int:
    """Apply a run's model to new data: waffle predict RUN data.csv."""

    @dataclass(frozen=True)
    class Predict:
        """Print one prediction per row: class and probabilities, or a number. Adds metrics if labels are present."""

        run: tyro.conf.Positional[Path]
        """Run folder."""
        data: tyro.conf.Positional[Path]
        """Table like the training data (.csv, .parquet; target column optional), or x in .npy, or x (and y) in .npz."""
        keep: tuple[str, ...] = ()
        """Columns of the table to copy to the output, such as patient_id."""
        max_expansion: float = 0.0
        """Most memory that a compressed file takes, in multiples of its size. Default: that of the run."""
        out: str = ""
        """Write the predictions to this .csv file instead of stdout."""
        json: bool = False
        """Print predictions and metrics as JSON on stdout."""
        folder: Folder = field(default_factory=Folder)

    args = parse(Predict, arguments, "predict")
    notes = Notes()
    trained = open_run(args.run, trust=args.folder.trust, force=args.folder.force, warn=notes.add)
    if args.max_expansion and args.max_expansion < 1:
        raise WaffleError(f"--max-expansion: expected at least 1, got {args.max_expansion:g}")
    found = predicting.predict(trained, args.data, args.keep, args.max_expansion or None)
    for note in found.notes:
        notes.add(note)
    notes.show()
    if args.out:
        with writable(Path(args.out)):
            write_atomically(Path(args.out), found.to_csv().encode())
    if args.json:
        where = {"out": args.out} if args.out else {"predictions": found.to_json()}
        metrics = {} if found.metrics is None else {"metrics": found.metrics}
        print(json.dumps({"run": str(args.run), "rows": len(found.values), **where, **metrics}))
        return 0
    if not args.out:
        print(found.to_csv(), end="")
    if found.metrics is not None:
        numbers = ((name.replace("_", " "), value) for name, value in found.metrics.items())
        text = ", ".join(f"{name} {'n/a' if value is None else f'{value:.4f}'}" for name, value in numbers)
        print(f"{len(found.values)} rows: {text}", file=sys.stdout if args.out else sys.stderr)
    return 0


def export(arguments: Sequence[str]) -> int:
    """Export a run's model for other programs: waffle export RUN."""

    @dataclass(frozen=True)
    class Export:
        """Write the weights as safetensors, a model card as JSON, and a program that runs without this library."""

        run: tyro.conf.Positional[Path]
        """Run folder."""
        out: str = ""
        """Output folder. Default: `export` in the run folder."""
        format: exporting.Format = "exported"
        """Format of the program: torch.export (model.pt2), TorchScript, ONNX (needs waffle-fl[onnx]), or none."""
        json: bool = False
        """Print the paths of the files as JSON on stdout."""
        folder: Folder = field(default_factory=Folder)

    args = parse(Export, arguments, "export")
    notes = Notes()
    trained = open_run(args.run, trust=args.folder.trust, force=args.folder.force, warn=notes.add)
    files = [str(path) for path in exporting.export(trained, Path(args.out or args.run / "export"), args.format)]
    notes.show()
    print(json.dumps({"run": str(args.run), "files": files}) if args.json else "\n".join(files))
    return 0
