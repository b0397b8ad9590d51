"""Import of the user's own code, given as `module:name`: a method, a model or a schedule."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from waffle_fl.errors import WaffleError, suggest


def import_named(text: str, what: str) -> Any:
    """Return the object `module:name`. The current folder is searched after all other places."""
    module, _, name = text.partition(":")
    try:
        here = str(Path.cwd())
        if here not in sys.path:
            sys.path.append(here)
        found = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or module.split(".")[: error.name.count(".") + 1] != error.name.split("."):
            raise WaffleError(f"cannot import the {what} {text!r}: {error}") from None
        file = f"{error.name.replace('.', '/')}.py"
        raise WaffleError(
            f"cannot import the {what} {text!r}: {error}; run waffle in the folder that holds {file}, or put that "
            "folder on PYTHONPATH"
        ) from None
    except Exception as error:  # the user's module may raise anything while it is imported
        reason = " ".join(str(error).split())
        raise WaffleError(f"cannot import the {what} {text!r}: {type(error).__name__}: {reason}") from None
    if not hasattr(found, name):
        public = [known for known in vars(found) if not known.startswith("_")]
        near = suggest(name, public)
        raise WaffleError(
            f"cannot import the {what} {text!r}: {module} has no {name!r}{near if 'did you mean' in near else ''}"
        )
    return getattr(found, name)
