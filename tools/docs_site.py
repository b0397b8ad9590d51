"""MkDocs hook: the pages of the site that are generated from the code.

reference/cli.md        the help of every command, from the parsers
reference/settings.md   settings of a run, from the dataclass `Settings`
reference/methods.md    every method with its hyperparameters, from the registry
reference/api.md        the public names, rendered by mkdocstrings
changelog.md ...        the files of the repository's root

The build fails if a public name has no docstring.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import waffle_fl
from waffle_fl.algorithms import ALGORITHMS, algorithm_of
from waffle_fl.algorithms.registry import summary_of
from waffle_fl.cli import menu
from waffle_fl.cli.deploy import COMMANDS as DEPLOY_COMMANDS
from waffle_fl.cli.flags import field_help
from waffle_fl.config import Settings, option_types
from waffle_fl.constraints import parameters_of

ROOT_PAGES = {
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "code-of-conduct.md": "CODE_OF_CONDUCT.md",
}
CLI_INTRODUCTION = """\
# Command line

Generated from the parsers; `waffle COMMAND --help` prints the same text.
"""
SETTINGS_INTRODUCTION = """\
# Settings

Generated from the dataclass `Settings`. Each setting is a flag of `waffle run` (`samples_per_agent` is
`--samples-per-agent`), a key of an experiment file, and a field of a run's `config.json`.

```toml
# experiment.toml
schema = 1
methods = ["local", "waffle-paper"]
seeds = [1, 2, 3]
data = "digits"
rounds = 20
lr = 0.1
```
"""
METHODS_INTRODUCTION = """\
# Methods

Generated from the registry. A hyperparameter is a flag of `waffle run METHOD`, a key of the method's table in an
experiment file, and a field of its class.

```
waffle run waffle --data digits --split C --rounds 20
```
"""
API_INTRODUCTION = """\
# Python API

```python
from waffle_fl import FlatModel, RunSpec, WafflePaper, build, load, simulate, split
```
"""
HELP_WIDTH = 100
API = {  # the sections of reference/api.md: public names by subject
    "Data": ("load", "Dataset", "split", "Partition", "build", "Federation"),
    "Models": ("FlatModel", "Net"),
    "Training": ("simulate", "RunSpec", "Outcome", "Measured", "SGD", "Adam"),
    "Estimators": ("PersonalizedClassifier", "PersonalizedRegressor"),
    "Records": ("table_of_rounds",),
    "Methods from outside": ("Algorithm", "Round", "Grad"),
    "Errors": ("WaffleError",),
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Check the docstrings of public names and list the methods' pages in the navigation."""
    undocumented = [*undocumented_names()]
    if undocumented:
        raise PluginError(f"public names without a docstring: {', '.join(undocumented)}")
    methods = next(section["Methods"] for section in config.nav or [] if "Methods" in section)
    methods += [{kind.about.title: f"algorithms/{name}.md"} for name, kind in ALGORITHMS.items()]  # type: ignore[attr-defined]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    root = Path(config.config_file_path).parent
    pages = {
        "reference/cli.md": cli_page(),
        "reference/settings.md": settings_page(),
        "reference/methods.md": methods_page(),
        "reference/api.md": api_page(),
        **{page: (root / file).read_text(encoding="utf-8") for page, file in ROOT_PAGES.items()},
    }
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to files of the repository's root lead to their pages; show other links out of docs/ as text."""
    here = page.file.src_uri
    in_root = here in ROOT_PAGES
    depth = here.count("/")

    def replaced(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        if in_root:
            inside = target.removeprefix("docs/") if target.startswith("docs/") else f"../{target}"
        else:
            inside = (
                os.path.normpath(f"{'/'.join(here.split('/')[:-1])}/{target}") if depth else os.path.normpath(target)
            )
        if not inside.startswith("../"):
            return f"[{text}]({_relative(inside, here)}{anchor})" if in_root else match[0]
        file = inside.removeprefix("../")
        known = {source: made for made, source in ROOT_PAGES.items()} | {"README.md": "index.md"}
        return f"[{text}]({_relative(known[file], here)}{anchor})" if file in known else text

    return re.sub(r"(?<!!)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)", replaced, markdown)


def _relative(target: str, here: str) -> str:
    return os.path.relpath(target, Path(here).parent)


def cli_page() -> str:
    """Return the help of every command."""
    plain = [name for name in menu.COMMANDS if name not in ("run", "tune", "deploy")]
    commands = [["run"], ["run", "waffle-paper"], ["tune", "waffle-paper"], *([name] for name in plain), ["deploy"]]
    commands += [["deploy", name] for name in DEPLOY_COMMANDS]
    parts = [f"## waffle {' '.join(command)}\n\n{_block(_help(command))}" for command in commands]
    return "\n".join([CLI_INTRODUCTION, _block(menu.usage().replace(str(Path.home()), "~")), *parts])


def _block(text: str) -> str:
    return f"```text\n{text.strip()}\n```\n"


def _help(command: list[str]) -> str:
    """Return what `waffle COMMAND --help` prints."""
    out = io.StringIO()
    quiet = {"COLUMNS": str(HELP_WIDTH), "NO_COLOR": "1", "TERM": "dumb"}
    with patch.dict(os.environ, quiet), contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        menu.main([*command, "--help"])
    home = str(Path.home())
    return "\n".join(line.rstrip() for line in out.getvalue().replace(home, "~").splitlines())


def settings_page() -> str:
    """Return the table of all settings."""
    return f"{SETTINGS_INTRODUCTION}\n{_fields(Settings, {field.name for field in dataclasses.fields(Settings)})}"


def methods_page() -> str:
    """Return every method with its hyperparameters."""
    parts = [METHODS_INTRODUCTION]
    for name, kind in ALGORITHMS.items():
        about = kind.about  # type: ignore[attr-defined]
        options = option_types(name)
        parts += [
            f"## {about.title}\n",
            f"`{name}`{f' ({about.cite})' if about.cite else ''}. {summary_of(kind)} [More](../algorithms/{name}.md)\n",
            _fields(algorithm_of(name), set(options)) if options else "It has no hyperparameters of its own.\n",
        ]
    return "\n".join(parts)


def _fields(kind: Any, names: set[str]) -> str:
    """Return each field with its default, what it allows and its meaning."""
    helps, known = field_help(kind), parameters_of(kind)
    rows = ["| name | default | allowed | meaning |", "| --- | --- | --- | --- |"]
    for field in dataclasses.fields(kind):
        if field.name in names:
            values = (f"`{field.name}`", _default(field), _allowed(known[field.name]), _cell(helps.get(field.name, "")))
            rows.append(f"| {' | '.join(values)} |")
    return "\n".join(rows) + "\n"


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[misc]
    return "" if value in ("", ()) else f"`{value}`"


def _allowed(parameter: Any) -> str:
    if parameter.constraint:
        return _cell(parameter.constraint.words)
    hint = parameter.hint
    choices = [str(choice) for choice in getattr(hint, "__args__", ()) if isinstance(choice, str)]
    return ", ".join(choices) if choices else {bool: "true, false"}.get(hint, "")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def api_page() -> str:
    """Return the public names by subject; mkdocstrings renders each."""
    parts = [API_INTRODUCTION]
    for title, names in API.items():
        parts.append(f"## {title}\n")
        parts += [f"::: {_path(name)}\n" for name in names]
    parts.append("## Methods\n\nTheir hyperparameters are on [the page of methods](methods.md).\n")
    return "\n".join(parts)


def _path(name: str) -> str:
    found = getattr(waffle_fl, name)
    return f"{found.__module__}.{found.__qualname__}"


def undocumented_names() -> Iterator[str]:
    """Yield the public names, and public functions of public classes, that have no docstring."""
    methods = {kind.__name__ for kind in ALGORITHMS.values()}
    sections = {name for names in API.values() for name in names}
    for name in sorted(set(waffle_fl.__all__) - methods - sections):
        yield f"{name} (in no section of tools/docs_site.py)"
    for name in waffle_fl.__all__:
        found = getattr(waffle_fl, name)
        if not inspect.getdoc(found) or (
            dataclasses.is_dataclass(found) and (found.__doc__ or "").startswith(f"{name}(")
        ):
            yield name
        for member, function in _functions(found).items():
            if name not in methods and not inspect.getdoc(function):
                yield f"{name}.{member}"


def _functions(found: Any) -> Mapping[str, Any]:
    if not inspect.isclass(found):
        return {}
    return {
        member: value
        for member, value in vars(found).items()
        if not member.startswith("_")
        and (inspect.isfunction(value) or isinstance(value, (property, classmethod, staticmethod)))
    }
