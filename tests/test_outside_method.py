"""A method from outside the package, as in CONTRIBUTING.md, works wherever a method name does."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import subprocess
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import waffle_fl
from conftest import refusal
from waffle_fl import cli
from waffle_fl.algorithms import ALGORITHMS, SGD, about_of, algorithm_of, registry, title_of
from waffle_fl.algorithms.fedprox import FedProx
from waffle_fl.algorithms.hooks import HOOKS
from waffle_fl.algorithms.registry import check_method, methods_in
from waffle_fl.config import RunConfig, Settings, check_run, check_trusted, load_experiment
from waffle_fl.deploy.policy import Policy, Refused
from waffle_fl.deploy.settings_files import read_site, site_text
from waffle_fl.inference.estimators import PersonalizedClassifier
from waffle_fl.models import builder
from waffle_fl.results import read_run, read_runs
from waffle_fl.tuning.space import space_of

ROOT = Path(__file__).parent.parent
NAME = "mine:ConstantPull"
SMALL = ("--data", "digits", "--agents", "3", "--rounds", "2", "--samples-per-agent", "60", "--quiet")
GRID = f"""
data = "digits"
methods = ["{NAME}", "fedprox"]
agents = 3
rounds = 2
samples_per_agent = 60

["{NAME}"]
mu = 0.02
"""


def snippet() -> str:
    """Return the code of the method in CONTRIBUTING.md."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)[0]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a working folder with the file mine.py."""
    (tmp_path / "mine.py").write_text(snippet())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    registry._imported.cache_clear()
    return tmp_path


def waffle(*arguments: str | Path) -> tuple[int, str, str]:
    """Run a command in this process and return exit code, standard output and standard error."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["waffle", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as stop:
            cli.main()
    finally:
        sys.argv = before
    return int(stop.value.code or 0), out.getvalue(), err.getvalue()


def test_the_method_is_short() -> None:
    """The example of CONTRIBUTING.md has fewer than 25 lines."""
    assert len(snippet().splitlines()) < 25


def test_a_bench_to_the_report(here: Path) -> None:
    """A bench with the method runs, its table has the runs, and a report of the folder needs --trust."""
    (here / "grid.toml").write_text(GRID)
    code, out, err = waffle("bench", "grid.toml", "--quiet")
    assert code == 0, err
    assert "ConstantPull" in out
    folders = sorted(path.parent for path in here.glob("runs/grid/*/result.json"))
    assert [folder.name for folder in folders] == ["digits-C-fedprox-1", "digits-C-mine-ConstantPull-1"]
    config = json.loads((folders[1] / "config.json").read_text())
    assert config["method"] == NAME
    assert config["options"] == {"mu": 0.02}
    code, _, err = waffle("report", "runs/grid")
    assert code == 2
    assert f"method = '{NAME}'" in err
    assert "--trust" in err
    code, _, err = waffle("report", "runs/grid", "--trust")
    assert code == 0, err
    pages = "".join(path.read_text() for path in here.rglob("*.html"))
    assert "ConstantPull" in pages
    assert waffle("bench", "grid.toml", "--quiet")[0] == 0  # finished runs are read again


def test_a_run_and_its_flags(here: Path) -> None:
    """`waffle run module:Class` has the method's flags, checks its constraints, and resumes."""
    code, _, err = waffle("run", NAME, *SMALL, "--mu", "0.5")
    assert code == 0, err
    (folder,) = here.glob("runs/*")
    assert read_run(folder, trust=True).title == "ConstantPull"
    code, _, err = waffle("run", NAME, *SMALL, "--mu", "-1")
    assert code == 2
    assert "mu: expected at least 0, got -1.0" in err
    assert "--trust" in waffle("resume", folder)[2]
    assert waffle("resume", folder, "--trust", "--quiet")[0] == 0
    assert "Strength of the pull" in waffle("run", NAME, "--help")[1]


def test_a_search(here: Path) -> None:
    """`waffle tune module:Class` searches the declared parameters and writes a file for bench."""
    pytest.importorskip("optuna")
    assert space_of(NAME) == {
        "lr": {"low": 0.01, "high": 0.5, "log": True},
        "mu": {"low": 0.001, "high": 0.1, "log": True},
    }
    code, _, err = waffle("tune", NAME, *SMALL, "--trials", "2", "--out", "tuned")
    assert code == 0, err
    best = load_experiment(here / "tuned" / "best.toml")
    assert best.methods == (NAME,)


def test_a_decision(here: Path) -> None:
    """`waffle decide` compares the method with Local, and its page describes the method."""
    code, out, err = waffle("decide", *SMALL[1:], "--methods", NAME, "--seeds", "1", "--alice", "0", "--out", "page")
    assert code == 0, err
    assert "ConstantPull" in out
    assert "strength does not depend on the distance" in (here / "page" / "decision.html").read_text()


def test_an_estimator(here: Path) -> None:
    """The estimators accept module:Class; a class or an instance is rejected with the text to pass."""
    draw = np.random.default_rng(0)
    agents = {name: (draw.normal(size=(20, 4)), draw.integers(0, 2, 20)) for name in "ab"}
    fitted = PersonalizedClassifier(NAME, rounds=2, options={"mu": 0.1}).fit(agents)
    assert fitted.predict(agents["a"][0]).shape == (20,)
    kind = algorithm_of(NAME)
    for given, text in ((kind, NAME), (kind(), NAME), (FedProx, "fedprox"), (FedProx(), "fedprox")):
        assert refusal(PersonalizedClassifier(given, rounds=1).fit, agents).startswith(
            f"method: expected a name or module:Class such as {text!r}, got "
        )


def test_docstring_is_the_description(here: Path) -> None:
    """Without `about` a method is named after its class and described by its docstring."""
    described = about_of(NAME)
    assert (described.name, described.title) == (NAME, "ConstantPull")
    assert described.in_words.startswith("One global model: FedProx, with a pull")
    config = check_run(NAME, {}, {"mu": 1})
    assert RunConfig.from_json(config.to_json()) == config
    assert re.fullmatch(r"[A-Za-z0-9._-]+", config.label)


def test_titles_are_unique(here: Path) -> None:
    """A title that a method of the package already has is followed by the method's own name."""
    about = 'about = About("x", "FedProx", "all agents", "a model", "An Author, 2030")'
    text = snippet().replace('weighting = "equal"', f'weighting = "equal"\n    {about}')
    (here / "titled.py").write_text(f"from waffle_fl.algorithms import About\n{text}")
    assert title_of("titled:ConstantPull") == "FedProx (titled:ConstantPull)"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("absent:Variant", "No module named 'absent'; run waffle in the folder that holds absent.py, or put that"),
        ("package.absent:Variant", "No module named 'package'; run waffle in the folder that holds package.py"),
        (":Variant", "cannot import the method ':Variant': ValueError: Empty module name"),
        ("mine:ConstantPul", "mine has no 'ConstantPul', did you mean ConstantPull?"),
        ("broken:Variant", "cannot import the method 'broken:Variant': ZeroDivisionError: division by zero"),
        ("needy:Variant", "cannot import the method 'needy:Variant': No module named 'absent_too'"),
        ("mine:normalize", "expected a class, got function"),
        ("wafle", "unknown method 'wafle', did you mean waffle?"),
    ],
)
def test_what_cannot_be_imported(name: str, expected: str, here: Path) -> None:
    """A missing module, a missing class and a module that fails are one line each, with what to do."""
    (here / "broken.py").write_text("1 / 0")
    (here / "needy.py").write_text("import absent_too")
    assert expected in refusal(algorithm_of, name)
    code, _, err = waffle("run", name)
    assert code == 2
    assert len(err.splitlines()) == 1


def test_a_file_with_mistakes(here: Path) -> None:
    """An experiment file with a method that cannot be imported, or with wrong options, is rejected."""
    (here / "a.toml").write_text('methods = ["absent:Variant"]\n["absent:Variant"]\nmu = 1\n')
    assert "No module named 'absent'" in refusal(load_experiment, here / "a.toml")
    (here / "b.toml").write_text(GRID.replace("mu = 0.02", "mu = -1\nnu = 3"))
    text = refusal(load_experiment, here / "b.toml")
    assert "mu (line 9): expected at least 0, got -1" in text
    assert "unknown key 'nu' (line 10), did you mean mu?" in text
    (here / "c.toml").write_text(GRID.replace(f'"{NAME}", ', ""))
    assert f"[{NAME}] (line 8): this method is not among the experiment's methods" in refusal(
        load_experiment, here / "c.toml"
    )


def test_models_in_the_current_folder(here: Path) -> None:
    """A user's model is imported from the current folder."""
    (here / "nets.py").write_text(
        "from torch import nn\n\ndef line(shape, classes):\n    return nn.Linear(4, classes)\n"
    )
    assert builder("nets:line", "", (4,), 2)().out_features == 2
    assert "run waffle in the folder that holds nowhere.py" in refusal(builder("nowhere:line", "", (4,), 2))


def test_code_named_by_a_folder_needs_trust(tmp_path: Path) -> None:
    """A config with the method module:Class is not read, and its code not imported, without trust."""
    content = {**RunConfig(method="fedprox", settings=Settings()).to_json(), "method": "never_imported:Variant"}
    assert "method = 'never_imported:Variant'" in refusal(check_trusted, content, tmp_path, False)
    assert check_trusted(content, tmp_path, True)
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / "result.json").write_text("{}")
    assert "--trust" in refusal(read_runs, [tmp_path])


def test_a_site_lists_method_and_import(tmp_path: Path) -> None:
    """A site runs and imports the method only if it is listed in both methods and imports."""
    text = site_text("north", "localhost", 9000, 9001, "north.csv", True)
    listed = text.replace('methods = ["local"', f'methods = ["{NAME}", "local"')
    assert listed != text
    (tmp_path / "site.toml").write_text(listed)
    assert f"methods: {NAME!r} must be listed in imports too" in refusal(read_site, tmp_path)
    (tmp_path / "site.toml").write_text(listed.replace("imports = []", f'imports = ["{NAME}"]'))
    found = read_site(tmp_path)
    policy = Policy(**{f.name: getattr(found, f.name) for f in dataclasses.fields(Policy)})
    config = {"method": NAME, "settings": {}, "options": {}}
    policy.admit(config, 1)
    with pytest.raises(Refused, match="does not import 'mine:ConstantPull'"):
        dataclasses.replace(policy, imports=()).admit(config, 1)
    with pytest.raises(Refused, match="takes part in"):
        dataclasses.replace(policy, methods=("local",)).admit(config, 1)


# --- requirements on the class


def changed(**members: Any) -> Any:
    """Return FedProx under another name with these members replaced; None removes one."""
    own = {k: v for k, v in vars(FedProx).items() if k in registry.CONTRACT}
    body = {**own, "__annotations__": {"sgd": SGD}, "sgd": field(default_factory=SGD), **members}
    kind = type("Variant", (), {k: v for k, v in body.items() if v is not None})
    return dataclass(frozen=True)(kind)


@pytest.mark.parametrize("function", registry.CONTRACT)
def test_a_class_that_lacks_a_function(function: str) -> None:
    """A class without a required function is rejected with the function's name."""
    assert f"mine:Variant lacks {function}() of the contract" in refusal(
        check_method, changed(**{function: None}), "mine:Variant"
    )


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("candidate", "candidates"),
        ("rehearsal", "rehearse"),
        ("relation", "relations"),
        ("personnal", "personal"),
        ("agregate", "aggregate"),
        ("help", "helper"),
        ("answers", "answer"),
        ("new_control_variate", "new_control_variates"),
        ("for_models", "for_model"),
        ("check_agent", "check_agents"),
        ("for_alic", "for_alice"),
    ],
)
def test_a_name_that_is_nearly_a_hook(wrong: str, meant: str) -> None:
    """A public name similar to a hook's is rejected with the hook's name; a private name is accepted."""
    extra = {wrong: lambda self: None}
    text = refusal(check_method, changed(**extra), "mine:Variant")
    assert f"{wrong!r} is not part of the contract, did you mean {meant!r}?" in text
    check_method(changed(**{f"_{wrong}": extra[wrong]}), "mine:Variant")


def test_hyperparameters_may_have_such_names() -> None:
    """A hyperparameter may have a name similar to a hook's, such as `steps` or `pull`."""
    check_method(changed(steps=3, pull=0.1, __annotations__={"sgd": SGD, "steps": int, "pull": float}), "mine:Variant")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (lambda: 3, "expected a class, got int"),
        (lambda: type("Plain", (), {k: v for k, v in vars(FedProx).items() if k in registry.CONTRACT}), "frozen"),
        (lambda: changed(sgd=None, __annotations__={"mu": float}, mu=1.0), "lacks the field sgd: SGD"),
        (lambda: changed(__annotations__={"mu": float, "sgd": SGD}), "expected a default for each hyperparameter, mu"),
        (lambda: changed(__annotations__={"sgd": "Nowhere"}), "its annotations cannot be read: name 'Nowhere'"),
        (lambda: changed(about="FedProx"), "expected about to be an About, got str"),
    ],
)
def test_other_mistakes_of_a_class(kind: Any, expected: str) -> None:
    """An object that is no frozen dataclass, or lacks an optimiser or a default, is rejected with what to do."""
    assert expected in refusal(check_method, kind(), "mine:Variant")


# --- the registry of the package


@pytest.mark.parametrize("method", list(ALGORITHMS))
def test_every_method_describes_itself(method: str) -> None:
    """Each method has a name, a title, a summary, a description for the decision page and a position in tables."""
    kind: Any = ALGORITHMS[method]
    about = kind.about
    assert about.name == method
    assert about.title
    assert about.in_words
    assert about.trains_model_for in ("Alice", "each agent", "all agents")
    assert re.search(r"\b(19|20)\d\d$", about.cite) or method in ("local", "fedavg-ft", "waffle")
    assert sum(about.order == other.about.order for other in ALGORITHMS.values()) == 1  # type: ignore[attr-defined]
    assert len(kind.__doc__.splitlines()[0]) > 20
    assert getattr(waffle_fl, kind.__name__) is kind


def test_the_order_of_tables() -> None:
    """Tables list WAFFLE among the paper's methods first, then the others in order of addition."""
    assert list(ALGORITHMS)[:8] == [
        *("local", "fedavg", "scaffold", "weight-erosion", "waffle", "waffle-paper", "apfl", "ditto"),
    ]
    assert list(ALGORITHMS)[-1] == "mr-mtl"


def test_a_new_file_is_a_new_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new module in the package is registered, and its class is exported by waffle_fl."""
    text = (ROOT / "src/waffle_fl/algorithms/fedprox.py").read_text()
    text = (
        text.replace("class FedProx", "class FedNew").replace('"fedprox"', '"fednew"').replace("order=80", "order=85")
    )
    (tmp_path / "fednew.py").write_text(text)
    package = types.ModuleType("some_package")
    package.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, "some_package", package)
    found = methods_in(package)
    assert list(found) == ["fednew"]
    monkeypatch.setitem(ALGORITHMS, "fednew", found["fednew"])
    assert waffle_fl.FedNew is found["fednew"]
    assert "FedNew" in dir(waffle_fl)
    assert "FedNew" in waffle_fl.__all__
    sys.modules.pop("some_package.fednew")


def test_hooks_of_the_package() -> None:
    """Every hook is used by some method, and the method's function has the hook's signature."""
    for name, protocol in HOOKS.items():
        having = [kind() for kind in ALGORITHMS.values() if hasattr(kind, name)]
        assert having, name
        assert all(isinstance(algorithm, protocol) for algorithm in having)


def test_unknown_names_of_the_package() -> None:
    """An unknown name raises AttributeError."""
    for name in ("FedNothing", "nothing", "_nothing"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
            getattr(waffle_fl, name)


def test_torch_is_imported_late() -> None:
    """Importing the package does not import torch."""
    check = "import sys, waffle_fl; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0
