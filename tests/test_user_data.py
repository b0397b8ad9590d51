"""User data: folders of tables, arrays and images become federations, and every mistake is refused in one line."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, TensorDataset

from conftest import refusal
from waffle_fl import SGD, Federation, FlatModel, RunSpec, WafflePaper, simulate
from waffle_fl.models import builder, squared_error
from waffle_fl.user_data import preprocessing
from waffle_fl.user_data.preprocessing import Moments, Preprocessing, aim_of, fit, moments
from waffle_fl.user_data.splitting import hold_out
from waffle_fl.user_data.tables import numbers, read_table

HEADER = "age,sex,ward,ill"


def write(folder: Path, **agents: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in agents.items():
        (folder / f"{name}.csv").write_text(text)
    return folder


def patients(seed: int, rows: int = 24, header: str = HEADER) -> str:
    rng = np.random.default_rng(seed)
    lines = [header]
    for i in range(rows):
        age, ill = rng.normal(50, 10), i % 2
        lines.append(f"{age + 5 * ill:.3f},{'fm'[i % 3 == 0]},{'abc'[i % 3]},{'yes' if ill else 'no'}")
    return "\n".join(lines) + "\n"


@pytest.fixture
def hospitals(tmp_path: Path) -> Path:
    return write(tmp_path / "hospitals", north=patients(1), south=patients(2, 9), tiny=patients(3, 3))


def read(folder: Path, **options: Any) -> Federation:
    return Federation.from_folder(folder, **{"target": "ill", **options})


# ------------------------------------------------------------------------------------------------------------ tables


def test_a_folder_of_tables_is_a_federation(hospitals: Path) -> None:
    """Each agent is named after its file, sizes may differ, and a quarter of the rows is held out."""
    found = read(hospitals, alice="south")
    assert found.names == ("north", "south", "tiny")
    assert found.names[found.alice] == "south"
    assert found.class_names == ("no", "yes")
    assert found.samples.tolist() == [18, 7, 2]
    assert [len(rows) for rows in found.test] == [6, 2, 1]
    assert found.preprocessing is not None
    assert found.preprocessing.features == ("age", "sex=f", "sex=m", "ward=a", "ward=b", "ward=c")


def test_other_files_are_ignored(hospitals: Path) -> None:
    """Notes and hidden files in the folder are not agents."""
    (hospitals / "README.md").write_text("notes")
    (hospitals / ".hidden.csv").write_text("")
    (hospitals / ".#north.csv").symlink_to("user@host")
    assert read(hospitals).agents == 3


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_other_delimiters_and_a_byte_order_mark(tmp_path: Path, delimiter: str) -> None:
    """Semicolons, tabs and a byte order mark give the same federation as commas."""
    plain = read(write(tmp_path / "a", n=patients(1), s=patients(2)))
    text = {name: "\ufeff" + patients(seed).replace(",", delimiter) for name, seed in (("n", 1), ("s", 2))}
    assert read(write(tmp_path / "b", **text)).digest() == plain.digest()


def test_the_split_ignores_the_order_of_rows_and_columns(tmp_path: Path) -> None:
    """Shuffling rows and columns does not change which rows are held out."""
    header, *rows = patients(1).splitlines()
    forth = read(write(tmp_path / "a", n=patients(1), s=patients(2)))
    back = read(write(tmp_path / "b", n="\n".join([header, *rows[::-1]]), s=patients(2)))
    assert {tuple(x) for x in forth.x[forth.test[0]].tolist()} == {tuple(x) for x in back.x[back.test[0]].tolist()}


def test_another_split_seed_holds_out_other_rows(hospitals: Path) -> None:
    """split_seed alone determines which rows are held out."""
    assert read(hospitals).digest() == read(hospitals).digest()
    assert read(hospitals).digest() != read(hospitals, split_seed=1).digest()


def test_validation_comes_out_of_training(hospitals: Path) -> None:
    """Validation rows are taken from the training rows, and the test rows stay the same."""
    plain, held = read(hospitals), read(hospitals, validation=0.3)
    assert len(held.validation[0]) == 5
    assert len(held.train[0]) == 13
    assert torch.equal(plain.test[0], held.test[0])


def test_numbers_are_standardised_by_training_rows_alone(tmp_path: Path) -> None:
    """Federated statistics are those of all training rows together; local ones are those of each agent."""
    folder = write(tmp_path / "d", n=patients(1, 40), s=patients(2, 12).replace(",no", ",no"))
    together, apart = read(folder), read(folder, preprocessing="local")
    pooled = torch.cat([together.x[rows][:, 0] for rows in together.train]).double()
    assert pooled.mean().abs() < 1e-6
    assert pooled.std(correction=0).item() == pytest.approx(1, abs=1e-6)
    for rows in apart.train:
        own = apart.x[rows][:, 0].double()
        assert own.mean().abs() < 1e-6
        assert own.std(correction=0).item() == pytest.approx(1, abs=1e-6)
    assert together.x[together.train[1]][:, 0].mean().abs() > 1e-3
    first, second = apart.preparations
    assert first.columns[0].mean != second.columns[0].mean
    assert first.columns[1:] == second.columns[1:]


def test_missing_values_have_an_indicator(tmp_path: Path) -> None:
    """A missing number becomes 0 and a missing category all zeros, each with an indicator column."""
    text = "a,b,y\n1,u,0\n3,v,1\n,u,0\n5,?,1\nNA,v,0\n2,u,1\n4,v,0\n6,u,1\n"
    found = read(write(tmp_path / "d", n=text), target="y", test_share=0.2)
    assert found.preprocessing is not None
    assert found.preprocessing.features == ("a", "a missing", "b=u", "b=v", "b missing")
    rows = {tuple(row) for row in found.x.tolist()}
    assert (0.0, 1.0, 1.0, 0.0, 0.0) in rows
    assert (0.0, 1.0, 0.0, 1.0, 0.0) in rows
    assert any(row[2:] == (0.0, 0.0, 1.0) and row[1] == 0.0 for row in rows)


@pytest.mark.parametrize("scope", ["federated", "local"])
def test_a_column_may_be_missing_entirely_at_one_agent(tmp_path: Path, scope: str) -> None:
    """An agent without any value in a column takes part, and so does a constant column."""
    south = "a,b,c,y\n" + "".join(f"{i},,7,{i % 2}\n" for i in range(9))
    north = "a,b,c,y\n" + "".join(f"{i},{i * i},7,{i % 2}\n" for i in range(10, 30))
    found = read(write(tmp_path / "d", north=north, south=south), target="y", preprocessing=scope)
    assert found.x.isfinite().all()
    assert found.preprocessing is not None
    assert found.preprocessing.features == ("a", "b", "b missing", "c")
    south_rows = found.x[torch.cat([found.train[1], found.test[1]])]
    assert (south_rows[:, 1] == 0).all()
    assert (south_rows[:, 2] == 1).all()
    assert (found.x[:, 3] == 0).all()


def test_numbers_name_categories_on_request(tmp_path: Path) -> None:
    """A column listed in `categorical` is one-hot over the values of all agents, and 1.0 equals 1."""
    north = "a,code,y\n" + "".join(f"{i},{i % 3}.0,{i % 2}\n" for i in range(20))
    south = "a,code,y\n" + "".join(f"{i},{i % 3 + 1},{i % 2}\n" for i in range(30, 60))
    found = read(write(tmp_path / "d", n=north, s=south), target="y", categorical=("code",))
    assert found.preprocessing is not None
    assert found.preprocessing.columns[1].categories == ("0", "1", "2", "3")


def test_a_category_absent_from_training_is_noted(tmp_path: Path) -> None:
    """A category of held-out rows only is encoded as unknown and noted; prediction refuses it."""
    folder = tmp_path / "d"
    for name in ("n", "s"):
        (folder / name).mkdir(parents=True)
        for part, ward in (("train", "a"), ("test", "z")):
            rows = "".join(f"{first_digit(name, part)}{i},{ward if i else 'a'},{i % 2}\n" for i in range(6))
            (folder / name / f"{part}.csv").write_text("age,ward,ill\n" + rows)
    found = read(folder)
    assert found.names == ("n", "s")
    assert "10 held-out rows" in found.notes[0]
    assert found.preprocessing is not None
    text = refusal(found.preprocessing.transform_table, folder / "n" / "test.csv")
    assert "'ward' has 'z' in line 3" in text


def first_digit(name: str, part: str) -> int:
    """A leading digit per agent and part, so that no two rows are equal."""
    return {"ntrain": 1, "ntest": 2, "strain": 3, "stest": 4}[name + part]


def test_preprocessing_survives_json(hospitals: Path, tmp_path: Path) -> None:
    """Preprocessing read from JSON transforms a file as the run did, with targets if the file has them."""
    found = read(hospitals, alice="north").preprocessing
    assert found is not None
    again = Preprocessing.from_json(json.loads(json.dumps(found.to_json())))
    assert again == found
    x, y = again.transform_table(hospitals / "south.csv")
    assert x.dtype == np.float32
    assert y is not None
    assert y.tolist() == [i % 2 for i in range(9)]
    no_target = "\n".join(line.rsplit(",", 1)[0] for line in patients(2, 9).splitlines())
    bare, nothing = again.transform_table(write(tmp_path / "p", new=no_target) / "new.csv")
    assert nothing is None
    assert np.array_equal(bare, x)
    assert "as saved in a run folder" in refusal(Preprocessing.from_json, {"columns": []})


@settings(max_examples=50)
@given(st.lists(st.lists(st.floats(-1e6, 1e6), max_size=8), min_size=1, max_size=5))
def test_joined_moments_are_those_of_the_pooled_values(parts: list[list[float]]) -> None:
    """Joined summaries give the mean and deviation of the pooled values, up to rounding."""
    joined = Moments()
    for part in parts:
        joined = joined.joined(moments(np.array(part)))
    pooled = np.array([value for part in parts for value in part])
    assert joined.n == len(pooled)
    if len(pooled):
        assert joined.mean == pytest.approx(pooled.mean(), rel=1e-9, abs=1e-6)
        assert (joined.squares / joined.n) ** 0.5 == pytest.approx(pooled.std(), rel=1e-6, abs=1e-5)


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.binary(max_size=2), st.integers(0, 3)), max_size=40),
    st.floats(0.01, 0.99),
    st.integers(0, 5),
)
def test_hold_out_is_a_partition(rows: list[tuple[bytes, int]], share: float, seed: int) -> None:
    """Rows are held out or kept, equal rows together; every class keeps a row; the seed determines the split."""
    keys = [key + bytes([label]) for key, label in rows]
    classes = np.array([label for _, label in rows], np.int64)
    held, kept = hold_out(keys, classes, share, seed, "test")
    assert sorted([*held.tolist(), *kept.tolist()]) == list(range(len(rows)))
    assert not {keys[i] for i in held} & {keys[i] for i in kept}
    assert set(classes[kept].tolist()) == set(classes.tolist())
    again = hold_out(keys, classes, share, seed, "test")
    assert np.array_equal(held, again[0])
    if len(set(keys)) == len(keys):
        assert len(held) <= max(1, round(share * len(keys))) + 3


# ------------------------------------------------------------------------------------------------------------ errors

WRONG_TABLES = {
    "a missing column": ({"s": "age,sex,ill\n1,f,no\n"}, "s.csv lacks 'ward'"),
    "a column more": ({"s": "age,sex,ward,x,ill\n1,f,a,2,no\n"}, "s.csv adds 'x'"),
    "text in a numeric column": ({"s": f"{HEADER}\n50,f,a,no\nold,m,b,yes\n"}, "holds numbers, but line 3 has 'old'"),
    "infinity": ({"s": f"{HEADER}\n50,f,a,no\ninf,m,b,yes\n"}, "line 3 has 'inf'"),
    "an empty file": ({"s": ""}, "s.csv is empty"),
    "a header alone": ({"s": HEADER + "\n"}, "no rows"),
    "a short line": ({"s": f"{HEADER}\n50,f,a,no\n50,f\n"}, "line 3: expected 4 cells as in the header, got 2"),
    "two columns of one name": ({"s": "age,age,ward,ill\n1,2,3,no\n"}, "two columns are called 'age'"),
    "a column without a name": ({"s": "age,,ward,ill\n1,2,3,no\n"}, "a column has no name"),
    "a missing target": ({"s": f"{HEADER}\n50,f,a,no\n51,f,a,\n"}, "target 'ill' is missing in line 3"),
    "the same data twice": ({"s": patients(1)}, "s and n hold the same training data"),
    "one class": ({"n": f"{HEADER}\n1,f,a,no\n2,f,b,no\n"}, "at least two classes among all agents, got only 'no'"),
    "a number beyond 32 bits": ({"s": f"{HEADER}\n50,f,a,no\n1e39,m,b,yes\n"}, "'1e39' in line 3, too large"),
    "a square beyond 64 bits": ({"s": f"{HEADER}\n50,f,a,no\n1e200,m,b,yes\n"}, "'1e200' in line 3, too large"),
    "a comma among numbers": ({"s": f'{HEADER}\n50,f,a,no\n"1,5",m,b,yes\n'}, "'age' has '1,5' in line 3: set --dec"),
    "nothing but the target": ({"n": "ill\nno\nyes\nno\n"}, "expected columns besides the target"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG_TABLES)
def test_wrong_tables_are_refused(tmp_path: Path, what: str) -> None:
    """Each mistake in a table is refused in one line with the file and the position."""
    agents, expected = WRONG_TABLES[what]
    assert expected in refusal(
        read, write(tmp_path / "d", **{**({} if "n" in agents else {"n": patients(1)}), **agents})
    )


@pytest.mark.parametrize(("step", "huge"), [(1.0, "1e39"), (1e-9, "3e38")])
def test_a_test_row_that_would_become_infinite_is_refused(tmp_path: Path, step: float, huge: str) -> None:
    """A number too large for float32, before or after standardisation, is refused with file, column and line."""
    (tmp_path / "n").mkdir()
    for part, start, last in (("train", 0, "0"), ("test", 10, huge)):
        rows = "".join(f"{step * (start + i)},{i % 2}\n" for i in range(8))
        (tmp_path / "n" / f"{part}.csv").write_text(f"a,y\n{rows}{last},1\n")
    text = refusal(read, tmp_path, target="y")
    assert f"test.csv: column 'a' has '{huge}' in line 10, too large for float32" in text


@pytest.mark.parametrize("task", ["auto", "classification", "regression"])
def test_decimal_commas_are_refused(tmp_path: Path, task: str) -> None:
    """A column of texts such as 1,5 is refused with the line, as a feature and as the target."""
    rows = [f"{i},{i % 10};{i % 2}\n" for i in range(30)]
    for header, target, column in (("a;y", "y", "a"), ("y;a", "y", "y")):
        text = refusal(read, write(tmp_path / column, n=header + "\n" + "".join(rows)), target=target, task=task)
        assert f"column {column!r} has '" in text
        assert text.endswith("write numbers with a decimal point and without thousands separators, as 1234.5")
    names = "a,b,y\n" + "".join(f'"{"ward 1,5" if i % 3 else "1,5"}",{i},{i % 2}\n' for i in range(24))
    found = read(write(tmp_path / "names", n=names), target="y").preprocessing
    assert found is not None
    assert found.features == ("a=1,5", "a=ward 1,5", "b")


@pytest.mark.parametrize("value", [0.5, 1, 30])
def test_a_text_in_a_numeric_target_is_refused(tmp_path: Path, value: float) -> None:
    """A target of mostly numbers is numeric; its texts are classes only with task = "classification"."""
    cells = [str(value * (i % 4)) for i in range(40)]
    cells[7:9] = "n.a.", "none"
    folder = write(tmp_path / "d", n="a,y\n" + "".join(f"{i},{cell}\n" for i, cell in enumerate(cells)))
    assert "'y' holds numbers, but line 9 has 'n.a.'" in refusal(read, folder, target="y")
    assert refusal(read, folder, target="y").endswith("drop the row, or set task to classification")
    assert {"n.a.", "none"} < set(read(folder, target="y", task="classification").class_names)


def test_suffixes_in_capitals(tmp_path: Path) -> None:
    """Suffixes in capitals are accepted: CSV, TSV and NPZ."""
    folder = write(tmp_path / "d", north=patients(1), south=patients(2))
    (folder / "WEST.CSV").write_text(patients(3))
    (folder / "east.TSV").write_text(patients(4).replace(",", "\t"))
    assert read(folder).names == ("WEST", "east", "north", "south")
    (tmp_path / "e").mkdir()
    for name, seed in (("A.NPZ", 1), ("b.npz", 2)):
        with (tmp_path / "e" / name).open("wb") as stream:
            np.savez(stream, **dict(zip("xy", arrays(seed), strict=True)))
    assert Federation.from_folder(tmp_path / "e").names == ("A", "b")


def test_only_tabs_separate_a_tsv(tmp_path: Path) -> None:
    """Commas in the header of a .tsv file do not separate columns."""
    (tmp_path / "n.tsv").write_text("weight, net, kg\ty\n" + "".join(f"{i}\t{i % 2}\n" for i in range(9)))
    found = read(tmp_path, target="y").preprocessing
    assert found is not None
    assert found.features == ("weight, net, kg",)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(-9, 9), min_size=4, max_size=30), st.integers(0, 9))
def test_equal_numbers_in_other_notation_are_the_same_row(tmp_path_factory: Any, values: list[int], seed: int) -> None:
    """1, 1.0 and 1e0 are the same row, so no test row is also a training row."""
    folder = tmp_path_factory.mktemp("d")
    forms = ("{}", "{}.0", "{}e0", "0{}" if min(values) >= 0 else "{}.00")
    rows = [f"{form.format(v)},x,{v % 2}" for v in {*values, 10, 11, 12, 13} for form in forms]
    with patch.object(preprocessing, "CLIP", None):  # clipped numbers may be equal
        found = read(write(folder, n="a,b,y\n" + "\n".join(rows)), target="y", split_seed=seed, validation=0.2)
    parts = [{tuple(row) for row in found.x[part[0]].tolist()} for part in (found.train, found.validation, found.test)]
    assert not parts[0] & parts[2]
    assert not parts[0] & parts[1]
    assert not parts[1] & parts[2]


def test_the_split_is_stable_across_versions(tmp_path: Path) -> None:
    """The held-out rows are those of earlier versions, so old records stay valid."""
    found = read(write(tmp_path / "d", n=patients(1)))
    assert found.test[0].tolist() == [2, 3, 6, 9, 19, 20]


def test_a_test_row_in_other_notation_is_refused(tmp_path: Path) -> None:
    """D11: a test row that equals a training row in other notation is refused."""
    (tmp_path / "n").mkdir()
    (tmp_path / "n" / "train.csv").write_text("a,y\n" + "".join(f"{i},{i % 2}\n" for i in range(8)))
    (tmp_path / "n" / "test.csv").write_text("y,a\n1.0,7.00\n0,8\n")
    assert "n: 1 test sample is also training data of n, the first at index 0" in refusal(read, tmp_path, target="y")


def test_a_target_that_does_not_exist(hospitals: Path) -> None:
    """An unknown target is refused with the nearest column; without a target the columns are listed."""
    assert refusal(read, hospitals, target="il").endswith("has no column 'il', did you mean ill?")
    assert "one of age, sex, ward, ill" in refusal(Federation.from_folder, hospitals)
    assert "did you mean ward?" in refusal(read, hospitals, categorical=("wards",))


def test_unreadable_files(tmp_path: Path) -> None:
    """Binary content, a missing folder, an empty folder and mixed layouts are refused in one line each."""
    folder = write(tmp_path / "d", n=patients(1))
    (folder / "s.csv").write_bytes(b"\xff\xfe\x00\x01")
    assert "as a table of UTF-8 text" in refusal(read, folder)
    assert "there is no folder" in refusal(read, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "holds no agent's data" in refusal(read, tmp_path / "empty")
    (folder / "s.csv").unlink()
    np.savez(folder / "s.npz", x=np.ones((4, 2)), y=np.arange(4) % 2)
    assert "mixes arrays and tables" in refusal(read, folder)
    assert "both called 'n'" in refusal(read, write_duplicate_agent(tmp_path / "twins"))


def write_duplicate_agent(folder: Path) -> Path:
    write(folder, n=patients(1))
    (folder / "n.tsv").write_text(patients(2))
    return folder


def test_an_identifier_column_is_refused(tmp_path: Path) -> None:
    """A text column with too many distinct values is refused as a category."""
    text = "name,y\n" + "".join(f"patient {i}x,{i % 2}\n" for i in range(300))
    assert "different texts, at most 100" in refusal(read, write(tmp_path / "d", n=text), target="y")


def test_options_are_checked(hospitals: Path) -> None:
    """Shares outside 0 to 1 and unknown option values are refused."""
    assert "test_share" in refusal(read, hospitals, test_share=1.0)
    assert "'federated' or 'local'" in refusal(read, hospitals, preprocessing="global")
    assert "there is no agent 'ann'; the agents are north, south, tiny" in refusal(read, hospitals, alice="ann")


def test_test_rows_that_are_training_rows_are_refused(tmp_path: Path) -> None:
    """D11: a test table that holds training rows of any agent is refused."""
    folder = tmp_path / "d"
    for name, seed in (("n", 1), ("s", 2)):
        (folder / name).mkdir(parents=True)
        (folder / name / "train.csv").write_text(patients(seed))
        (folder / name / "test.csv").write_text(patients(seed + 5, 6))
    assert [len(rows) for rows in read(folder).test] == [6, 6]
    (folder / "s" / "test.csv").write_text(patients(1, 6))
    assert "s: 6 test samples are also training data of n" in refusal(read, folder)
    (folder / "s" / "test.csv").unlink()
    assert "no test table" in refusal(read, folder)


# -------------------------------------------------------------------------------------------------------- regression


def prices(seed: int, rows: int) -> str:
    rng = np.random.default_rng(seed)
    area = rng.uniform(30, 200, rows)
    return "area,price\n" + "".join(f"{a:.2f},{2000 * a + rng.normal(0, 3000):.1f}\n" for a in area)


def test_regression_error_is_in_the_unit_of_the_target(tmp_path: Path) -> None:
    """A numeric target is standardised for training; the error is in the unit of the target."""
    found = read(write(tmp_path / "d", n=prices(1, 80), s=prices(2, 30)), target="price", alice="n")
    assert (found.task, found.class_names, found.outputs) == ("regression", (), 1)
    assert found.label_counts().shape == (2, 0)
    model = FlatModel(builder("auto", "d", found.shape, found.outputs), loss=squared_error)
    *_, (last,) = simulate([RunSpec(WafflePaper(sgd=SGD(0.05)), found, 1)], model, rounds=60, batch_size=8)
    assert last.measured["rmse"] == pytest.approx(found.unit * last.measured["loss"] ** 0.5)
    assert last.measured["rmse"] < 6000 < found.unit
    assert "accuracy" not in last.measured


def test_few_integers_are_classes(tmp_path: Path) -> None:
    """Up to twenty integers are classes in numeric order; the task can be set explicitly."""
    text = "a,y\n" + "".join(f"{i},{(i % 12)}\n" for i in range(48))
    folder = write(tmp_path / "d", n=text)
    assert read(folder, target="y").class_names == tuple(map(str, range(12)))
    assert read(folder, target="y", task="regression").task == "regression"


# ------------------------------------------------------------------------------------------- arrays, datasets, images


def arrays(seed: int, rows: int = 20, shape: tuple[int, ...] = (3,)) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, *shape)).astype(np.float32), np.arange(rows) % 2


def test_a_folder_of_npz_is_a_federation(tmp_path: Path) -> None:
    """The division into x_train, y_train, x_test, y_test is used as given; x, y are split."""
    x, y = arrays(1)
    np.savez(tmp_path / "given.npz", x_train=x[:15], y_train=y[:15], x_test=x[15:], y_test=y[15:])
    x, y = arrays(2, 12)
    np.savez(tmp_path / "split.npz", x=x, y=y)
    found = Federation.from_folder(tmp_path, alice="split")
    assert found.samples.tolist() == [15, 9]
    assert [len(rows) for rows in found.test] == [5, 3]
    assert found.preprocessing is None


def test_wrong_npz_is_refused(tmp_path: Path) -> None:
    """NaN, other array names, damaged files, a single class and flat samples are refused in one line each."""
    path, (x, y) = tmp_path / "a.npz", arrays(1)
    bad = x.copy()
    bad[3, 1] = np.nan
    for content, expected in (
        ({"x": bad, "y": y}, "a: 1 given sample holds NaN or infinity, the first at index 3"),
        ({"features": x, "y": y}, "expected the arrays x_train y_train x_test y_test, or x y; got features, y"),
        ({"x": x, "y": np.zeros(20, int)}, "got only '0'"),
        ({"x": x[:, 0], "y": y}, "two or more axes"),
        ({"x": x, "y": y[:7]}, "20 given samples but 7 labels"),
        ({"x": np.array([{}], object), "y": y}, "as a .npz of plain arrays"),
    ):
        np.savez(path, **content)
        assert expected in refusal(Federation.from_folder, tmp_path)
    with zipfile.ZipFile(path, "w") as archive:
        for name in "xy":
            archive.writestr(f"{name}.npy", b"no array")
    assert "two or more axes" in refusal(Federation.from_folder, tmp_path)
    path.write_bytes(path.read_bytes()[:50])
    assert "as a .npz of plain arrays" in refusal(Federation.from_folder, tmp_path)
    np.savez(path, x=x, y=y)
    assert "are for tables" in refusal(Federation.from_folder, tmp_path, target="y")


def test_float_targets_of_arrays_mean_regression(tmp_path: Path) -> None:
    """Float targets mean regression; integers mean classes."""
    x, y = arrays(1)
    np.savez(tmp_path / "a.npz", x=x, y=y / 7)
    found = Federation.from_folder(tmp_path)
    assert (found.task, found.unit) == ("regression", pytest.approx((y[found.train[0]] / 7).std()))
    assert found.y.is_floating_point()
    assert Federation.from_folder(tmp_path, preprocessing="none").unit == 1.0


def test_labels_of_arrays_follow_one_rule(tmp_path: Path) -> None:
    """Few integral floats are classes, as in tables; a label of 100 or more is refused in one line."""
    x, y = arrays(1)
    for content, classes in ((y.astype(np.float64), 2), (y * 19.0, 20), (y + 98, 100), (y.astype(">f4"), 2)):
        np.savez(tmp_path / "a.npz", x=x.astype(">f8"), y=content)
        found = Federation.from_folder(tmp_path)
        assert (found.task, len(found.class_names)) == ("classification", classes)
        assert found.y.tolist() == content.tolist()
    for content in (y + 300_000, y * 10**12, (y * 1e12), np.full(20, 2**63, np.uint64)):
        np.savez(tmp_path / "a.npz", x=x, y=content)
        assert "a: expected labels below 100, got " in refusal(Federation.from_folder, tmp_path)
        assert "labels" in refusal(Federation.from_folder, tmp_path, task="classification")
        if content.max() < 2**63:
            assert Federation.from_folder(tmp_path, task="regression").task == "regression"
    np.savez(tmp_path / "a.npz", x=x, y=y + 150)
    assert len(Federation.from_folder(tmp_path, task="classification").class_names) == 152
    np.savez(tmp_path / "a.npz", x=x, y=np.where(y, np.inf, 0.0))
    assert "hold NaN or infinity" in refusal(Federation.from_folder, tmp_path)
    np.savez(tmp_path / "a.npz", x=x.astype("m8[s]"), y=y)
    assert "expected numeric features" in refusal(Federation.from_folder, tmp_path)


def test_torch_datasets_are_accepted() -> None:
    """A Dataset per agent is split, a pair is training and test data; it must have a length and yield pairs."""
    x, y = (torch.from_numpy(a) for a in arrays(1))
    other = TensorDataset(*(torch.from_numpy(a) for a in arrays(2, 6)))
    found = Federation.from_datasets({"ann": TensorDataset(x, y), "bob": (TensorDataset(-x, y), other)}, alice="ann")
    assert found.samples.tolist() == [15, 20]
    assert [len(rows) for rows in found.test] == [5, 6]
    numbers = Federation.from_datasets({"ann": TensorDataset(x, x[:, 0])})
    assert numbers.task == "regression"

    class Stream(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter([(x[0], y[0])])

    assert "ann: expected a Dataset with a length" in refusal(Federation.from_datasets, {"ann": Stream()})
    assert "ann: expected a Dataset" in refusal(Federation.from_datasets, {"ann": TensorDataset(x)})


@pytest.mark.parametrize(("shape", "kind"), [((5,), "Linear"), ((3, 16), "Conv1d"), ((1, 9, 11), "Conv2d")])
def test_the_shape_selects_the_model(shape: tuple[int, ...], kind: str) -> None:
    """Tables get an MLP, signals a 1-D CNN and images a 2-D CNN, of any size."""
    agents = {"a": arrays(1, 12, shape), "b": arrays(2, 9, shape)}
    found = Federation.from_arrays(agents)
    model = FlatModel(builder("auto", "folder", found.shape, found.outputs))
    assert kind in {type(m).__name__ for m in model.module().modules()}
    *_, (last,) = simulate([RunSpec(WafflePaper(), found, 1)], model, rounds=2, batch_size=4)
    assert last.measured["loss"] > 0


def test_images_in_folders_by_class(tmp_path: Path) -> None:
    """agent/class/*.png is a federation; sizes and channels must agree, and a damaged file is named."""
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    rng = np.random.default_rng(0)
    for agent in ("ann", "bob"):
        for name in ("cat", "dog"):
            (tmp_path / agent / name).mkdir(parents=True)
            for i in range(4):
                pixels = rng.integers(0, 256, (6, 8, 3), np.uint8)
                image.fromarray(pixels).save(tmp_path / agent / name / f"{i}.png")
    found = Federation.from_folder(tmp_path, alice="bob")
    assert (found.class_names, found.shape) == (("cat", "dog"), (3, 6, 8))
    assert found.samples.tolist() == [6, 6]
    as_given = Federation.from_folder(tmp_path, preprocessing="none")
    assert as_given.x.min() >= -1
    assert as_given.x.max() <= 1
    assert found.x[torch.cat(found.train)].mean(dim=(0, 2, 3)).abs().max() < 1e-6
    odd = tmp_path / "bob" / "dog" / "9.png"
    image.fromarray(np.zeros((6, 8), np.uint8)).save(odd)
    assert "the same size and channels" in refusal(Federation.from_folder, tmp_path)
    odd.write_bytes(b"no image")
    assert f"cannot read the image {odd}" in refusal(Federation.from_folder, tmp_path)


def test_parquet_is_a_table(tmp_path: Path) -> None:
    """A Parquet file gives the same federation as CSV."""
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    for name, seed in (("n", 1), ("s", 2)):
        table = read_table(write(tmp_path / "csv", **{name: patients(seed)}) / f"{name}.csv")
        columns = {k: v.tolist() for k, v in table.columns.items()}
        columns["age"] = [float(v) for v in columns["age"]]
        (tmp_path / "parquet").mkdir(exist_ok=True)
        parquet.write_table(arrow.table(columns), tmp_path / "parquet" / f"{name}.parquet")
    found = read(tmp_path / "parquet")
    assert found.names == ("n", "s")
    assert found.shape == read(tmp_path / "csv").shape
    (tmp_path / "parquet" / "n.parquet").write_bytes(b"PAR1")
    assert "as Parquet" in refusal(read, tmp_path / "parquet")


def test_columns_of_parquet_files(tmp_path: Path) -> None:
    """Duplicate columns and times finer than Python's are refused; the pandas index is ignored."""
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    a, y, path = arrow.array(range(12)), arrow.array([i % 2 for i in range(12)]), tmp_path / "n.parquet"
    parquet.write_table(arrow.Table.from_arrays([a, a, y], names=["a", "a", "y"]), path)
    assert "two columns are called 'a'" in refusal(read, tmp_path, target="y")
    framed = arrow.table({"a": a, "y": y, "__index_level_0__": a})
    told = json.dumps({"index_columns": ["__index_level_0__"], "columns": []})
    parquet.write_table(framed.replace_schema_metadata({"pandas": told}), path)
    found = read(tmp_path, target="y").preprocessing
    assert found is not None
    assert found.features == ("a",)
    parquet.write_table(arrow.table({"a": arrow.array(range(1, 13), arrow.timestamp("ns")), "y": y}), path)
    assert "as Parquet: " in refusal(read, tmp_path, target="y")


@pytest.mark.parametrize(("name", "word"), [("n.parquet", "pyarrow"), ("c/x.png", "Pillow")])
def test_absent_readers_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, word: str) -> None:
    """Without pyarrow or Pillow one line names the package to install."""
    for module in ("pyarrow", "pyarrow.parquet", "PIL", "PIL.Image"):
        monkeypatch.setitem(sys.modules, module, None)
    for agent in ("ann", "bob"):
        for c in "cd":
            path = tmp_path / agent / name.replace("c/", f"{c}/") if "/" in name else tmp_path / f"{agent}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
    target = {"target": "y"} if "parquet" in name else {}
    assert word in refusal(Federation.from_folder, tmp_path, **target)


# --------------------------------------------------------------------------------------------------- UCI Heart Disease


@pytest.mark.data
def test_heart_disease_is_recognised(published: Path) -> None:
    """The official folder has four hospitals with 303, 294, 123 and 200 patients and two classes."""
    folder = published / "heart-disease"
    if not folder.is_dir():
        pytest.skip("WAFFLE_DATA has no heart-disease")
    found = Federation.from_folder(folder, alice="va")
    assert found.names == ("cleveland", "hungarian", "switzerland", "va")
    held = [len(rows) for rows in found.test]
    assert [n + m for n, m in zip(found.samples.tolist(), held, strict=True)] == [303, 294, 123, 200]
    assert found.class_names == ("no", "yes")
    assert found.preprocessing is not None
    assert {"thal=3", "thal=6", "thal=7", "ca missing", "age"} <= set(found.preprocessing.features)
    x, y = found.preprocessing.transform_table(folder / "processed.va.data")
    assert x.shape == (200, len(found.preprocessing.features))
    assert y is not None
    assert y.sum() == 149
    record = (Path(__file__).parent.parent / "results" / "heart-disease.jsonl").read_text().splitlines()[0]
    assert json.loads(record)["tables"]["provenance"]["binding"]["data"] == found.digest()


def test_heart_disease_layout(tmp_path: Path) -> None:
    """Files named processed.NAME.data have no header: thirteen columns and a grade, where 0 means no disease."""
    for name, seed in (("here", 1), ("there", 2)):
        rng = np.random.default_rng(seed)
        ages = rng.integers(30, 70, 20)
        rows = [
            f"{a},1,{i % 4 + 1}.0,140,?,0,{i % 3},150,0,2.3,3,?,{3 + i % 2 * 4},{i % 5}" for i, a in enumerate(ages)
        ]
        (tmp_path / f"processed.{name}.data").write_text("\n".join(rows) + "\n")
    found = Federation.from_folder(tmp_path)
    assert found.names == ("here", "there")
    assert found.label_counts().sum(dim=0).tolist() == [6, 24]
    (tmp_path / "processed.here.data").write_text("1,2,3\n")
    assert "expected 14 cells" in refusal(Federation.from_folder, tmp_path)


def test_fit_uses_training_rows_only(hospitals: Path) -> None:
    """The statistics of `fit` are those of the training rows given."""
    tables = {name: read_table(hospitals / f"{name}.csv") for name in ("north", "south")}
    aim = aim_of("ill", list(tables.values()), "auto")
    some = {name: table.select(np.arange(5)) for name, table in tables.items()}
    fitted = fit(aim, some)["north"]
    ages = np.concatenate([numbers(table.columns["age"])[:5] for table in tables.values()])
    assert fitted.columns[0].mean == pytest.approx(ages.mean())
    assert fitted.columns[0].deviation == pytest.approx(ages.std())
