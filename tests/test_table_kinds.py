"""Workbooks, files of Stata, SPSS and SAS, JSON lines: each kind is read, copied, trained on and coded; and
what the user is told of it.
"""

import csv
import datetime
import gzip
import io
import json
import re
import shlex
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from helpers import TITLES, run_here, write_csv
from test_tables import FILES, outcome, parquet_file, rows_of

import finetune
from histocc.data.rows import code_of_cell, read_columns
from histocc.data.tables import read_chunks, table_format
from histocc.data.written import table_writer
from histocc.formatter import make_formatter
from histocc.predict import __main__ as predict
from histocc.runtime.errors import UserError

COLUMNS = ["occ1 ", "hisco_1", "lang"]
ROWS = [(f"{TITLES[i % 8][0]} no {i}", int(TITLES[i % 8][1]), "en") for i in range(40)]


def workbook(path: Path, sheets: dict[str, list], **options) -> Path:
    """Numbers become numbers, a text that begins with = becomes a formula without its value."""
    xlsxwriter, _ = pytest.importorskip("xlsxwriter"), pytest.importorskip("python_calamine")
    with xlsxwriter.Workbook(str(path), {"default_date_format": "yyyy-mm-dd", **options}) as book:
        for name, rows in sheets.items():
            sheet = book.add_worksheet(name)
            if name == "Hidden":
                sheet.hide()
            for place, row in enumerate(rows):
                for column, cell in enumerate(row):
                    formula = str(cell).startswith("=")
                    sheet.write(place, column, cell, *[None, ""] * formula)
    return path


def cell(text: str, how: str = "") -> str:
    return f'<table:table-cell office:value-type="string" {how}><text:p>{text}</text:p></table:table-cell>'


def document(path: Path, *rows: str) -> Path:
    """A sheet of OpenDocument."""
    pytest.importorskip("python_calamine")
    place = "urn:oasis:names:tc:opendocument:xmlns"
    spaces = " ".join(f'xmlns:{name}="{place}:{name}:1.0"' for name in ("office", "table", "text"))
    content = "".join(f"<table:table-row>{row}</table:table-row>" for row in rows)
    sheet = f'<table:table table:name="Data">{content}</table:table>'
    body = f"<office:body><office:spreadsheet>{sheet}</office:spreadsheet></office:body>"
    with zipfile.ZipFile(path, "w") as parts:
        parts.writestr("mimetype", "application/vnd.oasis.opendocument.spreadsheet")
        parts.writestr("content.xml", f"<office:document-content {spaces}>{body}</office:document-content>")
        parts.writestr("META-INF/manifest.xml", '<manifest:manifest xmlns:manifest="m"/>')
    return path


def table_of(folder: Path, kind: str) -> Path:
    path = folder / f"in{kind}"
    if kind in (".jsonl", ".ndjson.gz"):
        rows = [json.dumps(dict(zip(COLUMNS, (text, [str(code)], lang)))) for text, code, lang in ROWS]
        content = "\r\n".join(rows).encode()
        path.write_bytes(gzip.compress(content) if kind.endswith("gz") else content)
    elif kind in (".xpt", ".dta", ".sav", ".zsav"):
        pyreadstat, pandas = pytest.importorskip("pyreadstat"), pytest.importorskip("pandas")
        table = pandas.DataFrame(ROWS, columns=[name.strip() for name in COLUMNS])
        if kind == ".xpt":
            pyreadstat.write_xport(table, str(path))
            return path
        titles = {i + 1: text for i, text in enumerate(table.occ1)}
        table = table.assign(occ1=[float(i) for i in titles], hisco_1=table.hisco_1.astype(float))
        labels = {"occ1": titles, "hisco_1": {code: "a title" for _, code, _ in ROWS}}
        write = pyreadstat.write_dta if kind == ".dta" else pyreadstat.write_sav
        packed = {"compress": True} if kind == ".zsav" else {}
        write(table, str(path), variable_value_labels=labels, **packed)
    elif kind == ".csv.gz":
        text = Path(write_csv(path, COLUMNS, ROWS)).read_text()
        path.write_bytes(gzip.compress(text.encode("utf-16")))
    elif kind == ".parquet":
        parquet_file(path, dict(zip(COLUMNS, zip(*ROWS))))
    elif kind == ".ods":
        number = '<table:table-cell office:value-type="float" office:value="{}"/>'
        rows = [(cell(text), number.format(code), cell(lang)) for text, code, lang in ROWS]
        document(path, *map("".join, [map(cell, COLUMNS), *rows]))
    elif kind == ".xls":  # one of Excel 97, with a title above the names
        pytest.importorskip("python_calamine")
        path.write_bytes((FILES / "excel97.xls").read_bytes())
    else:
        workbook(path, {"Info": [["made for tests"]], "Data": [["Parish"], [], COLUMNS, *ROWS]})
    return path


KINDS = ".xlsx .ods .xls .dta .sav .zsav .xpt .csv.gz .parquet .jsonl .ndjson.gz"


@pytest.mark.parametrize("kind", KINDS.split())
def test_each_kind_of_table_is_read(kind, tmp_path):
    path, columns = table_of(tmp_path, kind), [name.strip() for name in COLUMNS]
    rows, faults = rows_of(path, columns, None, None, False, None, columns[:1])
    assert (list(rows.values()), faults) == ([(text, str(code), lang) for text, code, lang in ROWS], [])


def test_the_reader_of_a_damaged_file_may_die(tmp_path, monkeypatch):
    (tmp_path / "pyreadstat.py").write_text("import os\ndef read_sav(*_, **how): os.abort()\n")
    (tmp_path / "t.sav").write_bytes(b"$FL2")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pyreadstat", raising=False)
    with pytest.raises(UserError, match="t.sav: cannot be read as a file of SPSS .*exit code .*damaged"):
        rows_of(tmp_path / "t.sav")
    monkeypatch.delitem(sys.modules, "pyreadstat")


@pytest.mark.parametrize("kind", ["xlsx", "csv"])
def test_a_search_takes_no_square_of_time(tmp_path, kind):
    """In a comment of a workbook, and in a cell without the letters that tell a code page. By the work of
    this process, which no other one changes: four times the text is four times as much, a square sixteen.
    """

    def work(times):
        spent = []
        for path in (tmp_path / f"{times} {number}.{kind}" for number in range(3)):
            if kind == "csv":
                long = "a" * 2 * times + ",41025,\u00f8"
                path.write_text(f"occ1,hisco_1,note\nsmith,83110,sm\u00f8r\n{long}\n", encoding="cp1252")
            else:
                book = workbook(tmp_path / "book.xlsx", {"s": [["occ1", "hisco_1"], ["smith", 83110]]})
                comment = b"<!-- " + b"<c <f " * times + b"--><sheetData>"
                with zipfile.ZipFile(book) as parts, zipfile.ZipFile(path, "w") as copied:
                    for name in parts.namelist():
                        copied.writestr(name, parts.read(name).replace(b"<sheetData>", comment))
            started = time.process_time()
            assert table_format(str(path)).names[:2] == ["occ1", "hisco_1"]
            spent.append(time.process_time() - started)
        return min(spent)

    assert work(80_000) < 10 * work(20_000)


@pytest.mark.parametrize("text", ["a\ufffeb", "\uffff", "<r>a & b</r>"])
def test_what_no_cell_of_a_workbook_can_hold_is_refused(text):
    pytest.importorskip("xlsxwriter")
    said = "a cell of .xlsx holds .* XML allows: name the output .csv"
    for header, rows in ((["occ1"], [["smith"], [text]]), ([text], [["smith"]])):
        refused = pytest.raises(UserError, match=said)
        with refused, table_writer(io.BytesIO(), "o.xlsx", header, set()) as write:
            write(rows)


def copied(source: Path, output: Path) -> Path:
    """Copy a table as predict copies its columns."""
    table = table_format(str(source))
    types = table.types_but(())
    with open(output, "wb") as file, table_writer(file, str(output), table.names, set(), types) as write:
        for chunk in read_chunks(str(source), None):
            write(list(zip(*chunk.columns)))
    return output


def test_what_goes_into_a_workbook_comes_out_of_it(tmp_path):
    openpyxl, xlsxwriter, _ = map(pytest.importorskip, ("openpyxl", "xlsxwriter", "python_calamine"))
    with xlsxwriter.Workbook(str(tmp_path / "in.xlsx")) as book:
        sheet, formats = book.add_worksheet(), ["yyyy-mm-dd", 22, "[h]:mm", '0.00 "kr"', 9]
        day, moment, hours, crowns, percent = (book.add_format({"num_format": x}) for x in formats)
        sheet.write_row(1, 2, ["occ1", "n", "born", "at", "for", "paid", "share", "is", "code", "sum", "x"])
        for row in range(2, 9):
            sheet.write_row(row, 2, ["smith", row])
            sheet.write_datetime(row, 4, datetime.datetime(1899 + row, 5, 1), day)
            sheet.write_datetime(row, 5, datetime.datetime(1950, 1, 2, 3, 4), moment)
            sheet.write_datetime(row, 6, datetime.timedelta(hours=30), hours)
            sheet.write_number(row, 7, 1 / row, crowns)
            sheet.write_number(row, 8, 0.25, percent)
            sheet.write_boolean(row, 9, row % 2)
            sheet.write_string(row, 10, f"0{row}10")
            sheet.write_formula(row, 11, f"=D{row}+1", None, row + 1)
            if row > 4:
                sheet.write_string(row, 12, "=not a formula")
    written = [copied(tmp_path / "in.xlsx", tmp_path / name) for name in ("out.xlsx", "again.xlsx")]
    assert written[0].read_bytes() == written[1].read_bytes()

    def cells(path, *area):
        sheet = openpyxl.load_workbook(path, data_only=True).active
        rows = sheet.iter_rows(*area) if area else sheet.iter_rows()
        return [[(x.value, x.data_type) for x in row] for row in rows]

    assert cells(written[0]) == cells(tmp_path / "in.xlsx", 2, None, 3)
    looks = {cell.number_format for cell in openpyxl.load_workbook(written[0]).active[2]}
    assert looks == {"General", "yyyy-mm-dd", "yyyy-mm-dd hh:mm:ss", "[h]:mm:ss"}
    table = tmp_path / "out.csv"  # the texts of a copy in CSV
    assert copied(tmp_path / "in.xlsx", table).read_text().splitlines()[1].startswith("smith,2,1901-05-01,")


def test_a_sheet_is_made_to_be_read(tmp_path):
    openpyxl, _ = pytest.importorskip("openpyxl"), pytest.importorskip("xlsxwriter")
    numbers = ["prob_1", "conf", "needs_review"]
    header = ["occ1", "hisco_1", *numbers]
    with open(tmp_path / "o.xlsx", "wb") as file, table_writer(file, "o.xlsx", header, {*numbers}) as write:
        write([["smith " * 20, "01110", "0.75", "0.5", "1"], ["x", "83110", "1", "1", "0"]])
    sheet = openpyxl.load_workbook(tmp_path / "o.xlsx").active
    assert all(cell.font.bold for cell in sheet[1]) and not sheet["A2"].font.bold
    assert (sheet.freeze_panes, sheet.auto_filter.ref) == ("A2", "A1:E3")
    assert sheet.column_dimensions["A"].width > 40 > sheet.column_dimensions["B"].width
    assert sheet.column_dimensions["A"].width < 60
    found = [(cell.value, cell.data_type, cell.number_format) for cell in sheet[2]][1:]
    assert found[0] == ("01110", "s", "General") and found[3] == (1, "n", "General")
    assert found[1:3] == [(0.75, "n", "0.0%"), (0.5, "n", "0.0%")]
    [(area, [rule])] = sheet.conditional_formatting._cf_rules.items()
    assert (str(area.sqref), rule.formula) == ("A2:E3", ["$E2=1"])
    wide = [f"c{i}" for i in range(16_385)]
    refused = pytest.raises(UserError, match="a sheet has 16,384 columns, but there are 16,385 to write")
    with refused, table_writer(io.BytesIO(), "o.xlsx", wide, set()):
        pass


def test_types_of_parquet_stata_and_spss_stay(tmp_path):
    pa, parquet, *_ = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet", "pyreadstat", "pandas"))
    days = [datetime.date(1850, 2, 3), None, datetime.date(2024, 1, 1)]
    table = pa.table(
        {
            "occ1": ["smith", "", None],
            "id": pa.array([2**60, None, 1]),
            "n": pa.array([1, None, 3], pa.int8()),
            "share": [0.1 + 0.2, None, 2.0],
            "is": [True, None, False],
            "born": days,
            "at": pa.array([0, None, 1], pa.timestamp("ns", "Europe/Berlin")),
            "kind": pa.array(["a", None, "b"]),
        }
    )
    parquet.write_table(table, tmp_path / "in.parquet")
    assert parquet.read_table(copied(tmp_path / "in.parquet", tmp_path / "out.parquet")).equals(table)
    import pyreadstat

    for ending, read in ((".dta", pyreadstat.read_dta), (".sav", pyreadstat.read_sav)):
        written = copied(tmp_path / "in.parquet", tmp_path / f"1{ending}")
        found, _ = read(copied(written, tmp_path / f"2{ending}"), output_format="dict")
        assert found == read(written, output_format="dict")[0]
        assert found["born"] == days and found["n"] == [1, None, 3] and found["is"] == [1, None, 0]
        assert found["share"] == [0.1 + 0.2, None, 2] and found["id"] == [str(2**60), "", "1"]
        assert found["occ1"] == ["smith", "", ""] and found["kind"] == ["a", "", "b"]
        for name in ("a" * 65, "with blank", "2nd", "with" if ending == ".dta" else "WITH"):
            why, file = f"names of at most .* not '{name}': name it .csv or .parquet", io.BytesIO()
            with pytest.raises(UserError, match=why), table_writer(file, f"o{ending}", ["occ1", name], set()):
                pass


def test_errors_and_long_numbers_of_a_workbook_are_copied(tmp_path):
    openpyxl, xlsxwriter, _ = map(pytest.importorskip, ("openpyxl", "xlsxwriter", "python_calamine"))
    with xlsxwriter.Workbook(str(tmp_path / "in.xlsx")) as book:
        sheet, day = book.add_worksheet(), book.add_format({"num_format": "yyyy-mm-dd"})
        for row, cells in enumerate([["occ1", "hisco_1", "id", "born"], ["smith"], ["baker"], ["weaver"]]):
            sheet.write_row(row, 0, cells)
            sheet.write_number(row + 1, 2, 10.0 ** (16 + row))
            born = datetime.date(1900, 1, 1) + datetime.timedelta(days=29 * row)
            sheet.write_datetime(row + 1, 3, born, day)
        sheet.write_formula(1, 1, "=NA()", None, "#N/A")
        sheet.write_formula(2, 1, "=1/0", day, "#DIV/0!")
        sheet.write_string(3, 1, "#1")
    out = copied(tmp_path / "in.xlsx", tmp_path / "out.csv")
    assert [row[:3] for row in csv.reader(out.read_text().splitlines()[1:4])] == [
        ["smith", "#N/A", "10000000000000000"],
        ["baker", "#DIV/0!", "100000000000000000"],
        ["weaver", "#1", "1000000000000000000"],
    ]
    sheet = openpyxl.load_workbook(copied(tmp_path / "in.xlsx", tmp_path / "out.xlsx")).active
    assert [sheet.cell(row, 2).value for row in (2, 3, 4)] == ["#N/A", "#DIV/0!", "#1"]
    born = [sheet.cell(row, 4).value.isoformat()[:10] for row in (2, 3, 4)]
    assert born == ["1900-01-01", "1900-01-30", "1900-02-28"]
    hisco, cells = make_formatter("hisco", ["hisco_1"]), rows_of(tmp_path / "in.xlsx", ["hisco_1"])[0]
    assert [code_of_cell(cell, hisco) for (cell,) in cells.values()] == ["", "", "#1", ""]


def test_half_a_character_of_json_lines_is_replaced(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"occ1": "b\\ud800aker \\ud83d\\ude00", "\\udc00": {"a": "\\ud800"}}\n')
    assert table_format(str(path)).names == ["occ1", "\ufffd"]
    assert rows_of(path)[0][1] == ("b\ufffdaker 😀", '{"a": "\ufffd"}')


SHEETS = {  # numbers as spreadsheets have them, a blank row, a date for a code, a formula without its value
    "Info": [["made for tests"]],
    "Hidden": [["occ1", "hisco_1"], ["old", 1]],
    "Data": [
        *([None, "A title"], [None, "occ1", "hisco_1", "note"], [None, "smith", 83110.0, 1e5]),
        *([None, "baker", 7610, True], [], [None, "weaver", "", 0.5]),
        [None, "tailor", datetime.date(2024, 8, 31), "="],
    ],
    "Other": [["occ1", "hisco_1", "clerk's\n note"], ["farmer", 61110]],
}


def test_what_the_user_is_told_of_a_workbook(tmp_path, monkeypatch):
    content = workbook(tmp_path / "f.xlsx", SHEETS).read_bytes()

    def told(*flags: str, content=content) -> str:
        code, said = outcome(tmp_path, content, " ".join(flags), "data.xlsx")
        assert code == 0 or code == 2 and said.count("error: ") == 1 and "Traceback" not in said, said
        return said

    said = told("--drop-bad-labels")
    assert "4 read, 2 for training" in said and "or a decimal as in 110.0): 1 (" in said
    assert "data.xlsx is a workbook of the sheets 'Info', 'Data', 'Other', 'Hidden': 'Data' was read" in said
    assert "column names in row 2 of the sheet" in said and "formulas without values" in said
    rejected = list(csv.reader((tmp_path / "out" / "rejected_rows.csv").read_text().splitlines()))
    assert [row[1:4] for row in rejected[1:]] == [["6", "hisco_1", ""], ["7", "hisco_1", "2024-08-31"]]
    rows, _ = rows_of(tmp_path / "data.xlsx", None, None, None, False, "Data", ["occ1"])
    assert rows[3] == ("smith", "83110", "100000") and rows[4] == ("baker", "7610", "TRUE")
    assert re.search(r"'2024-08-31'.*changed by a spreadsheet\?", told())
    assert "1 for training" in told("--sheet Other")
    assert "has no sheet 'X'; it has 'Info', 'Data', 'Other', 'Hidden'" in told("--sheet X")
    said = told("--input-col x")
    assert "no sheet has the column names 'x' in one of its first 20 rows; the sheets and their" in said
    assert "'Data' (row 2: 'occ1', 'hisco_1', 'note'); 'Other' (row 1: 'occ1', 'hisco_1', " in said
    assert "'Data' (row 2: 'occ1', 'hisco_1', 'note')." in told("--sheet Data --input-col x")
    said = told("--sheet Data --target-cols x")
    assert "'note'. Name it with --target-cols. Column names must be in" in said
    monkeypatch.setattr("histocc.data.binary.SHEET_ROWS", 2)
    other = table_format(str(tmp_path / "data.xlsx"), sheet="Other")
    assert other.names[2] == "clerk's note" and "line breaks in them" in other.notes[-1]
    assert "has a full sheet of 2 rows: perhaps the table is cut there" in other.notes
    whats = {"data.csv": "zip archive; unpack it", "word/document.xml": "Word document or pres"}
    for name, what in (whats | {"ppt/presentation.xml": "Word document or pres"}).items():
        with zipfile.ZipFile(tmp_path / "f.zip", "w") as parts:
            parts.writestr(name, "")
        assert f"is not a table but a {what}" in told(content=(tmp_path / "f.zip").read_bytes())


CHOICES = ["83110", "07761"]
LABEL_STUDIO = [  # JSON-MIN
    {"id": 1, "text": "smith and baker", "label": {"choices": CHOICES}},
    {"id": 2, "text": "vævér", "label": "07761"},
]
TASKS = [  # its JSON
    {"data": {"text": "smith and baker"}, "annotations": [{"result": [{"value": {"choices": CHOICES}}]}]}
]


@pytest.mark.parametrize(
    "content, texts",
    [
        (LABEL_STUDIO, {"smith and baker": "83110&07761", "vævér": "07761"}),
        (TASKS, {"smith and baker": "83110&07761"}),
    ],
    ids=["JSON-MIN", "Label Studio"],
)
def test_the_command_for_json_writes_a_table(content, texts, tmp_path):
    path = tmp_path / "my export.json"
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
    with pytest.raises(UserError) as refused:
        table_format(str(path))
    [line] = re.findall("python -c .*", str(refused.value))
    command = shlex.split(line)
    subprocess.run([sys.executable, *command[1:]], check=True, timeout=60)
    assert command[-1] == str(tmp_path / "my export.jsonl")
    label = "choices" if content is TASKS else "label"
    columns = (sum(read_columns(command[-1], [name]), []) for name in ("text", label))
    assert dict(zip(*columns)) == texts
    code, said = outcome(tmp_path, Path(command[-1]).read_bytes(), f"--input-col text --target-cols {label}")
    assert code == 2 and "add --code-separator '&'" in said


def test_json_lines_keep_what_is_written(tmp_path):
    """Names in later lines only are columns, too. A cell that holds records is their JSON."""
    lines = [
        '\ufeff{"a": "0123", "b": 1.50, "c": 90071992547409931, "d": null, "e": true}',
        "",
        '{"b": [1.0, null, "x"], "f": {"é": [1.5, [2]]}, "a ": "blank", "g": [[0, "x"]]}',
        "{}",
    ]
    (tmp_path / "a.txt").write_text("\n".join(lines), encoding="utf-8")
    assert table_format(str(tmp_path / "a.txt")).names == ["a", "b", "c", "d", "e", "f", "a", "g"]
    rows, _ = rows_of(tmp_path / "a.txt")
    assert rows == {
        1: ("0123", "1.50", "90071992547409931", "", "TRUE", "", "", ""),
        3: ("", "1.0&x", "", "", "", '{"é": [1.5, [2]]}', "blank", '[[0, "x"]]'),
        4: ("",) * 8,
    }


@pytest.mark.parametrize("kind", [".csv", ".xlsx", ".parquet"])
def test_repeated_names_are_chosen_by_number_and_stay_as_they_are(kind, tmp_path):
    header, rows = ["title", "", "title", "title.1", "", "title"], [["a", "", "b", "c", "", "d"]] * 2
    path = tmp_path / f"t{kind}"
    if kind == ".parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        columns = [pyarrow.array(column) for column in zip(*rows)]
        parquet.write_table(pyarrow.Table.from_arrays(columns, names=header), path)
    elif kind == ".xlsx":
        workbook(path, {"Info": [["x"]], "Data": [header, *rows]})
    else:
        write_csv(path, header, rows)
    how = None, None, False, None, ["title.2"]
    table = table_format(str(path), *how)
    assert table.names == header
    assert table.notes[-1].endswith("of one name; flags call the later ones 'title.2', 'title.3'")
    for name, cell in {"title": "a", "title.1": "c", "title.2": "b", "title.3": "d"}.items():
        assert list(rows_of(path, [name], *how)[0].values()) == [(cell,)] * 2


@pytest.mark.parametrize(
    "kind, package, extra",
    [
        (".xls", "python_calamine", "excel"),
        (".sav", "pyreadstat", "stata"),
        (".parquet", "pyarrow", "parquet"),
    ],
)
def test_packages_of_extras_are_named(kind, package, extra, tmp_path, monkeypatch):
    content = table_of(tmp_path, kind).read_bytes()
    monkeypatch.setitem(sys.modules, package, None)
    code, said = outcome(tmp_path, content, name=f"x{kind}")
    assert code == 2 and f"pip install 'histocc[{extra}]'" in said and len(said.splitlines()) == 1, said


@pytest.fixture(scope="module")
def coded(tmp_path_factory):
    """(rows of a coded CSV file, content of the other outputs by their ending)"""
    folder = tmp_path_factory.mktemp("coded")
    return train_and_code(Path(write_csv(folder / "in.csv", COLUMNS, ROWS)), ".csv"), {}


def train_and_code(source: Path, ending: str, processes: int = 1) -> dict:
    model, output = source.parent / "run", source.parent / f"coded{ending}"
    how = ["--dataset", source, "--save-path", model, "--prior", "none", "--device", "cpu"]
    assert "40 read" in run_here(finetune.main, *how)
    given = ["--model", model, "--input", source, "--output", output, "--processes", processes]
    run_here(predict.main, *given, "--system", "found", "--device", "cpu")
    assert table_format(str(output)).names[:4] == [*map(str.strip, COLUMNS), "found_1"]
    return rows_of(output)[0]


@pytest.mark.parametrize(
    "kind, ending, processes",
    [
        (".xlsx", ".xlsx", 1),
        (".dta", ".parquet", 2),
        pytest.param(".ods", ".parquet", 1, marks=pytest.mark.full),
        pytest.param(".sav", ".xlsx", 2, marks=pytest.mark.full),
    ],
)
def test_each_kind_of_table_is_trained_on_and_coded(kind, ending, processes, coded, tmp_path):
    rows = train_and_code(table_of(tmp_path, kind), ending, processes)
    assert list(rows.values()) == list(coded[0].values())
    assert [row[:3] for row in rows.values()] == [(text, str(code), lang) for text, code, lang in ROWS]
    content = (tmp_path / f"coded{ending}").read_bytes()
    assert coded[1].setdefault(ending, content) == content  # on any number of processes
