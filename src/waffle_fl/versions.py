"""Two integers that say what fits together. A comment or a renamed function changes neither.

RESULTS_VERSION  raise it when the numbers of a run change: batches, arithmetic, initial models, how data is read.
WIRE_VERSION     raise it when what travels between a server and a site changes: fields, their meaning, the signature.
"""

from __future__ import annotations

RESULTS_VERSION = 1
WIRE_VERSION = 2
