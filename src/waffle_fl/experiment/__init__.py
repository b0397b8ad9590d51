"""From settings to finished run folders.

place      where and how to run             materials  the federation and the model that settings stand for
planning   the runs of a grid               execution  train them, stack by stack, and resume
jobs       one run on its way: log, checkpoint, close
"""

from waffle_fl.config import EVERYONE
from waffle_fl.experiment.execution import execute
from waffle_fl.experiment.materials import advice, check_output, federation_of, model_name, model_of
from waffle_fl.experiment.place import Interrupted, Listener, Place, device_of
from waffle_fl.experiment.planning import everyone_of, free_folder, handle, plan

__all__ = [
    "EVERYONE",
    "Interrupted",
    "Listener",
    "Place",
    "advice",
    "check_output",
    "device_of",
    "everyone_of",
    "execute",
    "federation_of",
    "free_folder",
    "handle",
    "model_name",
    "model_of",
    "plan",
]
