"""Columns of a table, files of codes and of words."""

import pytest
from helpers import write_csv
from preparing import HEADER, prepare

from histocc.data.config import columns_of
from histocc.data.rows import code_of_cell, read_key, read_words
from histocc.formatter import make_formatter
from histocc.job.config import finetune_parser, train_mixer_parser
from histocc.runtime.errors import UserError


def written(tmp_path, text: str) -> str:
    (tmp_path / "key.csv").write_text(text, encoding="utf-8")
    return str(tmp_path / "key.csv")


def test_key_file(tmp_path):
    for text in (
        "system_code,code\n-3,0\n01110,1\n61110,2\n",
        'en_hisco_text,hisco,code\nempty, ,NA\nx,01110,1\n"y, z",61110,2\nw,-3,0\n',
    ):
        assert read_key(written(tmp_path, text)) == ["-3", "01110", "61110"]


@pytest.mark.parametrize(
    "text, words",
    [
        ("hisco\n61110\n", "'code' and 'system_code'"),
        ("code,x\n0,61110\n", "'code' and 'system_code'"),
        ("system_code,code\n", "holds no code"),
        ("system_code,code\na,0\nb,2\n", "1 is missing"),
        ("system_code,code\na,0\nb,0\n", "each once"),
        ("system_code,code\na,x\n", "0 is missing"),
        ("system_code,code\na,-1\n", "0 is missing"),
        ("code,system_code\n0,61110\n1\n2,83110\n", "line 3: 1 cells"),
        ("system_code,code\n61110,0\n83110,1\n61110,2\n", "code '61110' is listed 2 times"),
    ],
)
def test_key_file_with_faults(tmp_path, text, words):
    with pytest.raises(UserError, match=f"key.csv.*{words}"):
        read_key(written(tmp_path, text))


def test_word_file(tmp_path):
    assert read_words(written(tmp_path, "freq;word\n3;og\n1;NA\n")) == {"og": 3, "NA": 1}
    for text in ("word,freq\n", "word,freq\na,x\n", "word,freq\n,3\n", "word,freq\na,1.5\n", "a,b\n1,2\n"):
        with pytest.raises(UserError, match="key.csv"):
            read_words(written(tmp_path, text))


def test_a_cell_holds_the_code_that_it_would_in_training_data():
    hisco = make_formatter("hisco", ["hisco_1"])
    cells = {"1110": "01110", "8-31.10": "83110", " 61110.0 ": "61110", "NA": "", "": "", " ": "", ".": ""}
    assert {cell: code_of_cell(cell, hisco) for cell in cells} == cells
    assert code_of_cell("NA", make_formatter("gpf", ["a"]), {"NA"}) == "NA"  # the key has it


HISCO = "--formatter hisco --target-cols hisco_1 hisco_2"


@pytest.mark.parametrize(
    "header, flags, expected, note",
    [
        ("occ1,lang,hisco_1,hisco_2", "", ("hisco", 2, "unk", "lang"), f"{HISCO} --language-col lang"),
        ("occ1,lang,hisco_1,hisco_2", "--language da", ("hisco", 2, "da", None), HISCO),
        ("occ1,l,hisco_1,hisco_2", "--language-col l", ("hisco", 2, "unk", "l"), HISCO),
        ("lang,hisco_1,hisco_2", "--input-col lang", ("hisco", 2, "unk", None), HISCO),
        ("occ1,OCC1950_1", "", ("occ1950", 1, "unk", None), "--formatter occ1950 --target-cols OCC1950_1"),
        ("occ1,lang,hisco_1,x", "--target-cols x", ("gpf", 1, "unk", None), ""),
        ("occ1,lang,hisco_1,hisco_2", "--formatter gpf", ("gpf", 2, "unk", None), ""),
        ("occ1,lang,code1,hisco_1", "--key hisco", ("gpf", 1, "unk", None), ""),
        ("occ1,hisco_1,hisco_2,OCC1950_1", "--formatter occ1950", ("occ1950", 1, "unk", None), ""),
        ("occ1,code1,code2,hisco_1", "--key hisco --formatter hisco", ("hisco", 2, "unk", None), ""),
        ("occ1,code1,code2,code1x", "--formatter hisco", ("hisco", 2, "unk", None), ""),
    ],
)
def test_what_the_columns_of_a_file_mean(tmp_path, header, flags, expected, note):
    path = write_csv(tmp_path / "a.csv", header.split(","), [])
    args, problems = finetune_parser().parse_args([f"--dataset={path}", *flags.split()]), []
    asked = dict(vars(args))
    columns = columns_of(args, path, problems)
    meant = (columns.formatter, len(columns.target_cols), columns.language, columns.language_col)
    assert meant == expected and problems == [] and vars(args) == asked
    assert columns.note == (f"Columns: {note}, by their names in {path}" if note else "")


def test_columns_that_tell_no_system_or_two(tmp_path):
    parser = train_mixer_parser()
    for header, words in (
        ("occ1,x", "has none of the columns hisco_1, OCC1950_1; name yours with --target-cols"),
        ("occ1,hisco_1,OCC1950_1", "has columns of two systems, hisco_1 and OCC1950_1: choose one with"),
    ):
        path = write_csv(tmp_path / "a.csv", header.split(","), [])
        args = parser.parse_args(["--train-data", path, "--val-data", path, "--save-dir", str(tmp_path)])
        problems = []
        assert columns_of(args, path, problems, "hisco").target_cols == []
        assert len(problems) == 1 and problems[0].startswith(f"{path}: {words}")
    assert problems[0].endswith("--formatter hisco or --formatter occ1950")
    columns = columns_of(args, write_csv(tmp_path / "a.csv", ("icem_1", "icem_2"), []), [], "gpf", "icem")
    assert (columns.formatter, columns.target_cols) == ("gpf", ["icem_1", "icem_2"])


def test_words_of_the_training_texts(tmp_path, monkeypatch):
    val = write_csv(tmp_path / "v.csv", HEADER, [("unseen word", "61110", "")])
    content = 'occ1,hisco_1\nfarm hand,61110\n"hand, old\thand",61110\nFarm,61110\nrejected,\n'
    result = prepare(tmp_path, content, val_files=[val])
    words = {"hand": 2, "Farm": 1, "farm": 1, "hand,": 1, "old": 1}
    assert list(read_words(str(result.folder / "words.csv")).items()) == list(words.items())
    monkeypatch.setattr("histocc.data.rows.MAX_WORDS", 2)
    result = prepare(tmp_path, "occ1,hisco_1\na b c b c c,61110\n")
    assert result.table("words.csv") == [["word", "freq"], ["c", "3"], ["b", "2"]]
