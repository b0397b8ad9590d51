"""Your own data: a folder with one file or folder an agent, or arrays, becomes the samples of a federation."""

from __future__ import annotations

from waffle_fl.own.arrays import gather, stacked
from waffle_fl.own.folder import read_folder
from waffle_fl.own.parts import AgentData, Gathered, Reading
from waffle_fl.own.preprocessing import Column, Preprocessing, Task, Wish

__all__ = [
    "AgentData",
    "Column",
    "Gathered",
    "Preprocessing",
    "Reading",
    "Task",
    "Wish",
    "gather",
    "read_folder",
    "stacked",
]
