"""Messy tables: each ambiguity is an error that names the setting which settles it, each oddity a note."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli_support import strict, waffle
from conftest import refusal
from waffle_fl import Federation
from waffle_fl.config import RunConfig, Settings, check_run, load_experiment
from waffle_fl.experiment import federation_of
from waffle_fl.user_data.preprocessing import Preprocessing
from waffle_fl.user_data.tables import read_table

ROWS = 24


def column(values: list[str], rows: int = ROWS) -> list[str]:
    """The values, repeated to the number of rows."""
    return [values[i % len(values)] for i in range(rows)]


def table(seed: int, rows: int = ROWS, **columns: list[str]) -> str:
    """A table of an age that differs by row, the given columns, and a target y unless it is given."""
    rng = np.random.default_rng(seed)
    found = {"age": [str(age) for age in rng.permutation(1_000)[:rows]], **columns}
    found.setdefault("y", column(["no", "yes"], rows))
    lines = [",".join(found), *(",".join(f'"{cell}"' for cell in row) for row in zip(*found.values(), strict=True))]
    return "\n".join(lines) + "\n"


def write(folder: Path, **agents: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in agents.items():
        (folder / f"{name}.csv").write_text(text)
    return folder


def read(folder: Path, **options: Any) -> Federation:
    return Federation.from_folder(folder, target="y", **options)


def features(found: Federation) -> tuple[str, ...]:
    assert found.preprocessing is not None
    return found.preprocessing.features


DATES = [f"2021-0{i % 9 + 1}-1{i % 7}" for i in range(ROWS)]
LAB = [f"{0.2 + i % 11:.1f}" for i in range(ROWS)]

# name: (columns of north, columns of south, pieces of the message, settings that settle it, features or classes then)
AMBIGUOUS: dict[str, tuple[dict[str, list[str]], dict[str, list[str]], tuple[str, ...], dict[str, Any], Any]] = {
    "Yes/No beside yes/no": (
        {"y": column(["No", "Yes"])}, {},
        ("the target 'y' has 'No' and 'no', 'Yes' and 'yes', which differ only in case", "set --fold-case"),
        {"fold_case": True}, ("no", "yes"),
    ),
    "M/F beside m/f": (
        {"sex": column(["M", "F", "F"])}, {"sex": column(["m", "f", "f"])},
        ("column 'sex' has 'F' and 'f', 'M' and 'm', which differ only in case", "--categorical sex to keep"),
        {"fold_case": True}, ("age", "sex=f", "sex=m"),
    ),
    "M/F beside m/f kept apart": (
        {"sex": column(["M", "F", "F"])}, {"sex": column(["m", "f", "f"])}, ("set --fold-case",),
        {"categorical": ("sex",)}, ("age", "sex=F", "sex=M", "sex=f", "sex=m"),
    ),
    "0/1 beside yes/no": (
        {"y": column(["0", "1"])}, {},
        ("the target 'y' has 0/1 beside no/yes, expected one way to write no and yes", "use the same words"),
        {"categorical": ("y",), "task": "classification"}, ("0", "1", "no", "yes"),
    ),
    "true/false beside y/n in a feature": (
        {"smoker": column(["true", "false", "true"])}, {"smoker": column(["n", "y", "y"])},
        ("column 'smoker' has n/y beside false/true", "set --categorical smoker"),
        {"drop": ("smoker",)}, ("age",),
    ),
    "percent signs": (
        {"share": column(["12%", "7 %", "3.5%"])}, {"share": column(["1%", "2%", "3%"])},
        ("north.csv: column 'share' has '", "%' in line ", ": write numbers without percent signs", "set --drop share"),
        {"drop": ("share",)}, ("age",),
    ),
    "percent signs among numbers": (
        {"share": column(["12", "7", "3.5"])}, {"share": column(["1%", "2%", "3"], ROWS)},
        ("south.csv: column 'share' has '", "%' in line ", ": write numbers without percent signs"),
        {"drop": ("share",)}, ("age",),
    ),
    "decimal commas": (
        {"lab": [cell.replace(".", ",") for cell in LAB]}, {"lab": LAB},
        ("north.csv: column 'lab' has '", ",2' in line ", ": set --decimal , if this is a decimal comma"),
        {"decimal": ","}, ("age", "lab"),
    ),
    "a column that one site lacks": (
        {"lab": LAB}, {},
        ("south.csv lacks 'lab'", "set --drop lab", "set --fill-absent to read an absent column as missing"),
        {"fill_absent": True}, ("age", "lab", "lab missing"),
    ),
    "an identifier of texts": (
        {"name": [f"p{i}" for i in range(120)], "y": column(["no", "yes"], 120)},
        {"name": [f"q{i}" for i in range(ROWS)]},
        ("column 'name' has", "different texts, at most 100 are allowed: set --drop name"),
        {"drop": ("name",)}, ("age",),
    ),
}  # fmt: skip


def messy(folder: Path, north: dict[str, list[str]], south: dict[str, list[str]]) -> Path:
    rows = max(map(len, north.values()))
    return write(folder, north=table(1, rows, **north), south=table(2, **south))


@pytest.mark.parametrize("case", AMBIGUOUS)
def test_an_ambiguity_is_an_error_that_names_its_setting(tmp_path: Path, case: str) -> None:
    """The message says what came and which setting settles it, and with that setting the folder is read."""
    north, south, pieces, settings, expected = AMBIGUOUS[case]
    folder = messy(tmp_path / "d", north, south)
    text = refusal(read, folder)
    assert all(piece in text for piece in pieces), text
    found = read(folder, **settings)
    assert expected in (features(found), found.class_names)


ODD: dict[str, tuple[dict[str, list[str]], str]] = {
    "-9 as a number": (
        {"lab": [*LAB[:-2], "-9", "-9"]},
        "column 'lab' has -9 in 4 rows, and else 0.2 to 10.2: if it means missing, set --missing -9",
    ),
    "-999 beside other negative numbers": (
        {"lab": [*column(["-12.5", "3.5", "21"], ROWS - 1), "-999"]},
        "column 'lab' has -999 in 2 rows, and else -12.5 to 21: if it means missing, set --missing -999",
    ),
    "-9 beside values from -3 to 3": (
        {"lab": [*column(["-3", "0.5", "3"], ROWS - 2), "-9", "-9"]},
        "column 'lab' has -9 in 4 rows, and else -3 to 3: if it means missing, set --missing -9",
    ),
    "-9 often, beside values from -1 to 9": (
        {"lab": [*column(["-1", "0.5", "3.1", "4.7", "6", "9"], ROWS - 6), *["-9"] * 6]},
        "column 'lab' has -9 in 12 rows, and else -1 to 9: if it means missing, set --missing -9",
    ),
    "-9 and 999": ({"lab": [*LAB[:-2], "-9", "999"]}, "if they mean missing, set --missing -9 999"),
    "an identifier": (
        {"patient_id": [str(i * i) for i in range(ROWS)]},
        "column 'patient_id' has a different number in every row: if it is an identifier, set --drop patient_id",
    ),
    "row numbers": ({"n": [str(i) for i in range(ROWS)]}, "column 'n' has consecutive numbers"),
    "names": ({"who": [f"p{i}x" for i in range(ROWS)]}, "column 'who' has a different text in every row"),
    "dates": ({"day": DATES}, "column 'day' has dates such as '2021-01-10', and each is a category: set --drop day"),
    "numbers among texts": (
        {"ward": column(["a", "b", "3"])},
        "column 'ward' has numbers such as '3' in 16 rows among its texts, and each is a category",
    ),
}


@pytest.mark.parametrize("case", ODD)
def test_an_oddity_is_a_note(tmp_path: Path, case: str) -> None:
    """A column that may be misread is read, and a note says what it looks like and which setting changes it."""
    columns, expected = ODD[case]
    south = {k: [f"z{v}" if case == "names" else v for v in values] for k, values in columns.items()}
    found = read(write(tmp_path / "d", north=table(1, **columns), south=table(2, **south)))
    assert [note for note in found.notes if expected in note], found.notes


def test_usual_columns_have_no_note(tmp_path: Path) -> None:
    """Negative numbers, ages of 99, grades, years and wards are not suspicious."""
    columns = {
        "t": column(["-9", "-3", "2", "8"]), "old": column(["99", "97", "60", "71"]), "grade": column(["1", "2", "3"]),
        "year": column(["1999", "2001", "2001", "2003"]), "ward": column(["a", "b", "north 3"]),
    }  # fmt: skip
    assert read(write(tmp_path / "d", n=table(1, **columns), s=table(2, **columns))).notes == ()


def test_files_that_are_passed_over_are_noted(tmp_path: Path) -> None:
    """A file that may hold data is named in a note; a README and Excel's lock files are not."""
    folder = write(tmp_path / "d", n=table(1), s=table(2))
    for name in ("west.xls", "east.csv.gz", "README.md", "~$n.xlsx"):
        (folder / name).write_bytes(b"")
    (note,) = read(folder).notes
    assert note == "passed over east.csv.gz, west.xls: if they are an agent's data, save it as .csv"


# ------------------------------------------------------------------------------------------------ rules for cells


def cells(tmp_path: Path, texts: list[str], **rules: Any) -> list[str]:
    """A column of a table as the rules read it."""
    from waffle_fl.user_data.cleaning import CellRules

    path = tmp_path / "t.csv"
    path.write_text("a;b\n" + "".join(f"{text};x\n" for text in texts))
    return read_table(path, CellRules(**rules)).columns["a"].tolist()


@pytest.mark.parametrize(
    ("rules", "texts", "expected"),
    [
        ({"missing": ("-9",)}, ["-9", "-9.0", "-90", "NA", "9"], ["", "", "-90", "", "9"]),
        ({"missing": ("unknown",)}, ["unknown", "Unknown"], ["", "Unknown"]),
        ({"missing": ("unknown",), "fold_case": True}, ["unknown", "Unknown", "A"], ["", "", "a"]),
        ({"missing": ("a=-9", "b=1")}, ["-9", "1"], ["", "1"]),
        ({"missing": ("-9,0",), "decimal": ","}, ["-9", "-9,0", "1,5"], ["", "", "1.5"]),
        (
            {"decimal": ","},
            ["1,5", "1.234,5", "-,5", "7", "1.234", "ward 1,5"],
            ["1.5", "1234.5", "-.5", "7", "1234", "ward 1,5"],
        ),
        ({"decimal": ","}, ["0.5", "1.234"], ["0.5", "1.234"]),
        ({"drop": ("b",)}, ["x"], ["x"]),
    ],
)
def test_rules_for_cells(tmp_path: Path, rules: dict[str, Any], texts: list[str], expected: list[str]) -> None:
    """Numbers that mean missing are compared by value; a decimal comma may come with points between thousands."""
    assert cells(tmp_path, texts, **rules) == expected


@pytest.mark.parametrize(
    ("texts", "why"), [(["1,5", "2.5"], "but '1,5' in line 2 of 'a'"), (["1.234"], "may be 1234 or")]
)
def test_a_point_of_unclear_meaning_is_refused(tmp_path: Path, texts: list[str], why: str) -> None:
    """With decimal commas, a point that may be either sign is an error with the line."""
    text = refusal(cells, tmp_path, texts, decimal=",")
    assert why in text
    assert "without thousands separators" in text


def test_a_given_decimal_sign_is_not_advised_again(tmp_path: Path) -> None:
    """`waffle data --decimal ,` on a column with both signs reports that column once."""
    folder = write(tmp_path / "d", n=table(1, lab=column(["1,5", "2.5"])), s=table(2))
    shown = waffle("data", folder, "--target", "y", "--decimal", ",")
    assert shown.out.count("has '2.5' in line") == 1
    assert "set --decimal ," not in shown.out


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"drop": ("agee",)}, "drop: no table has a column 'agee', did you mean age?"),
        ({"drop": ("y",)}, "drop: 'y' is the target"),
        ({"missing": ("agee=-9",)}, "missing: no table has a column 'agee' as in 'agee=-9', did you mean age?"),
        ({"decimal": ";"}, "decimal: expected '.' or ',', got ';'"),
        ({"duplicates": "ignore"}, "duplicates: expected 'error' or 'keep' or 'drop', got 'ignore'"),
    ],
)
def test_wrong_rules_are_refused(tmp_path: Path, options: dict[str, Any], expected: str) -> None:
    """A rule for a column that no table has, or an unknown value, is an error."""
    assert expected in refusal(read, write(tmp_path / "d", n=table(1), s=table(2)), **options)


def test_absent_columns_do_not_change_the_split(tmp_path: Path) -> None:
    """With fill_absent an agent that has all columns is split as before, and the target may not be absent."""
    folder = write(tmp_path / "d", north=table(1, lab=LAB), south=table(2))
    alone = read(write(tmp_path / "e", south=table(2)))
    found = read(folder, fill_absent=True)
    assert found.test[1].tolist() == (alone.test[0] + ROWS).tolist()
    south = found.x[found.train[1]]
    assert (south[:, 1] == 0).all()
    assert (south[:, 2] == 1).all()
    write(folder, west="age,lab\n1,2\n")
    assert "west.csv lacks the target 'y'" in refusal(read, folder, fill_absent=True)


def test_settings_of_tables_are_refused_for_arrays(tmp_path: Path) -> None:
    """A rule for cells of tables is an error for arrays."""
    np.savez(tmp_path / "a.npz", x=np.random.default_rng(0).normal(size=(9, 2)), y=np.arange(9) % 2)
    assert "fold_case is for tables" in refusal(Federation.from_folder, tmp_path, fold_case=True)


# ------------------------------------------------------------------------------------------------------ duplicates


def leaky(folder: Path) -> Path:
    """Two agents with given test data: two of north's test rows are south's training rows, and one row is repeated."""
    header, *north = table(1).splitlines()
    _, *south = table(2).splitlines()
    parts = {"north": (north[:16] + north[:1], north[16:] + south[:2]), "south": (south[:18], south[18:])}
    for name, (train, test) in parts.items():
        (folder / name).mkdir(parents=True)
        for part, lines in (("train", train), ("test", test)):
            (folder / name / f"{part}.csv").write_text("\n".join([header, *lines]) + "\n")
    return folder


def test_duplicates_are_refused_kept_or_dropped(tmp_path: Path) -> None:
    """Test rows that an agent trains on are an error, or kept or dropped with their number."""
    folder = leaky(tmp_path / "d")
    text = refusal(read, folder)
    assert "north: 2 test samples are also training data of south, the first at index 8" in text
    assert "set --duplicates drop (or keep, if they are natural)" in text
    kept = read(folder, duplicates="keep")
    assert [len(rows) for rows in kept.test] == [10, 6]
    assert kept.notes == (
        "2 test samples are also training data (north 2 of 10): kept, and the test score may be too good",
    )
    dropped = read(folder, duplicates="drop")
    assert [len(rows) for rows in dropped.test] == [8, 6]
    assert dropped.samples.tolist() == [16, 18]
    assert dropped.notes == (
        "1 repeated samples dropped (north 1)",
        "2 test samples are also training data (north 2 of 10): dropped",
    )


def test_a_folder_without_test_rows_cannot_be_used(tmp_path: Path) -> None:
    """If every test row is dropped as a duplicate, `waffle data` exits with 2 and says so, as a run does."""
    for name, y in (("north", ("no", "yes")), ("south", ("yes", "no"))):
        rows = "age,y\n" + "".join(f"{20 + i % 2},{y[i % 2]}\n" for i in range(8))
        (tmp_path / "d" / name).mkdir(parents=True)
        for part in ("train", "test"):
            (tmp_path / "d" / name / f"{part}.csv").write_text(rows)
    shown = waffle("data", tmp_path / "d", "--target", "y", "--duplicates", "drop")
    assert shown.code == 2
    assert "no agent has test samples left" in " ".join(shown.out.split())


def test_duplicates_of_arrays(tmp_path: Path) -> None:
    """Arrays follow the same setting: repeated samples and agents with the same training data."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 2)), np.arange(20) % 2
    twice = {"a": (np.concatenate([x, x[:4]]), np.concatenate([y, y[:4]])), "b": (x + 1, y)}
    assert Federation.from_arrays(twice).notes == ()
    found = Federation.from_arrays(twice, duplicates="drop")
    assert found.samples.tolist() == [15, 15]
    assert found.notes == ("4 repeated samples dropped (a 4)",)
    same = {"a": (x, y), "b": (x, y)}
    assert "b and a hold the same training data" in refusal(Federation.from_arrays, same)
    assert "hold the same training data" in refusal(Federation.from_arrays, same, duplicates="drop")
    assert "b and a hold the same training data" in Federation.from_arrays(same, duplicates="keep").notes


# ------------------------------------------------------------------------------------------------------ settings


def test_the_settings_have_one_name_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag, a key of an experiment file and a field of the record set the same; the model card repeats it."""
    monkeypatch.chdir(tmp_path)
    write(
        tmp_path / "d",
        north=table(1, lab=[*LAB[:-6], *["-9"] * 6], id=list(map(str, range(ROWS)))),
        south=table(2, lab=LAB),
    )
    flags = (
        "--drop",
        "id",
        "--missing",
        "-9",
        "--decimal",
        ".",
        "--fold-case",
        "--fill-absent",
        "--duplicates",
        "keep",
    )
    shown = waffle(
        *(
            "run",
            "fedavg",
            "--data",
            "d",
            "--target",
            "y",
            "--rounds",
            "1",
            "--out",
            "run",
            "--quiet",
            "--no-baselines",
        ),
        *("--max-expansion", "20", *flags),
    )
    assert shown.code == 0, shown.err
    expected = {"drop": ["id"], "missing": ["-9"], "decimal": ".", "fold_case": True, "fill_absent": True}
    record = json.loads(Path("run/config.json").read_text())["settings"]
    assert {**expected, "duplicates": "keep", "max_expansion": 20.0}.items() <= record.items()
    fitted = Preprocessing.from_json(json.loads(Path("run/preprocessing.json").read_text()))
    assert fitted.features == ("age", "lab", "lab missing")
    assert (fitted.rules.drop, fitted.rules.missing, fitted.rules.fold_case) == (("id",), ("-9",), True)
    Path("e.toml").write_text(
        'schema = 1\nmethods = ["fedavg"]\ndata = "d"\ntarget = "y"\ndrop = ["id"]\nmissing = ["-9"]\n'
        'fold_case = true\nfill_absent = true\nduplicates = "keep"\nmax_expansion = 20\ndecimal = "."\n'
    )
    settings = load_experiment(Path("e.toml")).settings
    assert (settings.drop, settings.missing, settings.max_expansion) == (("id",), ("-9",), 20.0)
    python = Federation.from_folder("d", target="y", drop=("id",), missing=("-9",), fold_case=True, fill_absent=True)
    assert federation_of(settings).digest() == python.digest()


def test_records_of_earlier_versions_are_read() -> None:
    """A record without the new settings has their defaults, which read tables as before."""
    content = check_run("fedavg", {}, {}).to_json()
    new = ("drop", "missing", "decimal", "fold_case", "fill_absent", "duplicates", "max_expansion")
    content["settings"] = {k: v for k, v in content["settings"].items() if k not in new}
    assert RunConfig.from_json(content).settings == Settings()
    earlier = {"columns": [], "target": "y", "task": "classification", "classes": ["a", "b"]}
    assert Preprocessing.from_json(earlier).rules.missing == ()
    assert "fields differ" in refusal(Preprocessing.from_json, {**earlier, "rules": {"drop": 3}})


# ---------------------------------------------------------------------------------------------------- waffle data


def test_data_shows_all_problems_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`waffle data` lists every problem and every note, and exits with 2."""
    monkeypatch.setenv("COLUMNS", "100")
    folder = write(
        tmp_path / "d",
        north=table(1, sex=column(["M", "F", "F"]), lab=[*LAB[:-1], "-9"], y=column(["No", "Yes"])),
        south=table(2, sex=column(["m", "f", "f"]), lab=LAB, y=column(["0", "1"])),
        torn="age,sex,lab,y\n1,2\n3\n",
        west=table(3, sex=column(["m", "f", "f"])),
    )
    (folder / "old.xls").write_bytes(b"")
    shown = waffle("data", folder, "--target", "y")
    assert shown.code == 2
    assert shown.words.endswith("4 problems listed above; fix the files, or use the options named there")
    text = " ".join(shown.out.split())
    for piece in (
        "3 agents, 72 rows, predicts y (classification)", "north 24 · · 12 · 12 · north.csv", "F (16), f (32), M (8)",
        "no column at west", "torn.csv, line 2: expected 4 cells as in the header, got 2 (and 1 more line)",
        "west.csv lacks 'lab'", "column 'sex' has 'F' and 'f'", "the target 'y' has 'No' and 'no'",
        "it also has 0/1 beside no/yes", "column 'lab' has -9 in 1 row", "passed over old.xls",
    ):  # fmt: skip
        assert piece in text, (piece, shown.out)
    assert max(map(len, shown.out.splitlines()[1:])) <= 100


def test_data_shows_what_a_run_reads(tmp_path: Path) -> None:
    """Without problems the split and the classes by agent are those of the run; --json has the same facts."""
    folder = write(tmp_path / "d", north=table(1, lab=[*LAB[:-1], ""]), south=table(2, lab=LAB, id=DATES))
    flags = ("--target", "y", "--drop", "id")
    shown = waffle("data", folder, *flags)
    assert (shown.code, shown.err) == (0, "")
    assert "north 24 18 6 12 12 north.csv" in " ".join(shown.out.split())
    facts = strict(waffle("data", folder, *flags, "--json").out)
    assert (facts["task"], facts["problems"], facts["notes"]) == ("classification", [], [])
    assert [agent["classes"] for agent in facts["agents"]] == [{"no": 12, "yes": 12}] * 2
    assert {c["name"]: c["kind"] for c in facts["columns"]} == {
        "age": "numeric", "lab": "numeric", "y": "target", "id": "dropped"
    }  # fmt: skip
    assert next(c["missing"] for c in facts["columns"] if c["name"] == "lab") == {"north": 1, "south": 0}


def test_data_of_one_file_and_of_arrays(tmp_path: Path) -> None:
    """A single table and a folder of arrays are described too; other paths and flags are refused."""
    folder = write(tmp_path / "d", north=table(1))
    assert "1 agent, 24 rows" in waffle("data", folder / "north.csv", "--target", "y").out
    assert "which column is to be predicted?" in " ".join(waffle("data", folder).out.split())
    (tmp_path / "e").mkdir()
    np.savez(tmp_path / "e" / "a.npz", x=np.random.default_rng(0).normal(size=(9, 2)), y=np.arange(9) % 2)
    assert "1 agents, 9 samples of shape 2, classification" in " ".join(waffle("data", tmp_path / "e").out.split())
    assert "(or the path of a data folder)" in waffle("data", "digitz").words
    assert "leave them out" in waffle("data", "digits", "--target", "y").words
    assert "each agent has its own" in waffle("data", folder, "--target", "y", "--split", "A").words


def test_messages_show_the_beginning_of_a_long_cell(tmp_path: Path) -> None:
    """A cell of 85,000 characters is cut in errors and in the report of `waffle data`."""
    long = "x" * 85_000
    folder = write(tmp_path / "d", north=table(1, lab=[*LAB[:-1], long]), south=table(2, lab=LAB))
    assert f"has '{'x' * 40}...': repair it" in refusal(read, folder)
    longer = write(tmp_path / "longer", north=table(1, lab=[*LAB[:-1], 2 * long]), south=table(2, lab=LAB))
    assert "north.csv: expected cells of at most 131,072 characters: shorten the longer ones" in refusal(read, longer)
    folder = write(tmp_path / "d", north=table(1, lab=column(["a", long])), south=table(2, lab=column(["a"])))
    shown = waffle("data", folder, "--target", "y")
    assert shown.code == 0
    assert len(shown.out) < 5_000
