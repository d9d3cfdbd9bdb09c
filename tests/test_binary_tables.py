"""Cells of workbooks and of files of Stata and SPSS come back as their programs show them: declared missing
values, dates of any century, durations, periods, merged cells.
"""

import datetime
import zipfile
from pathlib import Path

import pytest
from helpers import read, read_statistics_here
from test_predict import CODES, model, predict_here  # noqa: F401
from test_table_kinds import cell, copied, document, workbook
from test_tables import outcome, rows_of

from histocc.data.binary import Missing
from histocc.data.rows import code_of_cell, read_key
from histocc.data.tables import table_format
from histocc.formatter import make_formatter

TEXTS = ["smith", "baker", "farmer", "weaver", "tailor", "miller"]


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    pytest.importorskip("pyreadstat")
    read_statistics_here(monkeypatch)


def statistics(path: Path, columns: dict, **how) -> Path:
    pyreadstat, pandas = pytest.importorskip("pyreadstat"), pytest.importorskip("pandas")
    write = pyreadstat.write_dta if path.suffix == ".dta" else pyreadstat.write_sav
    kinds = dict.fromkeys(how.get("missing_user_values", ()), object)
    write(pandas.DataFrame(columns).astype(kinds), str(path), **how)
    return path


def columns_of(path: Path, texts: list[str] | None = None) -> dict[str, list[str]]:
    names = table_format(str(path), None, None, False, None, texts or []).names
    rows, _ = rows_of(path, None, None, None, False, None, texts or [])
    return dict(zip(names, map(list, zip(*rows.values()))))


# ---- declared missing values


def declared(folder: Path) -> Path:
    """-1 twice, -9, 99 and a blank in the column of codes; each declared, but the blank."""
    columns = {
        "occ1": [*TEXTS, "clerk", "XX"],
        "hisco_1": [-1.0, 77610.0, -9.0, 99.0, 79100.0, None, -1.0, -9.0],
        "age": [30.0, -9.0, 41.0, 97.0, 22.0, None, 50.0, 99.0],
        "region": ["A", "B", "Z", "A", "B", "A", "A", "Z"],
    }
    ranges = {"occ1": ["XX"], "hisco_1": [-1, -9, 99], "age": [{"lo": 90, "hi": 99}, -9], "region": ["Z"]}
    labels = {"hisco_1": {-1: "no occupation"}, "age": {-9: "unknown"}}
    return statistics(folder / "t.sav", columns, missing_ranges=ranges, variable_value_labels=labels)


def test_declared_missing_values_stay_in_copied_columns(tmp_path):
    found = columns_of(declared(tmp_path), ["occ1"])
    assert found["hisco_1"] == ["-1", "77610", "-9", "99", "79100", "", "-1", "-9"]
    assert found["age"] == ["30", "-9", "41", "97", "22", "", "50", "99"]
    assert found["region"] == list("ABZABAAZ") and found["occ1"][-1] == "XX"
    assert [isinstance(cell, Missing) for cell in found["age"]] == [0, 1, 0, 1, 0, 0, 0, 1]
    # labels stand for values in columns of texts alone
    assert columns_of(tmp_path / "t.sav", ["age"])["age"][:2] == ["30", "unknown"]


def test_extended_missing_values_of_stata(tmp_path):
    columns = {"occ1": TEXTS[:4], "hisco_1": [83110.0, "a", "z", None], "note": ["", "a", ".", "x"]}
    how = {"variable_value_labels": {"hisco_1": {"a": "refused"}}}
    path = statistics(tmp_path / "t.dta", columns, missing_user_values={"hisco_1": ["a", "z"]}, **how)
    assert columns_of(path) == columns | {"hisco_1": ["83110", ".a", ".z", ""]}
    assert columns_of(path, ["hisco_1"])["hisco_1"] == ["83110", "refused", ".z", ""]
    code, said = outcome(tmp_path, path.read_bytes(), name="t.dta")
    assert code == 0 and "in a sheet, read as no code: 2 (" in said and "1 × '.a', 1 × '.z'" in said
    assert "3 × first code missing" in said and "1 for training" in said


@pytest.mark.parametrize("formatter", ["hisco", "auto"])
def test_minus_one_of_hisco_is_a_code_though_declared_missing(formatter, tmp_path):
    code, said = outcome(tmp_path, declared(tmp_path).read_bytes(), f"--formatter {formatter}", "t.sav")
    assert code == 0 and "8 read, 4 for training" in said, said
    assert "in a sheet, read as no code: 2 (" in said
    assert "1 × '-9', 1 × '99'" in said, said
    assert "1 × empty text" in said


def test_minus_one_of_another_system_is_no_code(tmp_path):
    columns = {"occ1": TEXTS, "hisco_1": ["A1", "B2", "-1", "A1", "C3", "B2"]}
    path = statistics(tmp_path / "t.sav", columns, missing_ranges={"hisco_1": ["-1"]})
    code, said = outcome(tmp_path, path.read_bytes(), "--formatter auto --code-separator ;", "t.sav")
    assert code == 0 and "6 read, 5 for training" in said and "1 × '-1'" in said, said


def test_declared_missing_values_in_keys_and_cells(tmp_path):
    columns = {"code": [0.0, 1.0, 2.0], "system_code": [-1.0, 83110.0, 99.0]}
    path = statistics(tmp_path / "key.sav", columns, missing_ranges={"system_code": [-1, 99]})
    assert read_key(str(path)) == ["-1", "83110", ""]
    occ1950 = make_formatter("occ1950", ["a"])
    assert [code_of_cell(Missing("-1"), occ1950, key) for key in ((), {"-1"})] == ["", "-1"]


def test_coding_keeps_declared_missing_values(model, tmp_path):  # noqa: F811
    given = ["--model", model, "--input", declared(tmp_path), "--output", tmp_path / "o.csv"]
    said = predict_here(*given, "--only-missing", "--decoder", "topk", "--k", 1)
    rows = read(tmp_path / "o.csv")
    codes = [row["hisco_1"] for row in rows]
    assert [codes[i] for i in (0, 1, 4, 6)] == ["-1", "77610", "79100", "-1"] and "4 with codes kept" in said
    assert {codes[2], codes[3], codes[5]} <= {*CODES}  # -9, 99 and a blank are no codes
    assert codes[7] == ""  # a text that is declared missing has none
    assert [row["age"] for row in rows] == ["30", "-9", "41", "97", "22", "", "50", "99"]


def test_missing_values_and_formats_stay_between_files_of_one_kind(tmp_path):
    columns = {"occ1": TEXTS[:3], "a": [3.0, "b", "z"], "q": [-440.0, "a", None], "none": [float("nan")] * 3}
    columns |= {"d": [-40000.0, 1e9, None], "n": [1.0, 2.0, 3.0]}
    how: dict = {"variable_format": {"q": "%tq", "d": "%tdNN/DD/CCYY", "n": "%8.2f", "none": "%ty"}}
    how["missing_user_values"] = {"a": ["b", "z"], "q": ["a"]}
    stata = statistics(tmp_path / "t.dta", columns, **how)
    spss = declared(tmp_path)
    import pyreadstat

    for reader, path in ((pyreadstat.read_dta, stata), (pyreadstat.read_sav, spss)):
        again = copied(path, path.with_stem("out"))
        given: dict = {"user_missing": True, "disable_datetime_conversion": True, "output_format": "dict"}
        (cells, about), (of_copy, about_copy) = (reader(str(file), **given) for file in (path, again))
        assert str(cells) == str(of_copy)  # nan is not nan
        for what in ("original_variable_types", "missing_ranges", "missing_user_values"):
            assert getattr(about, what) == getattr(about_copy, what)
    other = copied(stata, tmp_path / "other.sav")  # of another kind
    _, about = pyreadstat.read_sav(str(other))
    assert about.readstat_variable_types["a"] == "double" and columns_of(other)["a"] == ["3", "", ""]
    assert columns_of(other)["q"] == ["1850q1", "", ""]


# ---- dates, durations, periods


def serials(path: Path, formats: list[str], numbers: list[float], **options) -> list[list[str]]:
    """The rows that are read where a sheet of .xlsx has these numbers in each of the formats."""
    xlsxwriter, _ = pytest.importorskip("xlsxwriter"), pytest.importorskip("python_calamine")
    with xlsxwriter.Workbook(str(path), options) as book:
        book.add_worksheet("first").write(0, 0, "other")
        sheet = book.add_worksheet("a & b")
        sheet.write_row(1, 1, ["occ1", *formats])
        for row, number in enumerate(numbers, 2):
            sheet.write(row, 1, "smith")
            for column, form in enumerate(formats, 2):
                sheet.write_number(row, column, number, book.add_format({"num_format": form}))
    return [list(row[1:]) for row in rows_of(path, None, None, None, False, None, ["occ1"])[0].values()]


def test_dates_before_1900_are_those_of_the_sheet(tmp_path):
    formats = ["yyyy-mm-dd", "d.m.yyyy hh:mm", "[$-41D]hh:mm", "[h]:mm", "0.00;[Red]-0.00"]
    numbers = [-18260, -1, 0, 0.25, 1, 59, 61, 1.25]
    rows = serials(tmp_path / "a.xlsx", formats, numbers)
    days = ["1850-01-01", "1899-12-29", "1899-12-30", "1899-12-30 06:00:00", "1900-01-01", "1900-02-28"]
    days += ["1900-03-01", "1900-01-01 06:00:00"]
    assert [row[0] for row in rows] == days == [row[1] for row in rows]
    assert [row[2] for row in rows[2:4]] == ["00:00:00", "06:00:00"]  # times of day
    hours = "-438240:00:00 -24:00:00 0:00:00 6:00:00 24:00:00 1416:00:00 1464:00:00 30:00:00"
    assert " ".join(row[3] for row in rows) == hours
    assert [row[4] for row in rows[:4]] == ["-18260", "-1", "0", "0.25"]
    rows = serials(tmp_path / "b.xlsx", formats, numbers, date_1904=True)
    days = ["1854-01-02", "1903-12-31", "1904-01-01", "1904-01-01 06:00:00", "1904-01-02", "1904-02-29"]
    assert [row[0] for row in rows[:6]] == days and rows[6][0] == "1904-03-02"


def test_shared_texts_in_cells_with_a_format_of_dates_stay(tmp_path):
    """Such a cell has the number of a text, which is no serial."""
    rows = [["occ1", "born"], ["smith", "in May"], ["baker", datetime.date(1910, 5, 1)]]
    path = workbook(tmp_path / "a.xlsx", {"s": rows})
    with zipfile.ZipFile(path) as parts:
        content = {name: parts.read(name) for name in parts.namelist()}
    with zipfile.ZipFile(tmp_path / "b.xlsx", "w") as parts:
        for name, part in content.items():
            parts.writestr(name, part.replace(b'<c r="B2" t="s">', b'<c r="B2" s="1" t="s">'))
    assert columns_of(tmp_path / "b.xlsx")["born"] == ["in May", "1910-05-01"]


def moment(kind: str, value: str) -> str:
    return f'<table:table-cell office:value-type="{kind}" office:{kind}-value="{value}"/>'


def test_dates_and_durations_of_opendocument(tmp_path):
    row = [moment("date", "1850-01-01"), moment("time", "PT30H00M00S"), moment("time", "-PT01H30M00S")]
    row += [moment("time", "PT06H30M00S"), cell("PT30")]
    path = document(tmp_path / "a.ods", *map("".join, (map(cell, "abcde"), row)))
    [found] = zip(*columns_of(path).values())
    assert found == ("1850-01-01", "30:00:00", "-1:30:00", "06:30:00", "PT30")


def test_dates_and_periods_of_stata(tmp_path):
    columns = {"m": [-1200.0, 5.0], "q": [-400.0, 3.0], "w": [51.0, 52.0], "h": [-1.0, 0.0]}
    columns |= {"y": [1850.0, 1960.0], "d": [-40000.0, 1.0], "own": [-40000.0, 1.0]}
    columns |= {"c": [-3e12, 0.0], "t": [3.6e6, 0.0], "far": [1e9, 1.0]}
    formats = {name: f"%t{name}" for name in "mqwhydc"}
    formats |= {"own": "%tdNN/DD/CCYY", "t": "%tcHH:MM:SS", "far": "%-td"}
    found = columns_of(statistics(tmp_path / "t.dta", columns, variable_format=formats))
    assert {name: cells[0] for name, cells in found.items()} == {
        **{"m": "1860m1", "q": "1860q1", "w": "1960w52", "h": "1959h2", "y": "1850", "d": "1850-06-26"},
        **{"own": "1850-06-26", "c": "1864-12-06 18:40:00", "t": "01:00:00", "far": "1000000000"},
    }
    assert [found[name][1] for name in "mqwh"] == ["1960m6", "1960q4", "1961w1", "1960h1"]


def test_dates_and_durations_of_spss(tmp_path):
    at = (datetime.date(1849, 9, 27) - datetime.date(1582, 10, 14)).days * 86400.0
    columns = {"date": [at, 5.0], "at": [at + 60, 0.0], "month": [at, 0.0]}
    columns |= {"time": [108000.0, 23400.0], "long": [-3600.0, 60.5]}
    formats = {"date": "DATE11", "at": "DATETIME20", "month": "MOYR8", "time": "TIME8", "long": "DTIME20"}
    # LOWEST THRU 5
    ranges = {"date": [{"lo": float("-inf"), "hi": 5}]}
    path = statistics(tmp_path / "t.sav", columns, variable_format=formats, missing_ranges=ranges)
    found = columns_of(path)
    assert found == {
        "date": ["1849-09-27", "1582-10-14"],
        "at": ["1849-09-27 00:01:00", "1582-10-14 00:00:00"],
        "month": ["1849-09-27", "1582-10-14"],
        "time": ["30:00:00", "06:30:00"],
        "long": ["-1:00:00", "00:01:00.500000"],
    }
    assert [isinstance(each, Missing) for each in found["date"]] == [False, True]


# ---- merged cells


def merged_workbook(path: Path) -> Path:
    """Names in two rows, merged codes, and codes merged over columns."""
    xlsxwriter, _ = pytest.importorskip("xlsxwriter"), pytest.importorskip("python_calamine")
    with xlsxwriter.Workbook(str(path)) as book:
        sheet = book.add_worksheet("Data")
        sheet.merge_range("B2:B3", "occ1")
        sheet.merge_range("C2:D2", "codes")
        sheet.write_row("C3", ["hisco_1", "hisco_2"])
        sheet.merge_range("C4:C6", 83110)
        sheet.write_column("B4", ["smith", "old smith"])
        sheet.write_column("B7", ["baker", "old baker"])
        sheet.merge_range("C7:D7", 77610)  # over columns: the value is in the first
        sheet.merge_range("C8:D9", 41025)
        sheet.write("B9", "clerk")
        sheet.merge_range("B10:B11", "cook")  # row 11 is blank but for it: no row of the table
        sheet.set_row(7, None, None, {"hidden": True})
    return path


def test_merged_cells_hold_their_value_in_all_their_rows(tmp_path):
    path = merged_workbook(tmp_path / "a.xlsx")
    assert columns_of(path, ["occ1"]) == {
        "occ1": ["smith", "old smith", "baker", "old baker", "clerk", "cook"],
        "hisco_1": ["83110", "83110", "77610", "41025", "41025", ""],
        "hisco_2": ["", "", "", "", "", ""],
    }
    notes = table_format(str(path), None, None, False, None, ["occ1"]).notes
    assert "has merged cells (3): their rows that hold anything else get their value" in notes
    code, said = outcome(tmp_path, path.read_bytes(), name="t.xlsx")
    assert code == 0 and "5 for training" in said and "merged cells (3)" in said


def test_merged_cells_of_opendocument_are_named(tmp_path):
    spanned = 'table:number-rows-spanned="2" table:number-columns-spanned="1"'
    covered = cell("old smith") + "<table:covered-table-cell/>"
    rows = cell("occ1") + cell("hisco_1"), cell("smith") + cell("83110", spanned), covered
    path = document(tmp_path / "a.ods", *rows)
    assert [row[0] for row in rows_of(path, [1])[0].values()] == ["83110", ""]
    [note] = table_format(str(path)).notes
    assert "has merged cells" in note and "save the workbook as .xlsx" in note
