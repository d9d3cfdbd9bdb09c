"""A file that is being coded: its parts, and what is written of cells and columns that are out of the
ordinary.
"""

import csv
import io
import os

import pytest

from histocc.data.rows import csv_text, read_key, write_key
from histocc.data.tables import read_chunks
from histocc.predict.config import get_args_parser
from histocc.predict.output import CodedFile, Scan
from histocc.runtime.errors import UserError

ROWS = [["a\rb", "", "c"], ["\r", 'q"', "1"], ["x\r\ny", "z", ""], ["plain", "1,2", ""]]


def test_a_lone_carriage_return_stays_inside_its_cell(tmp_path):
    assert list(csv.reader(io.StringIO(csv_text(ROWS).decode(), newline=""), strict=True)) == ROWS
    assert csv_text(ROWS).endswith(b'plain,"1,2",\n')
    write_key(str(tmp_path / "key.csv"), ["a\rb", "c"])
    assert read_key(str(tmp_path / "key.csv")) == ["a\rb", "c"]


def test_columns_of_parquet_whose_names_repeat_are_read_by_place(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(
        pyarrow.table([["1"], ["2"], ["smed"], ["4"]], names=["note", "note", "occ1", "other"]),
        tmp_path / "in.parquet",
    )
    [chunk] = read_chunks(str(tmp_path / "in.parquet"), None)
    assert chunk.columns == [["1"], ["2"], ["smed"], ["4"]]
    [chunk] = read_chunks(str(tmp_path / "in.parquet"), ["occ1"])
    assert chunk.columns == [["smed"]]


@pytest.mark.parametrize(
    "content, texts",
    [
        ("occ1\nsmed\n\nkok\n", ["smed", "", "kok"]),
        ("occ1\r\n\r\nsmed", ["", "smed"]),
        ("occ1\nsmed\n\n", ["smed", ""]),
        ('occ1\n""\n\n"a"b\n\nx\n', ["", "", "", "x"]),
        ("occ1,lang\nsmed,da\n\nkok,da\n", ["smed", "kok"]),
    ],
)
def test_an_empty_line_of_a_single_column_is_an_empty_text(tmp_path, content, texts):
    (tmp_path / "in.csv").write_bytes(content.encode())
    chunks = list(read_chunks(str(tmp_path / "in.csv"), ["occ1"]))
    assert [text for chunk in chunks for text in chunk.columns[0]] == texts
    lines = content.splitlines()
    assert all(
        lines[line - 1].strip('"').partition(",")[0] == text
        for chunk in chunks
        for line, text in zip(chunk.lines, chunk.columns[0])
    )
    assert sum(len(chunk.faults) for chunk in chunks) == ('"a"b' in content)


def noted(**more) -> dict:
    return {"rows": 1, "unknown": 0, "languages": {}, "faults": []} | more


@pytest.fixture
def coded(tmp_path):
    file = CodedFile(str(tmp_path / "out.csv"), {"a": 1})
    os.mkdir(file.folder)
    return file


def test_a_folder_of_somebody_else_is_left_alone(coded):
    """Names alone are no proof: only a settings file as it was written makes the folder one of parts."""
    for name in ("thesis.csv", "000001.csv", "settings.json", "scan.json", "input"):
        other = coded.path(name)
        with open(other, "w") as file:
            file.write("mine")
        with pytest.raises(UserError, match=f"holds {name}, which is none of them"):
            coded.refuse_others()
        os.remove(other)
    coded.refuse_others()
    open(coded.path("settings.json.tmp99"), "w").close()  # of a process that was killed at its begin
    coded.refuse_others()
    assert coded.begin(overwrite=False) is False and os.listdir(coded.folder) == ["settings.json"]
    other = coded.path("thesis.csv")
    open(other, "w").close()
    coded.refuse_others()
    coded.clear()
    assert os.listdir(coded.folder) == ["thesis.csv"]


def test_a_part_is_that_of_its_number_and_its_settings(coded, tmp_path):
    coded.begin(overwrite=False)
    coded.write_part(0, [["smed"]], noted())
    coded.write_part(1, [["kok"]], noted())
    os.replace(coded.part(0), coded.path("x"))
    os.replace(coded.part(1), coded.part(0))
    os.replace(coded.path("x"), coded.part(1))
    assert not coded.is_done(0) and not coded.is_done(1)
    other = CodedFile(coded.output, {"k": 9})
    coded.write_part(0, [["smed"]], noted())
    assert coded.is_done(0) and not other.is_done(0)
    coded.write_part(1, [["kok"]], noted())
    with pytest.raises(UserError, match="its parts hold 2 rows, and the input 3"):
        coded.join(["occ1"], Scan(3, 2, 1, None, []), overwrite=False)
    assert not os.path.exists(coded.output)
    os.mkfifo(coded.path("scan.json"))
    with pytest.raises(UserError, match="scan.json: is a pipe"):
        coded.open_scan()


def test_what_is_missing_is_said(coded):
    coded.begin(overwrite=False)
    coded.write_part(0, [["smed"]], noted())
    coded.write_part(1, [["smed"]], noted())
    with open(coded.part(1), "r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"x")
    assert coded.is_done(0) and not coded.is_done(1)
    scan = Scan(2, 2, 1, None, [("smed", "da")])
    with pytest.raises(
        UserError, match="000001.part was there and is missing or damaged: the same command codes it again"
    ):
        coded.join(["occ1"], scan, overwrite=False)
    with pytest.raises(UserError, match="frequent0.json was there and is missing or damaged"):
        coded.frequent(scan)


def test_faults_and_languages_of_all_parts_are_put_together(coded):
    coded.write_part(0, [["smed"]], noted(unknown=5000, languages={"se": 10}, faults=[[3, "kind", "a\rb"]]))
    coded.write_part(1, [["kok"]], noted(unknown=1, languages={"se": 1}, faults=[[9, "kind", "c"]]))
    total, languages = coded.join(["occ1"], Scan(2, 2, 1, None, []), overwrite=False)
    assert (total["faults"], total["unknown"], total["rows"], languages) == (2, 5001, 2, {"se": 11})
    assert open(coded.output, newline="").read() == "occ1\nsmed\nkok\n"
    with open(coded.output + ".rejected.csv", newline="", encoding="utf-8") as file:
        assert list(csv.reader(file))[1:] == [["3", "kind", "a\rb"], ["9", "kind", "c"]]


def test_nothing_that_is_read_is_written_over(tmp_path):
    def problems(**more) -> list[str]:
        given = {
            "model": tmp_path / "run",
            "input": tmp_path / "in.csv",
            "output": tmp_path / "out.csv",
        } | more
        flags = [str(part) for name, value in given.items() for part in (f"--{name}", value)]
        return list(get_args_parser().parse_args([*flags, "--overwrite"]).problems())

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "best.bin").touch()
    os.symlink(tmp_path / "out.csv", tmp_path / "link.csv")
    assert problems() == []
    for arguments, what in [
        ({"input": tmp_path / "link.csv"}, "the input"),
        ({"input": tmp_path / "out.csv.rejected.csv"}, "the input"),
        ({"descriptions": tmp_path / "out.csv"}, "--descriptions"),
        ({"key": tmp_path / "out.csv.rejected.csv"}, "--key"),
        ({"output": tmp_path / "run" / "best.bin"}, "the model"),
        ({"model": tmp_path / "out.csv"}, "the model"),
    ]:
        (tmp_path / "out.csv").touch()
        [problem] = problems(**arguments)
        assert "inputs are never written to" in problem and what in problem
