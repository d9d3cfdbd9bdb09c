"""`python -m histocc.review`: sheets for a person, and their decisions in the file."""

import csv
import io
import itertools
import random
import re
import shlex
import subprocess
import sys

import pytest
from helpers import environment, run_here, wait_until

from histocc.data.rows import read_columns
from histocc.data.tables import table_format
from histocc.data.written import table_writer
from histocc.review import __main__ as review
from histocc.review.learn import Learner
from histocc.review.sheet import CodedFile, CodedText, Sheets, escape_formula, unescape
from histocc.runtime.files import file_lock

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
    return run_here(review.main, *arguments, code=code)


def read(path, encoding="utf-8-sig", delimiter=","):
    with open(path, encoding=encoding, newline="") as file:
        return list(csv.DictReader(file, delimiter=delimiter))


def make(folder, name="sheet.csv", *more):
    run("make", folder / "coded.csv", "--output", folder / name, "--overwrite", *more)
    return read(folder / name)


def plain(row):
    return " ".join(unescape(row["text"]).split()).casefold(), row["language"]


def filled(folder, decisions, name="filled.csv", rows=None, **how):
    """The sheet with these decisions, by text and language."""
    rows = make(folder) if rows is None else rows
    for row in rows:
        row["decision"] = decisions.get(plain(row), row["decision"])
    return write(folder / name, [list(rows[0]), *(list(row.values()) for row in rows)], **how)


def apply(folder, *sheets, more=(), code=0):
    to = ["--to", folder / "coded.csv", "--output", folder / "final.csv"]
    return run("apply", *sheets, *to, *more, code=code)


def final_codes(folder, name="final.csv"):
    """Codes by text and language, one for each text: all its rows have the same."""
    names, table = ("lang", "hisco_1", "hisco_2", "hisco_3"), read(folder / name)
    rows = {(row["occ1"].casefold(), *(row[each] for each in names)) for row in table}
    codes = {(text, language): [code for code in codes if code] for text, language, *codes in rows}
    assert len(codes) == len(rows)
    return codes


class TestMake:
    def test_the_texts_with_the_most_mistakes_come_first(self, folder):
        rows = make(folder)
        doubts = {(text, language): times * (1 - codes[0][1]) for text, language, times, codes in TEXTS}
        order = sorted(doubts, key=lambda text: -doubts[text])
        assert list(map(plain, rows)) == [(" ".join(text.split()).casefold(), lang) for text, lang in order]
        first = rows[0]
        assert (first["rows"], first["code_1"], first["code_3"]) == ("10", "83110", "01110")
        assert float(first["prob_1"]) == 0.55 and first["decision"] == ""
        assert len(make(folder, "two.csv", "--rows", 2)) == 2

    def test_no_cell_is_a_formula_and_all_come_back(self, folder):
        raw = (folder / "coded.csv").read_bytes()
        rows = make(folder)
        assert (folder / "sheet.csv").read_bytes().startswith("\ufefftext".encode())  # for Excel
        for row in rows:
            for name in ("text", "language", "decision", "id"):
                assert row[name][:1] not in ("=", "+", "-", "@"), row
        assert {unescape(row["text"]) for row in rows} >= {"=1+1", "-", '@home, "widow"'}
        for cell in ("=x", "'=x", "''", "+1a", "-", "a'b", "-1", "12", "@", "'", ""):
            assert unescape(escape_formula(cell)) == cell
        assert escape_formula("-1") == "-1" and (folder / "coded.csv").read_bytes() == raw

    def test_it_says_how_many_are_wrong_only_by_a_fitted_confidence(self, folder):
        """And ends with a command that works."""
        rows = [HEADER + CODES, *coded_rows()]
        unknown = "; how many of these are wrong is not known: conf is not"
        write(folder / "texts.csv", [row[:3] for row in rows])
        for mark in "01":
            marked = [[*row[:-1], mark if i else "conf_fitted", row[-1]] for i, row in enumerate(rows)]
            write(folder / f"{mark}.csv", marked)
        ends = {"0": f"{unknown} fitted", "coded": f"{unknown} known to be fitted", "texts": ""}
        ends["1"] = "; the model expects 12 of these and 12 of all to be wrong"
        for name, end in ends.items():
            sheet = folder / f"{name} sheet.csv"
            said = run("make", folder / f"{name}.csv", "--output", sheet, "--key", "hisco").splitlines()
            assert said[0] == f"{sheet}: 8 texts in 57 of 59 rows{end}"
            run(*shlex.split(said[-1])[2:])
            assert len(read(folder / f"{name}.final.csv")) == 59

    def test_probabilities_with_a_decimal_comma(self, folder):
        """As a spreadsheet of another language writes them; without their point they are refused."""
        rows = [HEADER + CODES, *coded_rows()]
        prob = [place for place, name in enumerate(rows[0]) if name.startswith("prob_") or name == "conf"]
        for number, changed in enumerate((lambda x: x.replace(".", ","), lambda x: x.replace("0.", "1"))):
            cells = [[changed(x) if i in prob else x for i, x in enumerate(row)] for row in rows[1:]]
            write(folder / f"{number}.csv", [rows[0], *cells], ";")
        make(folder, "points.csv")
        run("make", folder / "0.csv", "--output", folder / "commas.csv")
        texts = [[row["text"] for row in read(folder / f"{name}.csv")] for name in ("commas", "points")]
        assert texts[0] == texts[1]
        assert Learner([*CodedFile(str(folder / "0.csv")).texts.values()], []).model.values().any()
        cells = [["90.5%" if i in prob else x for i, x in enumerate(row)] for row in rows[1:]]
        write(folder / "words.csv", [rows[0], *cells])
        said = run("make", folder / "words.csv", "--output", folder / "x.csv", code=2)
        assert "words.csv: '90.5%' is not a probability" in said
        said = run("make", folder / "1.csv", "--output", folder / "x.csv", code=2)
        assert "1.csv: " in said and "is not a probability" in said

    def test_a_row_is_expected_wrong_as_often_as_its_weight_says(self, folder):
        header = ["occ1", "n", "hisco_1", "prob_1", "conf", "needs_review"]
        rows = [["smith", "3", "83110", *["0.5", "0.5", "1"]], ["clerk", "1", "39310", *["0.2", "0.2", "1"]]]
        path = write(folder / "weighed.csv", [header, *rows])
        file = CodedFile(str(path), asked=review.ReviewConfig(files=["x"], weight_col="n"))
        found = {text.text: (text.rows, text.doubt) for text in file.texts.values()}
        assert found == {"smith": (3, 1.5), "clerk": (1, 0.8)}

    def test_a_workbook_is_reviewed_in_a_workbook(self, folder):
        for package in ("python_calamine", "xlsxwriter"):
            pytest.importorskip(package)
        book, sheet = as_workbook(folder / "coded.csv", {"prob_1"}), folder / "sheet.xlsx"
        said = run("make", book, "--output", sheet).splitlines()
        names = table_format(str(sheet)).names
        rows = read_columns(str(sheet), names)
        rows[0][names.index("decision")] = "1110"
        as_workbook(write(folder / "sheet.csv", [names, *rows]), {"decision"})  # a number, as Excel keeps it
        assert "1 text decided" in run(*shlex.split(said[-1])[2:])
        found = read_columns(str(folder / "coded.final.xlsx"), ["hisco_1", "decided_by"])
        assert {code for code, by in found if by == "person"} == {"01110"}

    def test_titles_of_codes(self, folder):
        words = [["code", "description"], ["83110", "Blacksmith"], ["61110", "=Farmer"], ["1110", "Chemist"]]
        write(folder / "words.csv", words)
        first = make(folder, "words_sheet.csv", "--descriptions", folder / "words.csv")[0]
        # of the third code: it has lost its zero in that table
        assert [first[f"title_{i}"] for i in (1, 2, 3)] == ["Blacksmith", "'=Farmer", "Chemist"]

    def test_titles_and_classes_are_those_of_the_codes(self, folder):
        """In a file that predict has written with titles: on the sheet, and of what was decided."""
        names = [f"{name}_{i}" for i in (1, 2, 3) for name in ("hisco", "prob", "title", "hisclass")]
        cells = ["smith", "83110", "0.5", "Blacksmith, General", "7", "61110", "0.2", "x", "8", *[""] * 4]
        write(folder / "coded.csv", [["occ1", *names, "conf", "needs_review"], [*cells, "0.5", "1"]])
        [row] = make(folder)
        assert row["title_1"] == "Blacksmith, General"
        row["decision"] = "01110"
        write(folder / "done.csv", [list(row), list(row.values())])
        apply(folder, folder / "done.csv", more=["--key", "hisco"])
        [row] = read(folder / "final.csv")
        assert [row[name] for name in names] == ["01110", "", "Chemist, General", "2", *[""] * 8]

    def test_a_sample_draws_rows(self, folder):
        rows = make(folder, "sample.csv", "--sample", "--rows", 400)
        times = {plain(row): int(row["id"].partition("-")[0].removeprefix("s")) for row in rows}
        assert sum(times.values()) == 400
        assert 150 < times["farmer", "en"] < 270  # of 30 in 57 rows
        assert rows == make(folder, "again.csv", "--sample", "--rows", 400)
        assert rows != make(folder, "other.csv", "--sample", "--rows", 400, "--seed", 2)

    def test_what_the_page_has_saved_needs_no_key(self, folder):
        header = ["occ1", "hisco_1", "title_1", "conf", "needs_review", "decided_by"]
        rows = [["smith", "1110", "", "", "0", "Ann"], ["clerk", "39310", "", "0.4", "1", "guess"]]
        saved = write(folder / "saved.csv", [header, *rows])
        said = run("make", saved, "--output", folder / "drawn.csv", "--sample", "--rows", 20)
        drawn = read(folder / "drawn.csv")
        assert [row["code_1"] for row in drawn] == ["01110", "39310"] and "--key" not in said
        drawn = [row | {"decision": "1"} for row in drawn]
        write(folder / "drawn.csv", [[*drawn[0]], *([*row.values()] for row in drawn)])
        assert "saved.csv: 100.0 %" in run("report", folder / "drawn.csv", "--to", saved)


def as_workbook(path, numbers):
    header, *rows = csv.reader(io.StringIO(path.read_text(encoding="utf-8-sig")))
    with (
        open(path.with_suffix(".xlsx"), "wb") as file,
        table_writer(file, ".xlsx", header, numbers) as write_rows,
    ):
        write_rows(rows)
    return path.with_suffix(".xlsx")


class TestApply:
    DECISIONS = {
        ("smith", "en"): "2",
        ("clerk", "en"): "41025",
        ("clerk", "da"): "none",
        ("=1+1", "en"): "skip",
        ("-", "en"): "2 & 41025",
    }

    def test_workbooks_are_applied_like_csv(self, folder):
        for package in ("python_calamine", "xlsxwriter", "pyarrow"):
            pytest.importorskip(package)
        sheet = filled(folder, {("smith", "en"): "2", ("clerk", "en"): "41025"})
        apply(folder, sheet)
        expected = read(folder / "final.csv")
        sheet = as_workbook(sheet, {"decision"})
        coded = as_workbook(folder / "coded.csv", {"prob_1", "hisco_1"})
        to = ["--to", coded, "--sheet", "Sheet1", "--output"]
        run("apply", sheet, *to, folder / "final.csv", "--overwrite")
        run("apply", sheet, *to, folder / "final.xlsx")
        to = ["--to", folder / "coded.csv", "--output", folder / "final.parquet"]
        run("apply", folder / "filled.csv", *to)
        found = [read(folder / "final.csv")]
        for kind in ("xlsx", "parquet"):
            rows = read_columns(str(folder / f"final.{kind}"), list(expected[0]))
            found.append([dict(zip(expected[0], row)) for row in rows])
        for row in itertools.chain(expected, *found):
            row["hisco_1"], row["prob_1"] = (code and float(code) for code in (row["hisco_1"], row["prob_1"]))
            row |= {name: float(row[name] or 0) for name in ("prob_2", "prob_3", "conf", "needs_review")}
            row["occ1"] = row["occ1"].strip()
        assert found == [expected] * 3

    def test_a_sheet_is_named_of_the_table_or_of_the_decisions(self, folder):
        pytest.importorskip("python_calamine")
        xlsxwriter = pytest.importorskip("xlsxwriter")
        paths = {code: filled(folder, {("smith", "en"): code}, f"{code}.csv") for code in "12"}
        rows = {code: csv.reader(paths[code].open(encoding="utf-8-sig")) for code in "12"}
        rows["table"] = csv.reader((folder / "coded.csv").open())
        books = {"done.xlsx": {"Ann": "1", "Bo": "2"}, "coded.xlsx": {"x": "table", "y": ""}}
        for name, of_book in books.items():
            with xlsxwriter.Workbook(folder / name) as book:
                for sheet, what in {"notes": "", **of_book}.items():
                    page = book.add_worksheet(sheet)
                    for i, row in enumerate(rows.get(what, [["notes"]])):
                        page.write_row(i, 0, row)
        for table, sheet, read_of, found in (
            ("coded.csv", [], "Ann", "83110"),
            ("coded.csv", ["Bo"], "Bo", "61110"),
            ("coded.xlsx", ["Bo"], "Bo", "61110"),
            ("coded.xlsx", ["x"], "Ann", "83110"),
        ):
            to = ["--to", folder / table, "--output", folder / "final.csv", "--overwrite"]
            said = run("apply", folder / "done.xlsx", *to, *(["--sheet", *sheet] * len(sheet)))
            assert (
                f"done.xlsx: is a workbook of the sheets 'notes', 'Ann', 'Bo': '{read_of}' was read" in said
            )
            assert final_codes(folder)["smith", "en"] == [found], (table, sheet)
        said = run("apply", folder / "done.xlsx", *to, "--sheet", "z", code=2)
        assert "coded.xlsx: has no sheet 'z'" in said

    def test_a_file_in_a_code_page_that_is_named(self, folder):
        (folder / "page.csv").write_bytes("occ1\nkovář\nřezník\n".encode("cp1250"))
        given = [folder / "page.csv", "--key", "hisco", "--encoding", "cp1250"]
        said = run("make", *given, "--output", folder / "page sheet.csv")
        assert {row["text"] for row in read(folder / "page sheet.csv")} == {"kovář", "řezník"}
        assert "--encoding cp1250" in said  # of the command that applies the sheet

    def test_decisions_are_in_all_rows_of_their_texts(self, folder):
        before = (folder / "coded.csv").read_bytes()
        output = apply(folder, filled(folder, self.DECISIONS), more=["--by", "Ann"])
        assert (folder / "coded.csv").read_bytes() == before
        assert not any(text.is_given for text in CodedFile(str(folder / "coded.csv")).texts.values())
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
        assert "20 of 59 rows decided, 20 of these with other codes, 2 without a text; " in output
        assert "4 texts decided, 1 skipped, 3 without a decision" in output

    @pytest.mark.parametrize(
        "change, how",
        [
            (lambda rows: random.Random(2).shuffle(rows), {}),
            (lambda rows: rows.extend(rows[:3]), {"delimiter": ";"}),
            (lambda rows: [row.update(text="'" + row["text"].lower()) for row in rows], {}),
            (lambda rows: [row.update(prob_1="0,5", rows="") for row in rows], {"delimiter": ";"}),
            (
                lambda rows: [row.update(decision=f"  {row['decision']} ") for row in rows],
                {"encoding": "utf-16"},
            ),
            (lambda rows: [row.pop("code_3") for row in rows], {"encoding": "utf-8-sig"}),
        ],
        ids=["sorted", "filled twice", "edited", "other numbers", "blanks", "without a column"],
    )
    def test_sheets_that_went_through_a_spreadsheet(self, folder, change, how):
        apply(folder, filled(folder, self.DECISIONS))
        expected = (folder / "final.csv").read_bytes()
        rows = make(folder, "again.csv")
        for row in rows:
            row["decision"] = self.DECISIONS.get(plain(row), "")
        change(rows)
        apply(folder, filled(folder, {}, "edited.csv", rows, **how), more=["--overwrite"])
        assert (folder / "final.csv").read_bytes() == expected

    def test_a_second_round_keeps_the_first(self, folder):
        apply(folder, filled(folder, {("smith", "en"): "1 & 2"}))
        (folder / "first.csv").write_bytes((folder / "final.csv").read_bytes())
        run("make", folder / "first.csv", "--output", folder / "second.csv")
        rows = read(folder / "second.csv")
        assert len(rows) == 7 and ("smith", "en") not in map(plain, rows)
        sheet = filled(folder, {("clerk", "da"): "3"}, "second_filled.csv", rows)
        run("apply", sheet, "--to", folder / "first.csv", "--output", folder / "last.csv", "--by", "Bo")
        by = {(row["occ1"].casefold(), row["lang"]): row["decided_by"] for row in read(folder / "last.csv")}
        assert (by["smith", "en"], by["clerk", "da"]) == ("person", "Bo")
        codes = final_codes(folder, "last.csv")
        assert (codes["smith", "en"], codes["clerk", "da"]) == (["83110", "61110"], ["83110"])
        apply(folder, folder / "filled.csv", sheet, more=["--overwrite"])  # both to the first file
        assert final_codes(folder) == codes

    def test_a_decision_of_a_sheet_counts_more_than_a_known_text(self, folder):
        """Whether it is a number or a code, and whether the sheet was made with --known or without."""
        apply(folder, filled(folder, {("smith", "en"): "2", ("clerk", "en"): "41025"}), more=["--by", "Ann"])
        (folder / "first.csv").write_bytes((folder / "final.csv").read_bytes())
        known = ["--known", folder / "first.csv"]
        for more in ([], ["--sample"], ["--sample", *known]):
            sheet = filled(folder, {("smith", "en"): "1"}, rows=make(folder, "sheet.csv", *more))
            said = apply(folder, sheet, more=[*known, "--by", "Bo", "--overwrite"])
            by = {(row["occ1"], row["lang"]): row["decided_by"] for row in read(folder / "final.csv")}
            codes = final_codes(folder)
            assert (codes["smith", "en"], codes["clerk", "en"]) == (["83110"], ["41025"])
            assert (by["smith", "en"], by["clerk", "en"]) == ("Bo", "Ann") and "not used" not in said

    @pytest.mark.parametrize("coded", [False, True])
    def test_guesses_fill_what_nobody_has_decided_and_are_no_decisions(self, folder, coded):
        names = ["occ1", "lang", "hisco_1", "prob_1", "conf", "needs_review", "decided_by"]
        nobody, towns = "model" if coded else "", [f"of {x}town" for x in "abcdefgh"]
        cells = {"weaver of kent": ["83110", "Bo"], "weaver of ely": ["75400", nobody]}
        cells |= {"weaver of lund": ["", nobody], "weaver of ribe": ["75400", "guess"]}
        cells |= {f"{name} {town}": ["", nobody] for name in ("weaver", "baker") for town in towns}
        cells |= {f"smith {town}": ["83110", "Bo"] for town in towns} | {"smith of lund": ["", nobody]}
        cells["1850"] = ["83110", "guess"]
        given = [[text, "en", code, "0.1", "0.1", "0", by] for text, (code, by) in cells.items()]
        kept = [place for place in range(len(names)) if coded or names[place] != "prob_1"]
        write(folder / "coded.csv", [[row[place] for place in kept] for row in (names, *given)])
        rows = [["text", "language", "decision", "id"]]
        for name, code in (("weaver", "75432"), ("baker", "77610")):
            texts = [CodedText(f"{name} {town}", "en") for town in towns]
            rows += [[text.text, "en", code, f"t-{text.id}"] for text in texts]
        write(folder / "sheet.csv", rows)
        fill = ["--fill", "--key", "hisco", "--guesses", "none", "--by", "Ann"]
        for _ in range(2):  # the second time from its own output
            said = apply(folder, folder / "sheet.csv", more=[*fill, "--overwrite"])
            found = {row["occ1"]: row for row in read(folder / "final.csv")}
            shown = {text: (row["hisco_1"], row["decided_by"]) for text, row in found.items()}
            assert shown["weaver of kent"] == ("83110", "Bo") and shown["weaver of atown"] == ("75432", "Ann")
            assert shown["weaver of lund"] == shown["weaver of ribe"] == (guess := ("75432", "guess"))
            assert shown["weaver of ely"] == (guess if coded else ("75400", ""))
            assert shown["smith of lund"] == ("83110", "guess")  # Bo has taught it
            assert coded or shown["1850"] == ("", "")  # nothing is like it, and no model has answered it
            row = found["weaver of lund"]
            assert 0.5 < float(row["conf"]) < 1 and row["needs_review"] == "0" and not row.get("prob_1")
            assert f"{[by for _, by in shown.values()].count('guess')} guessed (decided_by: guess)" in said
            texts = CodedFile(str(folder / "final.csv"), system="hisco").texts.values()
            by_person = [text for text, (_, by) in shown.items() if by in ("Ann", "Bo")]
            assert [text.text for text in texts if text.decided] == by_person and len(by_person) == 25
            given = {text for text, (code, by) in shown.items() if code and not by}
            assert {text.text for text in texts if text.is_given} == {*by_person, *given}
            (folder / "coded.csv").write_bytes((folder / "final.csv").read_bytes())
        asked = review.ReviewConfig(files=["x"], target_cols=["hisco_1"])  # whose codes count as decided
        own = CodedFile(str(folder / "final.csv"), asked=asked, system="hisco")
        assert not own.texts["weaver of lund", "en"].decided
        apply(folder, folder / "sheet.csv", more=[*fill[1:], "--overwrite"])  # without --fill guesses stay
        assert (folder / "final.csv").read_bytes() == (folder / "coded.csv").read_bytes()

    def test_other_decisions_of_the_same_text_are_said(self, folder):
        one = filled(folder, {("smith", "en"): "1"}, "one.csv")
        two = filled(folder, {("smith", "en"): "2"}, "two.csv")
        output = apply(folder, one, two)
        assert f"Note: {two}, line 2: differs from {one}, line 2; the later one counts" in output
        assert final_codes(folder)["smith", "en"] == ["61110"]

    def test_who_decides_anew_is_not_told_and_who_is_unsure_is_reviewed(self, folder):
        rows = [row | {"by": "Ann", "unsure": "?"} for row in make(folder) if plain(row) == ("smith", "en")]
        sheet = filled(folder, {}, "twice.csv", [row | {"decision": code} for code in "12" for row in rows])
        assert "Note: " not in apply(folder, sheet)
        smiths = [row for row in read(folder / "final.csv") if row["occ1"].casefold() == "smith"]
        assert {row["needs_review"] for row in smiths if row["decided_by"] == "Ann"} == {"1"}

    def test_the_source_of_decided_codes_is_no_model(self, folder):
        header = ["occ1", "hisco_1", "prob_1", "source", "conf", "needs_review"]
        rows = [[text, "83110", "0.5", "trained", "0.5", "1"] for text in ("smith", "clerk", "baker")]
        write(folder / "coded.csv", [header, *rows])
        apply(folder, filled(folder, {("smith", ""): "1", ("clerk", ""): "none"}), more=["--by", "Ann"])
        found = [(row["source"], row["decided_by"]) for row in read(folder / "final.csv")]
        assert found == [("known", "Ann"), ("known", "Ann"), ("trained", "model")]
        apply(folder, folder / "filled.csv", more=["--fill", "--overwrite"])
        assert read(folder / "final.csv")[2]["source"] == "model"

    def test_rows_that_end_early(self, folder):
        """Spreadsheets leave out empty cells at the end."""
        lines = [[*row.values(), ""][: None if i else -1] for i, row in enumerate(make(folder))]
        lines.insert(0, [*read(folder / "sheet.csv")[0], "note"])
        lines[1][-2] = "2"
        apply(folder, write(folder / "early.csv", [*lines, [""], []]))
        assert final_codes(folder)["smith", "en"] == ["61110"]

    def test_columns_of_ones_own_stay(self, folder):
        header = ["desc_1", "hisco_prefix", "decided_by", *HEADER, *CODES]
        write(folder / "coded.csv", [header, *(["note", "my prefix", "me", *row] for row in coded_rows())])
        apply(folder, filled(folder, {("smith", "en"): "2"}))
        assert "note" not in (folder / "sheet.csv").read_text()
        lines = (folder / "final.csv").read_text().splitlines()
        assert lines[0].endswith(",needs_review,decided_by")
        assert all(line.startswith("note,my prefix,me,") for line in lines[1:])

    def test_training_data_grow_by_each_text_once(self, folder):
        more = ["--training-data", folder / "more.csv", "--overwrite"]
        assert "more.csv: 3 rows added" in apply(folder, filled(folder, self.DECISIONS), more=more)
        said = apply(folder, filled(folder, {**self.DECISIONS, ("farmer", "en"): "1"}), more=more)
        assert "1 row added; already there: 3 texts, whose codes stay" in said
        rows = read(folder / "more.csv")
        assert list(rows[0]) == ["occ1", "lang", "hisco_1", "hisco_2", "hisco_3"]
        found = {(row["occ1"].casefold(), row["hisco_1"], row["hisco_2"]) for row in rows}
        expected = {("smith", "61110", ""), ("clerk", "41025", ""), ("-", "-1", "41025")}
        assert found == expected | {("farmer", "61110", "")} and len(rows) == 4
        (folder / "more.csv").write_text("occ1,lang,hisco_1,hisco_2\n")  # fewer than the file has
        assert "3 rows added" in apply(folder, filled(folder, self.DECISIONS), more=more)
        assert len(rows := read(folder / "more.csv")) == 3 and None not in rows[0]
        (folder / "more.csv").write_text("occ1,lang,hisco_1\n")  # too few for two codes
        assert "cannot be extended" in apply(folder, filled(folder, self.DECISIONS), more=more, code=2)

    def test_training_data_get_the_rows_of_two_people_at_once(self, folder):
        """The second one waits for the first, and finds its rows."""
        filled(folder, {("smith", "en"): "61110"})
        first = b"occ1,lang,hisco_1,hisco_2,hisco_3\nsailor,en,98135,,\n"
        line = "apply filled.csv --to coded.csv --output final.csv --training-data more.csv"
        with file_lock(str(folder / "more.csv")):
            call = [sys.executable, "-m", "histocc.review", *line.split()]
            second = subprocess.Popen(call, cwd=folder, env=environment())
            wait_until((folder / "final.csv").exists)
            (folder / "more.csv").write_bytes(first)
        assert second.wait(60) == 0
        assert (folder / "more.csv").read_bytes() == first + b"smith,en,61110,,\n"
        assert not list(folder.glob("more.csv?*"))

    @pytest.mark.parametrize(
        "header, encoding", [("occ1,hisco_1,lang", "utf-8"), ("occ1,lang,hisco_1,hisco_2,hisco_3", "utf-16")]
    )
    def test_training_data_that_nothing_can_be_added_to(self, folder, header, encoding):
        (folder / "own.csv").write_text(f"{header}\nsm\u00f8r,da,41025,,\n", encoding=encoding)
        before = (folder / "own.csv").read_bytes()
        more = ["--training-data", folder / "own.csv"]
        output = apply(folder, filled(folder, {("smith", "en"): "1"}), more=more, code=2)
        assert "cannot be extended" in output and (folder / "own.csv").read_bytes() == before
        assert not (folder / "final.csv").exists()

    def test_what_is_no_decision_is_refused_with_its_line(self, folder):
        for decision, message in (
            ("9", "line 2: '9' is no code or title of the key"),
            ("4", "line 2: this text has no code number 4; it has 3"),
            ("1 & 2 & 3 & 41025", "line 2: 4 codes, but the file has room for 3"),
            ("1, 2", "line 2: '1, 2' is no code or title of the key; put & between several"),
        ):
            output = apply(folder, filled(folder, {("smith", "en"): decision}), code=2)
            assert message in output and not (folder / "final.csv").exists()

    def test_a_sheet_that_was_sorted_without_all_columns(self, folder):
        rows = make(folder)
        texts = [row["text"] for row in rows]
        for row, text in zip(rows, texts[1:] + texts[:1]):
            row["text"] = text
        output = apply(folder, filled(folder, {}, "torn.csv", rows), code=2)
        assert "was the sheet sorted without all its columns?" in output

    @pytest.mark.parametrize(
        "arguments, message",
        [
            ("make coded.csv", "review make needs --output"),
            ("apply filled.csv --output x.csv", "review apply needs --to CODED.csv, the table"),
            ("make coded.csv --output coded.csv --overwrite", "coded.csv is an input"),
            ("make coded.csv --output filled.csv", "filled.csv: exists; --overwrite replaces it"),
            ("make coded.csv --output x.parquet", "choose a name that ends in .csv or .xlsx"),
            ("apply filled.csv --to coded.csv --output x.tsv", "name that ends in .csv, .csv.gz"),
            ("make filled.csv --output x.csv", "not coded by histocc predict: it has no column 'conf'"),
            ("apply filled.csv --to coded.csv --output x.csv --training-data coded.csv", "is the coded file"),
            ("apply filled.csv --to coded.csv --output x.csv.gz --by model", "is not a valid name"),
            ("apply filled.csv --to coded.csv --output x.csv --training-data x.dta", "name it x.csv"),
            ("serve coded.csv --decisions x.parquet", "name it x.csv"),
            ("report filled.csv --to coded.csv", "filled.csv: chosen texts say nothing about other texts"),
            ("report drawn.csv --to coded.csv", "drawn.csv: has no decisions yet on drawn rows"),
            ("make one.csv --key hisco --output x.csv", "it has 'job'. Name it with --input-col"),
            ("serve coded.csv --decisions coded.csv", "coded.csv is an input"),
            ("serve coded.csv --decisions filled.csv", "neither a sheet of review make nor a file of"),
            ("serve coded.csv --decisions other.csv", "were offered other codes: name its own file, or"),
            ("serve coded.csv --rows 5", "--rows is a flag of make\n"),
            ("agreement filled.csv filled.csv --encoding utf-8", "unrecognized arguments: --encoding utf-8"),
            ("make coded.csv --output x.csv --language en --language-col lang", "are mutually exclusive"),
            ("serve coded.csv --decisions x.csv --port 99999", "is not a port"),
            ("serve texts.csv --decisions x", "To review it anyway, add --key hisco, or --key KEY.csv"),
            ("apply filled.csv --to mine.csv --key hisco --output x.csv --fill", "fill columns conf of the"),
        ],
    )
    def test_mistakes(self, folder, monkeypatch, arguments, message):
        filled(folder, self.DECISIONS)
        make(folder, "drawn.csv", "--sample")
        write(folder / "texts.csv", [HEADER, ["1", "smith", "en"]])
        write(folder / "one.csv", [["job"], ["smith"]])
        write(folder / "mine.csv", [["occ1", "conf"], ["smith", "Lutheran"]])
        columns = ["text", "language", "rows", "decision", "unsure", "note", "by", "id"]
        rows = [columns, ["baker", "en", "3", "none", "", "", "", f"t-{0:016}"]]
        write(folder / "other.csv", rows, encoding="utf-8-sig")
        monkeypatch.chdir(folder)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert message in run(*arguments.split(), code=2)
        assert before == {path.name: path.read_bytes() for path in folder.iterdir()}

    def test_decisions_whose_texts_are_gone_do_not_count(self, folder):
        sheet = filled(folder, self.DECISIONS)
        coded = (folder / "coded.csv").read_text().replace(",clerk,da", ",clerk of ely,da")
        (folder / "coded.csv").write_text(coded.replace(",CLERK,da", ",clerk of ely,da"))
        unused = r"decisions that are not used \(1\), whose texts are missing.*: line \d: '(?i:clerk)'\n"
        assert re.search(unused, apply(folder, sheet))
        assert final_codes(folder)["smith", "en"] == ["61110"]
        assert final_codes(folder)["clerk of ely", "da"][0] == "61110"

    def test_a_row_that_cannot_be_read_is_listed(self, folder):
        coded = folder / "coded.csv"
        lines = coded.read_text().splitlines(keepends=True)
        coded.write_text("".join([*lines[:3], "1,torn\n", *lines[3:]]))
        sheet = filled(folder, self.DECISIONS)
        said = apply(folder, sheet, code=1)
        assert "rows left out, as they cannot be read: 1; the first is line 4: cells in the row: 2" in said
        assert "are not in the output: 1; " in said and "final.csv.rejected.csv lists them by line" in said
        assert [row["line"] for row in read(folder / "final.csv.rejected.csv")] == ["4"]
        assert final_codes(folder)["smith", "en"] == ["61110"] and len(read(folder / "final.csv")) == 59
        write(coded, [HEADER + CODES, *coded_rows()])
        write(folder / "known.csv", [["occ1", "hisco_1"], ["smith"]])
        more = ["--known", folder / "known.csv", "--overwrite"]
        assert "known.csv, line 2: cannot be read" in apply(folder, sheet, more=more, code=2)

    def test_one_language_for_all_texts(self, folder):
        texts = write(folder / "texts.csv", [["occ1", "lang"], ["smed", "en"], ["bager", ""]])
        sheet, more = folder / "sheet.csv", ["--key", "hisco", "--language", "da"]
        said = run("make", texts, "--output", sheet, *more)
        rows = read(sheet)
        assert {row["language"] for row in rows} == {"da"}
        filled(folder, {("smed", "da"): "83110"}, rows=rows)
        command = shlex.split(said.splitlines()[-1])
        for count in (1, 0):  # without a column, the rows of all languages are the same
            to = ["--training-data", folder / "more.csv", "--overwrite"]
            said = run(*command[2:3], folder / "filled.csv", *command[4:], *to)
            assert f"more.csv: {count} row" in said
        assert [row["occ1"] for row in read(folder / "more.csv")] == ["smed"]

    def test_a_known_text_of_a_language_comes_before_that_of_none(self, tmp_path):
        known, hisco = [["smith", "", "83110"], ["smith", "en", "61110"]], {"system": "hisco"}
        hisco["key"] = ["61110", "83110"]
        new = write(tmp_path / "new.csv", [["occ1", "lang"], ["smith", "en"], ["smith", "da"]])
        for rows in (known, known[::-1]):
            path = write(tmp_path / "known.csv", [["occ1", "lang", "hisco_1"], *rows])
            file, of_hisco = CodedFile(str(new), **hisco), CodedFile(str(path), **hisco)
            file.know(of_hisco)
            codes = {language: text.answer for (_, language), text in file.texts.items()}
            assert (codes["en"], codes["da"]) == (["61110"], ["83110"])

    def test_what_a_model_or_nobody_has_said_is_not_known(self, folder):
        """Nor NA, as R writes it, in the column of who has decided."""
        hisco = {"system": "hisco", "key": ["61110", "83110"]}
        new = write(folder / "new.csv", [["occ1", "lang"], ["smith", "en"], ["clerk", "en"]])
        header, cells = ["occ1", "lang", *CODES, "decided_by"], ["83110", *[""] * 5, "0.9", "0"]
        names = ["", "model", "guess", "NA", "null", " ", "Bo"]
        coded = write(folder / "by.csv", [header, *([f"smith {by}", "en", *cells, by] for by in names)])
        known = CodedFile(str(coded), **hisco).texts.values()
        assert [text.text for text in known if text.is_given or text.decided] == ["smith Bo"]
        file = CodedFile(str(new), **hisco)
        file.know(CodedFile(str(folder / "coded.csv"), **hisco))
        assert file.known == {} and not any(text.decided for text in file.texts.values())

    def test_a_decision_that_is_taken_back_was_not_made(self, folder):
        """Nor does its text count as one that was chosen and put right."""
        coded = CodedFile(str(folder / "coded.csv"))
        [smith] = [text for key, text in coded.texts.items() if key == ("smith", "en")]
        rows = [[smith.text, "en", code, f"t-{smith.id}"] for code in ("61110", "undo")]
        path = write(folder / "undone.csv", [["text", "language", "decision", "id"], *rows])
        sheets = Sheets([str(path)], coded, review.writable_codes(review.ReviewConfig(files=["x"]), coded))
        assert (sheets.by_text, sheets.chosen) == ({}, set())

    def test_codes_of_another_system_need_a_key(self, folder):
        rows = [[*HEADER, *[name.replace("hisco", "occ1950") for name in CODES]], *coded_rows()]
        write(folder / "coded.csv", rows)
        sheet = filled(folder, {("smith", "en"): "7"})
        assert "add --key FILE, the list of codes of occ1950" in apply(folder, sheet, code=2)
        said = run("make", folder / "coded.csv", "--output", folder / "other.csv")
        assert "(RUN: the folder of the model that coded the file):\n" in said and "RUN/key.csv" in said
        write(folder / "key.csv", [["system_code", "code"], ["007", "0"], ["83110", "1"]])
        apply(folder, sheet, more=["--key", folder / "key.csv"])
        codes = {row["occ1950_1"] for row in read(folder / "final.csv") if row["occ1"] == "smith"}
        assert codes == {"007"}  # with its zeros, as training data are read
