"""From settings to finished run folders.

runtime      device, data folder, workers; listeners
factories    build the federation and the model from the settings
planning     the runs of a grid
prepared_run checks of a run; its data, its model and its spec
grouping     runs that train in one stack
execution    train runs, stack by stack, and resume them
active_run   one run in progress: log, checkpoint, close
"""

from waffle_fl.config import ALL_ALICES
from waffle_fl.experiment.execution import execute
from waffle_fl.experiment.factories import (
    advice,
    check_output,
    federation_of,
    model_name,
    model_of,
    own_folder,
    round_settings,
)
from waffle_fl.experiment.planning import alices, all_alices_of, free_folder, handle, plan
from waffle_fl.experiment.runtime import Interrupted, Listener, Runtime, device_of

__all__ = [
    "ALL_ALICES",
    "Interrupted",
    "Listener",
    "Runtime",
    "advice",
    "alices",
    "all_alices_of",
    "check_output",
    "device_of",
    "execute",
    "federation_of",
    "free_folder",
    "handle",
    "model_name",
    "model_of",
    "own_folder",
    "plan",
    "round_settings",
]
