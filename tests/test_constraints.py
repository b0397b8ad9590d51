"""Every parameter is checked at construction, and one line lists everything that is wrong."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any, Literal

import pytest

from waffle_fl.algorithms import ALGORITHMS, SGD, hyperparameters
from waffle_fl.algorithms.apfl import APFL
from waffle_fl.algorithms.contract import check_agents
from waffle_fl.algorithms.fedavg import FedAvg
from waffle_fl.algorithms.fedprox import FedProx
from waffle_fl.algorithms.waffle_paper import WafflePaper
from waffle_fl.config import RunConfig, Settings, check_run
from waffle_fl.constraints import (
    Parameter,
    above,
    at_least,
    below_one,
    between,
    check_fields,
    constraint_of,
    each_above,
    fraction,
    model_dependent,
    parameter,
    parameters_of,
    readable,
)
from waffle_fl.errors import WaffleError

WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (SGD, {"lr": -0.1}, "lr: expected a number above 0, got -0.1"),
    (SGD, {"lr": math.inf}, "lr: expected a finite number, got inf"),
    (SGD, {"lr": True}, "lr: expected a finite number, got True"),
    (SGD, {"momentum": 5}, "momentum: expected a number from 0 to below 1, got 5"),
    (SGD, {"weight_decay": -1}, "weight_decay: expected at least 0, got -1"),
    (
        SGD,
        {"momentum_between_rounds": "kep"},
        "expected 'reset' or 'keep' or 'average', got 'kep', did you mean 'keep'?",
    ),
    (WafflePaper, {"eta_g": -1}, "eta_g: expected a number above 0, got -1"),
    (WafflePaper, {"clip": -1}, "clip: expected at least 0, got -1"),
    (WafflePaper, {"denominator": "typo"}, "denominator: expected 'max' or 'range', got 'typo'"),
    (WafflePaper, {"compared": "direction"}, "got 'direction', did you mean 'directions'?"),
    (WafflePaper, {"control": "papr"}, "control: expected 'anchored' or 'paper', got 'papr', did you mean 'paper'?"),
    (WafflePaper, {"omega": "sigmod(3)"}, "omega: unknown schedule 'sigmod', did you mean sigmoid?"),
    (WafflePaper, {"omega": "sigmoid(-2)"}, "omega: a sigmoid needs a slope >= 0, got -2.0"),
    (WafflePaper, {"psi": "nowhere:schedule"}, "psi: cannot import the schedule 'nowhere:schedule'"),
    (WafflePaper, {"psi": 3}, "psi: expected text or a function, got 3"),
    (WafflePaper, {"sgd": 0.1}, "sgd: expected SGD or Adam, got 0.1"),
    (APFL, {"mix": 3}, "mix: expected a number from 0 to 1, got 3"),
    (APFL, {"adaptive": True}, "adaptive: expected 'step' or 'round' or 'off', got True"),
    (FedProx, {"mu": -5}, "mu: expected at least 0, got -5"),
    (FedAvg, {"weighting": "equall"}, "expected 'equal' or 'samples', got 'equall', did you mean 'equal'?"),
    (FedAvg, {"weighting": ["equal"]}, "weighting: expected 'equal' or 'samples', got ['equal']"),
    (FedAvg, {"aggregation": "krumm(1)"}, "aggregation: unknown aggregation 'krumm', did you mean krum?"),
    (FedAvg, {"aggregation": "krum(1.5)"}, "aggregation: krum expects a whole number of malicious agents, got 1.5"),
    (Settings, {"precision": "flaot32"}, "got 'flaot32', did you mean 'float32'?"),
    (Settings, {"rounds": 0}, "rounds: expected at least 1, got 0"),
    (Settings, {"rounds": -3}, "rounds: expected at least 1, got -3"),
    (Settings, {"rounds": 2.0}, "rounds: expected an integer, got 2.0"),
    (Settings, {"rounds": True}, "rounds: expected an integer, got True"),
    (Settings, {"seed": "a"}, "seed: expected an integer, got 'a'"),
    (Settings, {"seed": -1}, "seed: expected at least 0, got -1"),
    (Settings, {"lr": 0}, "lr: expected a number above 0, got 0"),
    (Settings, {"momentum": 1.0}, "momentum: expected a number from 0 to below 1, got 1.0"),
    (Settings, {"agents": 0}, "agents: expected at least 1, got 0"),
    (Settings, {"attackers": 0}, "attackers: expected at least 1, got 0"),
    (Settings, {"attack": "sign-flop"}, "attack: unknown attack 'sign-flop', did you mean sign-flip?"),
    (Settings, {"shift": "rotat(45)"}, "shift: unknown shift 'rotat', did you mean rotate?"),
    (Settings, {"sizes": (1.0, 0.0)}, "sizes: expected numbers above 0, got (1.0, 0.0)"),
    (Settings, {"sizes": 3}, "sizes: expected a list of numbers, got 3"),
    (Settings, {"shares": ((1.0,), "b")}, "shares: expected a matrix of numbers, got"),
    (Settings, {"categorical": (1,)}, "categorical: expected a list of texts, got (1,)"),
    (Settings, {"validation": 1.0}, "validation: expected a fraction from 0 to below 1, got 1.0"),
    (Settings, {"test_share": 0.0}, "test_share: expected a fraction above 0 and below 1, got 0.0"),
    (Settings, {"augment": 1}, "augment: expected true or false, got 1"),
    (Settings, {"data": 3}, "data: expected text, got 3"),
]


def problem_of(kind: Any, given: dict[str, Any]) -> str:
    """The error message of a refused construction."""
    with pytest.raises(WaffleError) as caught:
        kind(**given)
    return str(caught.value)


@pytest.mark.parametrize(("kind", "given", "expected"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_values_are_refused_at_construction(kind: Any, given: dict[str, Any], expected: str) -> None:
    """A wrong value raises a one-line WaffleError with the parameter, the expected and the given value."""
    text = problem_of(kind, given)
    assert expected in text
    assert text.startswith(f"{next(iter(given))}: ")
    assert "\n" not in text


def test_positional_values_are_checked() -> None:
    """SGD(-0.1) is refused in the same way as SGD(lr=-0.1)."""
    with pytest.raises(WaffleError, match=r"^lr: expected a number above 0, got -0\.1$"):
        SGD(-0.1)


def test_all_problems_are_listed_at_once() -> None:
    """One message names every wrong field."""
    text = problem_of(WafflePaper, {"clip": -1, "eta_g": 0, "denominator": "typo", "omega": "linar"})
    assert re.findall(r"(?:^|; )(\w+): ", text) == ["clip", "denominator", "omega", "eta_g"]


def numeric_hyperparameters() -> list[tuple[str, str]]:
    return [
        (method, name)
        for method, kind in ALGORITHMS.items()
        for name in hyperparameters(kind)
        if parameters_of(kind)[name].hint in (int, float)
    ]


@pytest.mark.parametrize(("method", "name"), numeric_hyperparameters())
def test_every_number_refuses_nan(method: str, name: str) -> None:
    """No numeric hyperparameter of any method may be NaN."""
    text = problem_of(ALGORITHMS[method], {name: math.nan})
    assert re.fullmatch(rf"{name}: expected (a finite number|an integer), got nan", text)


@pytest.mark.parametrize(("method", "name"), numeric_hyperparameters())
def test_every_number_has_a_constraint(method: str, name: str) -> None:
    """Every numeric hyperparameter of every method has a limit."""
    assert parameters_of(ALGORITHMS[method])[name].constraint


@pytest.mark.parametrize("method", list(ALGORITHMS))
def test_defaults_are_accepted_and_copies_checked(method: str) -> None:
    """The defaults of a method are valid, and dataclasses.replace checks again."""
    algorithm: Any = ALGORITHMS[method]()
    assert dataclasses.replace(algorithm) == algorithm
    with pytest.raises(WaffleError, match=r"^clip: expected at least 0, got -1$"):
        dataclasses.replace(algorithm, clip=-1)


def test_compatible_types_are_accepted() -> None:
    """Integers are numbers, NumPy floats are floats, and a schedule may be a function."""
    numpy = pytest.importorskip("numpy")
    assert SGD(1).lr == 1
    assert SGD(numpy.float64(0.5)).lr == 0.5
    assert callable(WafflePaper(omega=lambda r, rounds: 0.5).omega)
    assert WafflePaper(omega="adaptive", psi="step(0.5)").psi == "step(0.5)"


def test_a_config_gives_the_messages_of_the_constructors() -> None:
    """A config with wrong values is refused with the messages of the constructors."""
    with pytest.raises(WaffleError) as caught:
        check_run("waffle-paper", {"rounds": 0, "lr": -1.0}, {"eta_g": -1, "omega": "sigmod(3)"})
    expected = [*problem_of(Settings, {"rounds": 0, "lr": -1.0}).split("; ")]
    expected += problem_of(WafflePaper, {"eta_g": -1, "omega": "sigmod(3)"}).split("; ")
    assert sorted(str(caught.value).split("; ")) == sorted(expected)


def test_settings_of_an_earlier_version_are_read() -> None:
    """A config that lacks later settings, and has lists in place of tuples, can be read."""
    content = RunConfig(method="waffle-paper", settings=Settings(sizes=(1.0, 2.0))).to_json()
    settings = {**content["settings"], "sizes": [1, 2], "alice": 0}
    settings.pop("momentum_between_rounds")
    options = {k: v for k, v in content["options"].items() if k != "compared"}
    read = RunConfig.from_json({**content, "settings": settings, "options": options})
    assert read.settings == Settings(sizes=(1.0, 2.0))
    assert read.algorithm() == WafflePaper(sgd=SGD())


@pytest.mark.parametrize("rule", ["krum(99)", "multi-krum(2)", "trimmed-mean(f=2)"])
def test_a_rule_that_expects_too_many_malicious_agents_is_refused(rule: str) -> None:
    """A robust rule that expects half of the agents to be malicious is refused in one line."""
    with pytest.raises(WaffleError, match=r"^aggregation: .* malicious agents of 4, .*use at most .*\(1\), or mean$"):
        check_agents(FedAvg(aggregation=rule), 4)


def test_valid_rules_are_accepted() -> None:
    """Rules that expect a minority, and methods without a limit on agents, are accepted."""
    for rule in ("mean", "median", "krum", "krum(4)", "centered-clipping(2)"):
        check_agents(FedAvg(aggregation=rule), 10)
    check_agents(WafflePaper(), 1)


@pytest.mark.parametrize(
    ("constraint", "fitting", "wrong", "words"),
    [
        (at_least(2), 2, 1, "at least 2"),
        (above(0), 0.1, 0, "a number above 0"),
        (between(0, 1), 1, 1.1, "a number from 0 to 1"),
        (below_one(), 0, 1, "a number from 0 to below 1"),
        (fraction(), 0, 1, "a fraction from 0 to below 1"),
        (fraction(positive=True), 0.5, 0, "a fraction above 0 and below 1"),
        (each_above(0), (1, 2), (1, 0), "numbers above 0"),
    ],
)
def test_constraints(constraint: Any, fitting: Any, wrong: Any, words: str) -> None:
    """A constraint accepts its bounds and refuses values beyond them."""
    assert constraint.problem(fitting) == ""
    assert constraint.problem(wrong) == f"expected {words}, got {wrong!r}"


def test_a_readable_text_is_refused_with_the_parsers_message() -> None:
    """The parser's error is the message; values that are not text are not parsed."""

    def parse(text: str) -> None:
        if text != "good":
            raise WaffleError(f"expected good, got {text!r}")

    constraint = readable(parse, "the word good")
    assert [constraint.problem(value) for value in ("good", len)] == ["", ""]
    assert constraint.problem("bad") == "expected good, got 'bad'"


def test_a_dataclass_of_another_package() -> None:
    """Constraints work in any dataclass; fields that depend on the model are not parameters."""

    @dataclasses.dataclass(frozen=True)
    class Method:
        depth: int = parameter(1, at_least(1), search=[1, 2])
        cut: tuple[int, ...] = model_dependent(())

        def __post_init__(self) -> None:
            check_fields(self)

    Method.__annotations__.update(depth=int, cut=tuple[int, ...])
    assert list(parameters_of(Method)) == ["depth"]
    assert constraint_of(Method, "depth") is parameters_of(Method)["depth"].constraint
    with pytest.raises(WaffleError, match=r"^depth: expected at least 1, got 0$"):
        Method(0)


@pytest.mark.parametrize(
    ("hint", "fitting", "wrong"),
    [
        (tuple[int, str], (1, "a"), ("a", 1)),
        (tuple[int, str], (1, "a"), (1,)),
        (list[int], [1], (1,)),
        (float | None, None, "a"),
        (Literal[1, 2], 2, True),
        (dict[str, float], {"a": 1.0}, [1.0]),
    ],
)
def test_types_of_other_methods(hint: Any, fitting: Any, wrong: Any) -> None:
    """Types that no built-in method uses are checked too; Any accepts everything."""
    assert Parameter(hint).problem(fitting) == ""
    assert Parameter(hint).problem(wrong).startswith("expected ")
    assert Parameter(Any).problem(wrong) == ""


def test_long_values_are_shortened() -> None:
    """A message stays one short line whatever the value is."""
    text = Parameter(int).problem("a\n" * 1000)
    assert "\n" not in text
    assert len(text) < 300
