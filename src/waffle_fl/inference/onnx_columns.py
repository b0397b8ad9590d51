"""Put the preprocessing of a table into an ONNX model, so that its inputs are the columns of the table.

A numeric column is an input of doubles, NaN if missing; a categorical column is an input of strings, empty if missing.
Each has one value per row.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from waffle_fl.user_data import Column, Preprocessing
from waffle_fl.user_data.cells import ABSENT, UNKNOWN, number_of
from waffle_fl.user_data.cleaning import MISSING, CellRules, text_for

MODEL = "model/"  # prefix of the names inside the model, so that a column may have any name
OUTPUT = "output"
ML = ("ai.onnx.ml", 2)  # domain and version of LabelEncoder


def with_columns(model: Any, preprocessing: Preprocessing) -> Any:
    """Return an ONNX model whose inputs are the table's columns, from one whose only input is the features."""
    from onnx import TensorProto, checker, compose, helper

    inner = compose.add_prefix(model, MODEL)
    (features,) = inner.graph.input
    nodes, blocks = _Nodes(), []
    for i, column in enumerate(preprocessing.columns):
        make = nodes.numeric if column.kind == "numeric" else nodes.categorical
        blocks += make(f"column {i}/", input_name(column.name), column, preprocessing)
    joined = nodes.add("Concat", blocks, "features/joined", axis=1)
    nodes.add("Cast", [joined], features.name, to=features.type.tensor_type.elem_type)
    nodes.made += inner.graph.node
    nodes.add("Identity", [MODEL + OUTPUT], OUTPUT)
    kinds = {"numeric": TensorProto.DOUBLE, "categorical": TensorProto.STRING}
    inputs = [helper.make_tensor_value_info(input_name(c.name), kinds[c.kind], ["rows"]) for c in preprocessing.columns]
    (output,) = inner.graph.output
    output.name = OUTPUT
    graph = helper.make_graph(nodes.made, "table", inputs, [output], [*inner.graph.initializer, *nodes.constants])
    versions = {entry.domain: entry.version for entry in inner.opset_import} | {ML[0]: ML[1]}
    made = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid(domain, version) for domain, version in versions.items()],
        functions=list(inner.functions),
        ir_version=inner.ir_version,
    )
    checker.check_model(made)
    return made


def input_name(column: str) -> str:
    """Return the name of a column's input; it differs from the column's only if that is the name of the output."""
    return f"{OUTPUT} (column)" if column == OUTPUT else column


class _Nodes:
    """The nodes of a graph and their constants."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.constants: list[Any] = []

    def add(self, kind: str, inputs: list[str], name: str, domain: str = "", **attributes: Any) -> str:
        """Add a node with one output, and return the name of that output."""
        from onnx import helper

        self.made.append(helper.make_node(kind, inputs, [name], name=f"node {name}", domain=domain, **attributes))
        return name

    def constant(self, name: str, values: list[Any], kind: str, shape: tuple[int, ...] = ()) -> str:
        from onnx import TensorProto, helper

        self.constants.append(helper.make_tensor(name, getattr(TensorProto, kind), shape, values))
        return name

    def as_feature(self, name: str) -> str:
        """Return a value per row as a column of floats."""
        axis = self.constant(f"{name} axis", [1], "INT64", (1,))
        return self.add("Unsqueeze", [self.as_float(name), axis], f"{name} feature")

    def as_float(self, name: str) -> str:
        return self.add("Cast", [name], f"{name} float", to=1)

    def numeric(self, at: str, source: str, column: Column, fitted: Preprocessing) -> list[str]:
        """Add the features of a numeric column, computed in double precision."""
        zero = self.constant(f"{at}zero", [0.0], "DOUBLE")
        for k, code in enumerate(_codes(column.name, fitted.rules)):
            equal = self.add("Equal", [source, self.constant(f"{at}code {k}", [code], "DOUBLE")], f"{at}is code {k}")
            absent = self.constant(f"{at}absent {k}", [float("nan")], "DOUBLE")
            source = self.add("Where", [equal, absent, source], f"{at}without code {k}")
        missing = self.add("IsNaN", [source], f"{at}missing")
        centre = self.constant(f"{at}mean", [column.mean], "DOUBLE")
        scale = self.constant(f"{at}deviation", [column.deviation or float("inf")], "DOUBLE")  # a constant becomes 0
        centred = self.add("Sub", [source, centre], f"{at}centred")
        scaled = self.add("Div", [centred, scale], f"{at}scaled")
        if fitted.clip is not None:
            bounds = [self.constant(f"{at}{side:+}", [side * fitted.clip], "DOUBLE") for side in (-1, 1)]
            scaled = self.add("Clip", [scaled, *bounds], f"{at}clipped")
        value = self.add("Where", [missing, zero, scaled], f"{at}value")
        return [self.as_feature(value), *([self.as_feature(missing)] if column.missing else [])]

    def categorical(self, at: str, source: str, column: Column, fitted: Preprocessing) -> list[str]:
        """Add the one-hot features of a categorical column; an unknown category gives zeros."""
        rules = fitted.rules
        words: dict[str, int] = dict.fromkeys(_missing_words(column.name, rules), ABSENT)
        for k, category in enumerate(column.categories):
            for text in _spellings(category, rules):
                words.setdefault(text, k)
        code = self.add(
            "LabelEncoder",
            [source],
            f"{at}code",
            domain=ML[0],
            keys_strings=list(words),
            values_int64s=list(words.values()),
            default_int64=UNKNOWN,
        )
        count, made = len(column.categories), []
        if count:
            axis = self.constant(f"{at}axis", [1], "INT64", (1,))
            upright = self.add("Unsqueeze", [code, axis], f"{at}codes")
            known = self.constant(f"{at}categories", list(range(count)), "INT64", (1, count))
            made.append(self.as_float(self.add("Equal", [upright, known], f"{at}one-hot")))
        if column.missing:
            absent = self.constant(f"{at}absent", [ABSENT], "INT64")
            made.append(self.as_feature(self.add("Equal", [code, absent], f"{at}missing")))
        return made


def _codes(column: str, rules: CellRules) -> Iterator[float]:
    for given in rules.missing:
        text = text_for(given, column)
        value = number_of(text.replace(",", ".") if rules.decimal == "," else text) if text else float("nan")
        if value - value == 0:
            yield value


def _missing_words(column: str, rules: CellRules) -> list[str]:
    own = [text for given in rules.missing if (text := text_for(given, column)) is not None]
    return [*sorted(MISSING), *(word for text in own for word in _spellings(text, rules))]


def _spellings(text: str, rules: CellRules) -> list[str]:
    """Return the texts that are read as this one: 1.0 for 1 and, without regard to case, YES and Yes for yes."""
    cases = [text, text.upper(), text.capitalize(), text.title()] if rules.fold_case else [text]
    return list(dict.fromkeys([*cases, *([f"{text}.0"] if re.fullmatch(r"[-+]?\d+", text) else [])]))
