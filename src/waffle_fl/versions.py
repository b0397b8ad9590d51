"""Two integers that decide what fits together; editing a comment or renaming a function changes neither.

RESULTS_VERSION  Raise it when a run with the same config gives other numbers: batches, arithmetic, initial models, how
                 data is read. An unfinished run is resumed only under the version that began it.
WIRE_VERSION     Raise it when the messages between server and site change: their fields, what they mean, how they are
                 signed. A server and a site must have the same.
"""

from __future__ import annotations

RESULTS_VERSION = 2
WIRE_VERSION = 2
