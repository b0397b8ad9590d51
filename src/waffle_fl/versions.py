"""Version numbers that decide compatibility. Editing a comment or renaming a function changes neither.

RESULTS_VERSION  Raise it when a run with the same config gives other numbers: batches, arithmetic, initial models, how
                 data is read. An unfinished run is resumed only under the version that started it.
WIRE_VERSION     Raise it when the messages between server and site change: their fields, their meaning, their signing.
                 A server and its sites must have the same version.
"""

from __future__ import annotations

RESULTS_VERSION = 8
WIRE_VERSION = 7
