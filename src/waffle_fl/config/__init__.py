"""Settings of a run, their validation, and experiment files. One error message lists all problems found."""

from waffle_fl.config.files import load_experiment, load_experiments, read_toml
from waffle_fl.config.imports import check_trusted, imports_in
from waffle_fl.config.settings import (
    ALL_ALICES,
    COMMON,
    SCHEMA,
    Experiment,
    RunConfig,
    Settings,
    check_name,
    check_run,
    completed,
    option_types,
)

__all__ = [
    "ALL_ALICES",
    "COMMON",
    "SCHEMA",
    "Experiment",
    "RunConfig",
    "Settings",
    "check_name",
    "check_run",
    "check_trusted",
    "completed",
    "imports_in",
    "load_experiment",
    "load_experiments",
    "option_types",
    "read_toml",
]
