"""What a data set holds: counted against plain Python, however the rows are spread over files, parts and
blocks.
"""

import csv
import json
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from helpers import examples, write_csv
from hypothesis import given
from hypothesis import strategies as st

from histocc import prepare
from histocc.data import prepare as prep
from histocc.data import report as data_report
from histocc.data.arrays import PreparedData
from histocc.data.config import PrepareSettings
from histocc.formatter import make_formatter

HEADER = ("occ1", "hisco_1", "hisco_2", "lang")
HISCO = make_formatter("hisco", ["hisco_1", "hisco_2"])
TEXTS = ["farmer", "Farmer", "old  farmer", "old farmer", "smith", "SMITH", "baker of bread", "x" * 40]
CODES = ["61110", "83110", "77610"], ["", "61110", "83110"]
ROW = st.tuples(*map(st.sampled_from, (TEXTS, *CODES, ["en", "da"])))
ROWS = st.lists(ROW, min_size=1, max_size=40)


def same(text: str) -> str:
    return " ".join(text.casefold().split())


@examples(60)
@given(ROWS, ROWS, st.sampled_from([1, 3, 1 << 22]), st.sampled_from([2, 5, 1 << 18]))
def test_counts_are_those_of_plain_python(train, val, bucket, block):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_report, "_BUCKET", bucket)
        patch.setattr(data_report, "_BLOCK", block)
        parts = {"train": train, "val": val}
        files = [write_csv(Path(folder) / f"{name}.csv", HEADER, rows) for name, rows in parts.items()]
        columns = HISCO.target_cols
        settings_ = PrepareSettings(files[:1], HISCO.to_dict(), columns, files[1:], language_col="lang")
        data = PreparedData.open(prep.prepare(settings_, folder, lambda *_: None))
        with open(Path(data.folder) / "conflicts.csv", encoding="utf-8", newline="") as file:
            conflicts = list(csv.DictReader(file))
    rows = [
        (same(text), lang, frozenset(code for code in (first, second) if code))
        for text, first, second, lang in (*train, *val)
    ]
    report = data.report
    assert report["distinct_texts"] == len({text for text, *_ in rows})
    assert report["duplicates"] == len(rows) - len(set(rows))
    assert report["languages"] == Counter(lang for _, lang, _ in rows)
    assert report["codes_per_row"] == Counter(str(len(codes)) for *_, codes in rows)
    counts = Counter(code for *_, codes in rows for code in codes)
    assert report["rare_codes"] == {code: n for code, n in counts.items() if n < data_report.RARE}
    seen = {same(text) for text, *_ in train}
    assert report["val_rows_seen_in_training"] == sum(same(text) in seen for text, *_ in val)
    lengths = np.sort([len(text) for text, *_ in (*train, *val)])
    length = report["length"]
    assert length["max"] == lengths[-1] and length["mean"] == round(float(lengths.mean()), 2)
    for share in data_report.PERCENTILES:
        assert length[f"p{share}"] == lengths[-(-len(rows) * share // 100) - 1]

    labels = defaultdict(Counter)
    for text, lang, codes in rows:
        labels[text, lang][codes] += 1
    expected = {key: found for key, found in labels.items() if len(found) > 1}
    assert report["conflicts"] == len(expected)
    listed = defaultdict(Counter)
    for line in conflicts:
        listed[same(line["text"]), line["language"]][frozenset(line["codes"].split())] += int(line["rows"])
        first = (*train, *val)[
            int(line["line"]) - 2 + (len(train) if line["file"].endswith("val.csv") else 0)
        ]
        assert same(first[0]) == same(line["text"]) and set(line["codes"].split()) == set(first[1:3]) - {""}
    assert listed == expected


FLAGS = ["--formatter", "hisco", "--target-cols", "hisco_1", "hisco_2", "--language-col", "lang"]


def test_the_command_shows_and_writes_what_a_file_holds(tmp_path, capsys):
    rows = [("farmer", "61110", "", "en"), ("farmer", "83110", "", "en"), ("", "61110", "", "en")]
    first = write_csv(tmp_path / "a.csv", HEADER, rows)
    rows = [("da", "", "61110", "bonde"), ("da", "", "61110", "bonde")]
    second = write_csv(tmp_path / "b.csv", HEADER[::-1], rows, delimiter=";")
    out = tmp_path / "out"
    command = [first, second, *FLAGS, "--share-val", "0", "--save-path", str(out)]
    assert prepare.main(command) == 0
    shown = capsys.readouterr().out
    for words in (
        "Rows: 5 read, 4 for training",
        "Texts: 2 distinct; 1 rows repeat",
        "2 used, 2 of them in fewer than 10 rows",
        "rows with 1 code: 4",
        "Languages: en 2, da 2",
        "texts that are coded differently in different rows: 1",
        "1 × empty text (a.csv line 4)",
    ):
        assert words in shown
    report = json.loads((out / "data_report.json").read_text())
    names = ("rows", "distinct_texts", "rejected_rows", "duplicates", "conflicts")
    assert [report[name] for name in names] == [5, 2, 1, 1, 1] and report["languages"] == {"en": 2, "da": 2}
    assert [file["delimiter"] for file in report["files"]] == [",", ";"]
    assert report["problems"][0]["kind"] == "empty text" and report["problems"][0]["first"][0]["line"] == 4
    conflicts = (out / "conflicts.csv").read_text().splitlines()
    assert conflicts[:2] == ["text,language,codes,rows,file,line", f"farmer,en,61110,1,{first},2"]
    assert len(conflicts) == 3 and prepare.main(command) == 0
    assert "Prepared data: found" in capsys.readouterr().out


def test_unusable_data_are_shown_all_the_same(tmp_path, capsys):
    rows = [("farmer", "61110"), ("smith", "8x110"), ("smith", "")]
    path, out = write_csv(tmp_path / "a.csv", HEADER[:2], rows), tmp_path / "out"
    assert prepare.main([path, *FLAGS[:4], "--save-path", str(out)]) == 2
    shown = capsys.readouterr()
    assert "Rows: 3 read" in shown.out and "1 rows hold a code that does not fit" in shown.err
    assert "--drop-bad-labels" in shown.err and not (out / "prepared").exists()
    report = json.loads((out / "data_report.json").read_text())
    kinds = [(problem["kind"], problem["action"]) for problem in report["problems"]]
    assert kinds == [("code does not fit", "error"), ("first code missing", "rejected")]
