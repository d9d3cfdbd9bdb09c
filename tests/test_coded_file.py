"""A file that is being coded: its parts, and what is written of cells and columns that are out of the ordinary."""

import csv
import io

import pytest

from histocc import tables
from histocc.coded_file import csv_text
from histocc.table_files import read_chunks

ROWS = [["a\rb", "", "c"], ["\r", 'q"', "1"], ["x\r\ny", "z", ""], ["plain", "1,2", ""]]


def test_a_lone_carriage_return_stays_inside_its_cell():
    assert list(csv.reader(io.StringIO(csv_text(ROWS).decode(), newline=""), strict=True)) == ROWS
    assert csv_text(ROWS).endswith(b'plain,"1,2",\n')


def test_it_stays_in_the_small_tables_too(tmp_path):
    path = str(tmp_path / "key.csv")
    tables.write_key(path, ["a\rb", "c"])
    assert tables.read_key(path) == ["a\rb", "c"]


def test_columns_of_parquet_whose_names_repeat_are_read_by_place(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet
    parquet.write_table(pyarrow.table([["1"], ["2"], ["smed"], ["4"]], names=["note", "note", "occ1", "other"]), tmp_path / "in.parquet")
    [chunk] = read_chunks(str(tmp_path / "in.parquet"), None)
    assert chunk.columns == [["1"], ["2"], ["smed"], ["4"]]
    [chunk] = read_chunks(str(tmp_path / "in.parquet"), ["occ1"])
    assert chunk.columns == [["smed"]]
