"""Choose how the agents train on the user's own data, for `waffle run` and `waffle decide`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from waffle_fl.cli.progress import ProgressFlags, live
from waffle_fl.config import Settings
from waffle_fl.decision.study import ALONE
from waffle_fl.errors import writable
from waffle_fl.experiment import Runtime
from waffle_fl.records import write_json
from waffle_fl.tuning.default_training import ChosenTraining, choose_training, given_settings, request_digest

TrainingOption: TypeAlias = Literal["auto", "given"]
TRAINING_HELP = (
    "Training on your own data. auto: Adam, with learning rate, weight decay and, for tables, the network, for images "
    "augmentation, chosen per method on validation data, and the model of the round with the best validation score. "
    "given, or any --lr or --optimiser: the settings below."
)


def chosen_training(
    option: TrainingOption,
    s: Settings,
    methods: Sequence[str],
    options: Mapping[str, Mapping[str, Any]],
    arguments: Sequence[str],
    out: Path,
    runtime: Runtime,
    output: ProgressFlags,
    factor: float = 1.0,
) -> ChosenTraining | None:
    """Choose the training of each method, print it, and return it; None if the settings are used as given.

    `factor` multiplies the work above which less is tried. The trials are kept in a hidden folder beside `out` and
    reused by equal requests.
    """
    given = given_settings(arguments)
    if not _chooses(option, s, given):
        return None
    tried = tuple(dict.fromkeys((ALONE, *methods)))
    folder = out.parent / ".training" / request_digest(s, tried, options, given, runtime, factor)
    with live(output) as listener:
        training = choose_training(s, tried, options, given, folder, runtime, listener, factor)
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "training.json", training.to_json())
    if not output.quiet:
        print(f"note: training chosen on validation data: {training.text()}", file=sys.stderr)
    return training


def chooses_rounds(option: TrainingOption, s: Settings, arguments: Sequence[str]) -> bool:
    """Whether the number of rounds is chosen too."""
    given = given_settings(arguments)
    return _chooses(option, s, given) and "rounds" not in given


def _chooses(option: TrainingOption, s: Settings, given: Sequence[str]) -> bool:
    return s.is_own and option == "auto" and not {"lr", "optimiser"}.intersection(given)
