"""User data: read a folder with one file or folder per agent, or arrays, into the samples of a federation."""

from __future__ import annotations

from waffle_fl.user_data.agent_data import AgentData, CollectedData, ReadOptions
from waffle_fl.user_data.array_scaling import ArrayScaling
from waffle_fl.user_data.arrays import gather, stacked
from waffle_fl.user_data.duplicates import Duplicates
from waffle_fl.user_data.folder_reader import read_folder
from waffle_fl.user_data.preprocessing import Column, Preprocessing, ScopeOption, Task, TaskOption

__all__ = [
    "AgentData",
    "ArrayScaling",
    "CollectedData",
    "Column",
    "Duplicates",
    "Preprocessing",
    "ReadOptions",
    "ScopeOption",
    "Task",
    "TaskOption",
    "gather",
    "read_folder",
    "stacked",
]
