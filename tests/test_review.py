"""`python -m histocc.review`: sheets for a person, their decisions in the file, and how accurate it is."""

import csv
import io
import random

import numpy as np
import pytest
from helpers import run_inside

from histocc.review import __main__ as review
from histocc.review.__main__ import Quarter, drawn_texts, estimate
from histocc.review.sheet import CodedFile, CodedText, Codes, decided, escape_formula, unescape

HEADER = ["id", "occ1", "lang"]
CODES = ["hisco_1", "prob_1", "hisco_2", "prob_2", "hisco_3", "prob_3", "conf", "needs_review"]
TEXTS = [
    # text, language, rows, codes with probabilities, confidence: of topk, the best one's
    ("smith", "en", 10, [("83110", 0.55), ("61110", 0.25), ("01110", 0.05)]),
    ("Smith of  Ashby", "en", 4, [("83110", 0.9), ("61110", 0.05), ("41025", 0.01)]),
    ("clerk", "en", 6, [("39310", 0.7), ("01110", 0.2), ("83110", 0.02)]),
    ("clerk", "da", 3, [("61110", 0.4), ("39310", 0.3), ("83110", 0.1)]),
    ("=1+1", "en", 2, [("99999", 0.2), ("-1", 0.1), ("61110", 0.05)]),
    ('@home, "widow"', "en", 1, [("-1", 0.5), ("61110", 0.3), ("83110", 0.1)]),
    ("-", "en", 1, [("61110", 0.3), ("-1", 0.2), ("83110", 0.1)]),
    ("farmer", "en", 30, [("61110", 0.99), ("61115", 0.005), ("83110", 0.001)]),
]


def coded_rows():
    rows = []
    for text, language, times, codes in TEXTS:
        for i in range(times):
            shown = text.upper() if i % 3 == 2 else text
            cells = [cell for code, prob in codes for cell in (code, f"{prob:.6g}")]
            rows.append([shown, language, *cells, f"{codes[0][1]:.6g}", str(int(codes[0][1] < 0.5))])
    rows += [["", "en", *[""] * 7, "1"], ["  ", "en", *[""] * 7, "1"]]
    random.Random(1).shuffle(rows)
    return [[str(number), *row] for number, row in enumerate(rows)]


def write(path, rows, delimiter=",", encoding="utf-8"):
    out = io.StringIO()
    csv.writer(out, delimiter=delimiter, lineterminator="\n").writerows(rows)
    path.write_bytes(out.getvalue().encode(encoding))
    return path


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "coded.csv", [HEADER + CODES, *coded_rows()])
    return tmp_path


def run(*arguments, code=0):
    ended, said = run_inside(lambda argv: exit(review.main(argv)), *arguments)
    assert ended == code, said
    return said


def read(path, encoding="utf-8", delimiter=","):
    with open(path, encoding=encoding, newline="") as file:
        return list(csv.DictReader(file, delimiter=delimiter))


def make(folder, name="sheet.csv", *more):
    run("make", folder / "coded.csv", "--output", folder / name, "--overwrite", *more)
    return read(folder / name, "utf-8-sig")


def plain(row):
    return " ".join(unescape(row["text"]).split()).casefold(), row["language"]


def filled(folder, decisions, name="filled.csv", rows=None, **how):
    """The sheet with these decisions, by text and language."""
    rows = make(folder) if rows is None else rows
    for row in rows:
        row["decision"] = decisions.get(plain(row), row["decision"])
    return write(folder / name, [list(rows[0]), *(list(row.values()) for row in rows)], **how)


def apply(folder, *sheets, more=(), code=0):
    return run(
        "apply", *sheets, "--to", folder / "coded.csv", "--output", folder / "final.csv", *more, code=code
    )


class TestMake:
    def test_the_texts_with_the_most_mistakes_come_first(self, folder):
        rows = make(folder)
        doubts = {(text, language): times * (1 - codes[0][1]) for text, language, times, codes in TEXTS}
        order = sorted(doubts, key=lambda each: -doubts[each])
        assert list(map(plain, rows)) == [
            (" ".join(text.split()).casefold(), language) for text, language in order
        ]
        first = rows[0]
        assert (first["rows"], first["code_1"], first["code_3"]) == ("10", "83110", "01110")
        assert float(first["prob_1"]) == 0.55 and first["decision"] == ""
        assert len(make(folder, "two.csv", "--rows", 2)) == 2

    def test_no_cell_is_a_formula_and_all_come_back(self, folder):
        raw = (folder / "coded.csv").read_bytes()
        rows = make(folder, "sheet.csv", "--bom")
        assert (folder / "sheet.csv").read_bytes().startswith("\ufefftext".encode())
        for row in rows:
            for name in ("text", "language", "decision", "id"):
                assert row[name][:1] not in ("=", "+", "-", "@"), row
        assert {unescape(row["text"]) for row in rows} >= {"=1+1", "-", '@home, "widow"'}
        for cell in ("=x", "'=x", "''", "+1a", "-", "a'b", "-1", "12", "@", "'", ""):
            assert unescape(escape_formula(cell)) == cell
        assert escape_formula("-1") == "-1" and (folder / "coded.csv").read_bytes() == raw

    def test_words_of_codes(self, folder):
        write(
            folder / "words.csv",
            [["code", "description"], ["83110", "Blacksmith"], ["61110", "=Farmer"], ["1110", "Chemist"]],
        )
        rows = make(folder, "words_sheet.csv", "--descriptions", folder / "words.csv")
        assert rows[0]["words_1"] == "Blacksmith" and rows[0]["words_2"] == "'=Farmer"
        assert rows[0]["words_3"] == "Chemist"  # a code that has lost its zero in that table

    def test_titles_and_classes_are_those_of_the_codes(self, folder):
        """In a file that predict has written with titles: on the sheet, and of what was decided."""
        names = [f"{name}_{i}" for i in (1, 2, 3) for name in ("hisco", "prob", "title", "hisclass")]
        rows = [["smith", "83110", "0.5", "Blacksmith, General", "7", "61110", "0.2", "x", "8", *[""] * 4]]
        coded = write(
            folder / "titled.csv", [["occ1", *names, "conf", "needs_review"], [*rows[0], "0.5", "1"]]
        )
        run("make", coded, "--output", folder / "sheet.csv")
        [row] = read(folder / "sheet.csv")
        assert row["words_1"] == "Blacksmith, General"
        row["decision"] = "01110"
        write(folder / "done.csv", [list(row), list(row.values())])
        run("apply", folder / "done.csv", "--to", coded, "--output", folder / "final.csv", "--key", "hisco")
        [row] = read(folder / "final.csv")
        assert [row[name] for name in names] == ["01110", "", "Chemist, General", "2", *[""] * 8]

    def test_a_sample_draws_rows_and_as_many_from_each_quarter(self, folder):
        rows = make(folder, "sample.csv", "--sample", "--rows", 40)
        assert sum(int(row["drawn"]) for row in rows) == 40 and len(rows) <= 8
        by_quarter = {}
        for row in rows:
            by_quarter.setdefault(row["quarter"], []).append(row)
        assert all(len({row["quarter_rows"] for row in each}) == 1 for each in by_quarter.values())
        assert sum(int(each[0]["quarter_rows"]) for each in by_quarter.values()) == 57
        again = make(folder, "again.csv", "--sample", "--rows", 40)
        other = make(folder, "other.csv", "--sample", "--rows", 40, "--seed", 2)
        assert rows == again and rows != other


class TestApply:
    DECISIONS = {
        ("smith", "en"): "2",
        ("clerk", "en"): "41025",
        ("clerk", "da"): "none",
        ("=1+1", "en"): "skip",
        ("-", "en"): "2 & 41025",
    }

    def test_decisions_are_in_all_rows_of_their_texts(self, folder):
        before = (folder / "coded.csv").read_bytes()
        said = apply(folder, filled(folder, self.DECISIONS), more=["--by", "Ann"])
        assert (folder / "coded.csv").read_bytes() == before
        rows, coded = read(folder / "final.csv"), read(folder / "coded.csv")
        assert [row["id"] for row in rows] == [row["id"] for row in coded]
        expected = {
            ("smith", "en"): ["61110", "", ""],
            ("clerk", "en"): ["41025", "", ""],
            ("clerk", "da"): ["", "", ""],
            ("-", "en"): ["-1", "41025", ""],
        }
        for row, old in zip(rows, coded):
            codes = expected.get((row["occ1"].casefold(), row["lang"]))
            if codes is None:
                assert {**old, "decided_by": "model"} == row
                continue
            assert [row[f"hisco_{i}"] for i in (1, 2, 3)] == codes and row["decided_by"] == "Ann"
            assert row["prob_1"] == row["conf"] == "" and row["needs_review"] == "0"
        assert "4 texts decided, in 20 of 59 rows, 20 of which get other codes; 1 skipped, 3 without" in said

    @pytest.mark.parametrize(
        "change",
        [
            lambda rows, draw: draw.shuffle(rows),
            lambda rows, draw: rows.extend(rows[:3]),
            lambda rows, draw: [row.update(text="'" + row["text"].lower()) for row in rows],
            lambda rows, draw: [row.update(prob_1="0,5", rows="") for row in rows],
            lambda rows, draw: [row.update(decision=f"  {row['decision']} ") for row in rows],
            lambda rows, draw: [row.pop("code_3") for row in rows],
        ],
        ids=["sorted", "filled twice", "edited", "other numbers", "blanks", "without a column"],
    )
    @pytest.mark.parametrize(
        "how", [{}, {"delimiter": ";"}, {"encoding": "utf-8-sig"}, {"encoding": "utf-16"}]
    )
    def test_sheets_that_went_through_a_spreadsheet(self, folder, change, how):
        apply(folder, filled(folder, self.DECISIONS))
        expected = (folder / "final.csv").read_bytes()
        rows = make(folder, "again.csv")
        for row in rows:
            row["decision"] = self.DECISIONS.get(plain(row), "")
        change(rows, random.Random(2))
        apply(folder, filled(folder, {}, "edited.csv", rows, **how), more=["--overwrite"])
        assert (folder / "final.csv").read_bytes() == expected

    def test_zeros_that_a_spreadsheet_takes_come_back(self, folder):
        apply(folder, filled(folder, {("smith", "en"): "1110", ("clerk", "en"): "41025.0"}))
        codes = {
            row["occ1"].casefold(): row["hisco_1"]
            for row in read(folder / "final.csv")
            if row["lang"] == "en"
        }
        assert (codes["smith"], codes["clerk"]) == ("01110", "41025")

    def test_a_second_round_keeps_the_first(self, folder):
        apply(folder, filled(folder, {("smith", "en"): "2"}))
        (folder / "first.csv").write_bytes((folder / "final.csv").read_bytes())
        run("make", folder / "first.csv", "--output", folder / "second.csv")
        rows = read(folder / "second.csv")
        assert len(rows) == 7 and ("smith", "en") not in map(plain, rows)
        sheet = filled(folder, {("clerk", "da"): "3"}, "second_filled.csv", rows)
        run("apply", sheet, "--to", folder / "first.csv", "--output", folder / "last.csv", "--by", "Bo")
        found = {(row["occ1"].casefold(), row["lang"]): row for row in read(folder / "last.csv")}
        assert (found["smith", "en"]["hisco_1"], found["smith", "en"]["decided_by"]) == ("61110", "person")
        assert (found["clerk", "da"]["hisco_1"], found["clerk", "da"]["decided_by"]) == ("83110", "Bo")
        apply(folder, folder / "filled.csv", sheet, more=["--overwrite"])  # both to the first file
        assert [row["hisco_1"] for row in read(folder / "final.csv")] == [
            row["hisco_1"] for row in read(folder / "last.csv")
        ]

    def test_other_decisions_of_the_same_text_are_said(self, folder):
        one = filled(folder, {("smith", "en"): "1"}, "one.csv")
        two = filled(folder, {("smith", "en"): "2"}, "two.csv")
        said = apply(folder, one, two)
        assert f"Note: {two}, line 2: decides otherwise than {one}, line 2; the later one counts" in said
        assert {row["hisco_1"] for row in read(folder / "final.csv") if row["occ1"] == "smith"} == {"61110"}

    def test_what_confirms_the_model_is_no_other_code(self, folder):
        said = apply(folder, filled(folder, {("smith", "en"): "1", ("farmer", "en"): "2"}))
        assert "2 texts decided, in 40 of 59 rows, 30 of which get other codes" in said

    def test_decisions_of_several_codes_are_read_back(self, folder):
        apply(folder, filled(folder, {("smith", "en"): "1 & 2"}))
        run("make", folder / "final.csv", "--output", folder / "next.csv")
        assert ("smith", "en") not in map(plain, read(folder / "next.csv"))
        run("make", folder / "final.csv", "--output", folder / "drawn.csv", "--sample", "--rows", 100)
        rows = read(folder / "drawn.csv")
        own = {("smith", "en"): "1&2"}
        sheet = filled(folder, {plain(row): own.get(plain(row), "1") for row in rows}, "drawn.csv", rows)
        said = run("report", sheet, "--to", folder / "final.csv")
        assert "final.csv: 100.0% of its rows with a text are right" in said

    def test_rows_that_end_early(self, folder):
        """Spreadsheets leave out empty cells at the end."""
        rows = [{**row, "note": ""} for row in make(folder)]
        lines = [
            list(rows[0]),
            *([*row.values()][:-1] for row in rows[:3]),
            *(list(row.values()) for row in rows[3:]),
        ]
        lines[1][-2] = "2"
        apply(folder, write(folder / "early.csv", [*lines, [""], []]))
        assert {row["hisco_1"] for row in read(folder / "final.csv") if row["occ1"] == "smith"} == {"61110"}

    def test_columns_of_ones_own_stay(self, folder):
        header = ["desc_1", "hisco_prefix", *HEADER, *CODES]
        rows = [["note", "my prefix", *row] for row in coded_rows()]
        write(folder / "coded.csv", [header, *rows])
        apply(folder, filled(folder, {("smith", "en"): "2"}))
        assert "words_1" not in read(folder / "sheet.csv")[0]
        for row in read(folder / "final.csv"):
            assert (row["desc_1"], row["hisco_prefix"]) == ("note", "my prefix")
        write(
            folder / "coded.csv", [["decided_by", *HEADER, *CODES], *(["me", *row] for row in coded_rows())]
        )
        said = run("make", folder / "coded.csv", "--output", folder / "x.csv", code=2)
        assert "has a column 'decided_by' of its own" in said

    @pytest.mark.parametrize("encoding", ["utf-16", "cp1252"])
    def test_training_data_that_nothing_can_be_added_to(self, folder, encoding):
        rows = [["occ1", "lang", "hisco_1"], ["sm\u00f8rhandler", "da", "41025"]]
        own = write(folder / "own.csv", rows, encoding=encoding)
        before = own.read_bytes()
        more = ["--training-data", own]
        said = apply(folder, filled(folder, {("smith", "en"): "1"}), more=more, code=2)
        assert (
            "is not in UTF-8" in said and own.read_bytes() == before and not (folder / "final.csv").exists()
        )

    def test_training_data_grow_by_each_text_once(self, folder):
        more = ["--training-data", folder / "more.csv", "--overwrite"]
        said = apply(folder, filled(folder, self.DECISIONS), more=more)
        assert "more.csv: 3 rows added" in said
        apply(folder, filled(folder, {**self.DECISIONS, ("farmer", "en"): "1"}), more=more)
        rows = read(folder / "more.csv")
        assert list(rows[0]) == ["occ1", "lang", "hisco_1", "hisco_2", "hisco_3"]
        found = sorted((row["occ1"].casefold(), row["hisco_1"], row["hisco_2"]) for row in rows)
        assert found == sorted(
            [("smith", "61110", ""), ("clerk", "41025", ""), ("-", "-1", "41025"), ("farmer", "61110", "")]
        )

    def test_training_data_of_ones_own_keep_their_columns(self, folder):
        write(folder / "own.csv", [["lang", "note", "occ1", "hisco_1"], ["en", "x", "SMITH", "83110"]])
        said = apply(folder, filled(folder, self.DECISIONS), more=["--training-data", folder / "own.csv"])
        assert "1 rows added; 1 texts are there already; 1 have more codes than it has columns for" in said
        assert (
            folder / "own.csv"
        ).read_text() == "lang,note,occ1,hisco_1\nen,x,SMITH,83110\nen,,clerk,41025\n"

    @pytest.mark.parametrize(
        "decision, message",
        [
            ("9", "line 2: '9' is no code of the key"),
            ("4", "line 2: there is no code 4 for this text; it has 3"),
            ("83111x", "line 2: '83111x' is no code of the key"),
            ("1 2 3 41025", "line 2: 4 codes, and the file has room for 3"),
            ("maybe", "line 2: 'maybe' is no code of the key"),
        ],
    )
    def test_what_is_no_decision_is_refused_with_its_line(self, folder, decision, message):
        said = apply(folder, filled(folder, {("smith", "en"): decision}), code=2)
        assert message in said and not (folder / "final.csv").exists()

    def test_a_sheet_of_another_file(self, folder):
        sheet = filled(folder, self.DECISIONS)
        rows = [row[:3] + ["99999", *row[4:]] if row[1] == "smith" else row for row in coded_rows()]
        write(folder / "coded.csv", [HEADER + CODES, *rows])
        said = apply(folder, sheet, code=2)
        assert "1 of its 8 lines (the first is line 2) are about texts that" in said
        assert "it is a sheet of another coded file" in said

    def test_a_sheet_that_was_sorted_without_all_columns(self, folder):
        rows = make(folder)
        texts = [row["text"] for row in rows]
        for row, text in zip(rows, texts[1:] + texts[:1]):
            row["text"] = text
        said = apply(folder, filled(folder, {}, "torn.csv", rows), code=2)
        assert "was the sheet sorted without all its columns?" in said

    @pytest.mark.parametrize(
        "arguments, message",
        [
            (["make", "coded.csv"], "review make needs --output"),
            (["apply", "filled.csv", "--output", "x.csv"], "review apply needs --to"),
            (["make", "coded.csv", "--output", "x.csv", "--to", "y"], "--to is not for review make"),
            (["make", "coded.csv", "--output", "coded.csv", "--overwrite"], "coded.csv is an input"),
            (["make", "coded.csv", "--output", "filled.csv"], "filled.csv exists; --overwrite replaces it"),
            (["make", "filled.csv", "--output", "x.csv"], "is no coded file: it has no column 'conf'"),
            (["make", "coded.csv", "--output", "x.csv", "--column", "text"], "has no column 'text'"),
            (["apply", "coded.csv", "--to", "coded.csv", "--output", "x.csv"], "has no column 'decision'"),
            (
                [
                    "apply",
                    "filled.csv",
                    "--to",
                    "coded.csv",
                    "--output",
                    "x.csv",
                    "--training-data",
                    "coded.csv",
                ],
                "coded.csv is the coded file",
            ),
            (
                ["apply", "filled.csv", "--to", "coded.csv", "--output", "x.csv", "--by", "model"],
                "is no name of",
            ),
            (["apply", "filled.csv", "--to", "gone.csv", "--output", "x.csv"], "gone.csv"),
            (["report", "filled.csv", "--to", "coded.csv"], "its texts were chosen, not drawn"),
        ],
    )
    def test_mistakes(self, folder, monkeypatch, arguments, message):
        filled(folder, self.DECISIONS)
        monkeypatch.chdir(folder)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert message in run(*arguments, code=2)
        assert before == {path.name: path.read_bytes() for path in folder.iterdir()}

    def test_folders_that_are_not_there(self, folder):
        sheet = filled(folder, {("smith", "en"): "1"})
        nowhere = folder / "nowhere" / "x.csv"
        for arguments in (
            ["make", folder / "coded.csv", "--output", nowhere],
            [
                "apply",
                sheet,
                "--to",
                folder / "coded.csv",
                "--output",
                folder / "y.csv",
                "--training-data",
                nowhere,
            ],
        ):
            assert "there is no folder" in run(*arguments, code=2) and not (folder / "y.csv").exists()

    def test_codes_of_another_system_need_a_key(self, folder):
        rows = [[*HEADER, *[name.replace("hisco", "occ1950") for name in CODES]], *coded_rows()]
        write(folder / "coded.csv", rows)
        sheet = filled(folder, {("smith", "en"): "7"})
        assert "--key names the codes of occ1950 that may be written" in apply(folder, sheet, code=2)
        write(folder / "key.csv", [["system_code", "code"], ["7", "0"], ["83110", "1"]])
        apply(folder, sheet, more=["--key", folder / "key.csv"])
        assert {row["occ1950_1"] for row in read(folder / "final.csv") if row["occ1"] == "smith"} == {"7"}


class TestDecisions:
    def test_what_may_be_written(self):
        text = CodedText("smith", "en", 1, 0.0, ["83110", "3", "61110"])
        codes = Codes(["83110", "61110", "3", "01110"])
        for cell, expected in (
            ("1", ("83110",)),
            ("3", ("61110",)),
            ("code 3", ("3",)),
            ("2.0", ("3",)),
            ("1&3", ("83110", "61110")),
            ("1, 1110", ("83110", "01110")),
            ("1 1", ("83110",)),
            ("NONE", ()),
            ("Skip", None),
        ):
            assert decided(cell, text, codes, 3) == expected, cell
        for cell in ("&", "/", "code"):
            with pytest.raises(ValueError):
                decided(cell, text, Codes(["83110", "000"]), 3)

    def test_codes_that_hold_separators(self):
        text = CodedText("smith", "en", 1, 0.0, ["4,5,6", "1,2,3", "7,8,9"])
        codes = Codes(["1,2,3", "4,5,6", "7,8,9", "1,2"])
        for cell, expected in (
            ("1,2,3", ("1,2,3",)),
            ("1,2", ("1,2",)),
            ("1 & 7,8,9", ("4,5,6", "7,8,9")),
            ("code 1,2", ("1,2",)),
            ("2,3", ("1,2,3", "7,8,9")),
        ):
            assert decided(cell, text, codes, 3) == expected, cell


class TestReport:
    def test_the_interval_covers_the_truth_as_often_as_it_says(self):
        """Of files whose truth is known, over many draws."""
        draw, hits, widths = np.random.default_rng(7), 0, []
        texts, right = [], []
        for i in range(400):
            conf = float(draw.random())
            rows = int(draw.integers(1, 30))
            texts.append(CodedText(f"text {i}", "en", rows, rows * (1 - conf), ["83110"]))
            right.append(draw.random() < conf)
        is_right = {text.id: each for text, each in zip(texts, right)}
        true = sum(t.rows * r for t, r in zip(texts, right)) / sum(t.rows for t in texts)
        for seed in range(200):
            quarters = {}
            for each in drawn_texts(texts, 80, seed):
                rows, drawn, good = quarters.get(each.quarter, (each.quarter_rows, 0, 0))
                quarters[each.quarter] = rows, drawn + each.times, good + each.times * is_right[each.text.id]
            _, low, high = estimate([Quarter(number, *values) for number, values in quarters.items()])
            hits += low <= true <= high
            widths.append(high - low)
        assert 0.90 <= hits / 200 <= 0.995 and np.mean(widths) < 0.2

    def test_by_the_commands(self, folder):
        """Smiths and Danish clerks are wrong; the smiths are put right by a sheet, and the drawn ones, which
        are decided as well, count as the model had them.
        """
        truth = {("smith", "en"): "2", ("clerk", "da"): "2"}
        rows = make(folder, "sample.csv", "--sample", "--rows", 200)
        sample = filled(folder, {plain(row): truth.get(plain(row), "1") for row in rows}, "drawn.csv", rows)
        assert len(rows) == len(TEXTS)  # each was drawn
        said = run("report", sample, "--to", folder / "coded.csv")
        accuracy = float(said.partition("coded.csv: ")[2].partition("%")[0])
        assert abs(accuracy - 100 * 44 / 57) < 6, said
        assert "quarter 1 (least sure)" in said and "The model itself expects 79.6%" in said
        apply(folder, filled(folder, {("smith", "en"): "2"}), sample)
        final = read(folder / "final.csv")
        by = {(row["occ1"].casefold(), row["lang"]): row["decided_by"] for row in final}
        assert (
            by["smith", "en"] == "person"
            and by["farmer", "en"] == "person (drawn)"
            and by["", "en"] == "model"
        )
        said = run("report", sample, "--to", folder / "coded.csv", "--now", folder / "final.csv")
        now = float(said.partition("final.csv: ")[2].partition("%")[0])
        assert abs(now - 100 * 54 / 57) < 4, said
        said = run("report", sample, "--to", folder / "coded.csv", "--now", folder / "words.csv", code=2)
        assert "words.csv" in said

    def test_drawn_texts_are_known_as_such_without_their_columns(self, folder):
        rows = make(folder, "sample.csv", "--sample", "--rows", 200)
        whole = filled(folder, {plain(row): "2" for row in rows}, "whole.csv", rows)
        short = write(folder / "short.csv", [["decision", "id"], *(["2", row["id"]] for row in rows)])
        apply(folder, short)
        assert {row["decided_by"] for row in read(folder / "final.csv")} == {"person (drawn)", "model"}
        for sheets in ([short], [filled(folder, {("smith", "en"): "skip"}), whole]):
            apply(folder, *sheets, more=["--overwrite"])
            said = run("report", whole, "--to", folder / "coded.csv", "--now", folder / "final.csv")
            assert "final.csv: 0.0% of its rows" in said
        assert "chosen, not drawn" in run("report", short, "--to", folder / "coded.csv", code=2)
        rows = [{name: cell for name, cell in row.items() if name != "quarter"} for row in rows]
        torn = filled(folder, {}, "torn.csv", rows)
        assert "lacks quarter" in run("report", torn, "--to", folder / "coded.csv", code=2)

    def test_codes_that_are_one_answer_count_together(self, folder):
        """Of the greedy decoder: conf is not the first code's probability."""
        rows = [
            [*row[:-2], f"{float(row[4] or 0) / 2:.6g}" if row[4] else "", row[-1]] for row in coded_rows()
        ]
        path = write(folder / "sets.csv", [HEADER + CODES, *rows])
        file = CodedFile(str(path))
        assert not file.alternatives and CodedFile(str(folder / "coded.csv")).alternatives
        text = next(iter(file.texts.values()))
        assert file.answer(text.codes, "") == text.codes and len(text.codes) == 3
