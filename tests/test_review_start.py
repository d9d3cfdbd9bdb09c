"""`python -m histocc.review` without an action: a table is chosen, decided on and saved by the page."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys

import pytest
from helpers import environment, free_port, wait_until
from test_review import read, run, write
from test_review_browser import browser, chromium, decide_by_keys  # noqa: F401
from test_review_page import PLACES, TRADES, Serving, start_server

from histocc.data.rows import read_columns
from histocc.review.__main__ import ReviewConfig, read_table, save_table
from histocc.review.sheet import CodedText
from histocc.review.start import Start
from histocc.runtime.errors import UserError

pytestmark = pytest.mark.processes


class Choosing(Serving):
    """A server process that lets a table of a folder be chosen."""

    def __init__(self, path, *more, output, **variables):
        self.output = output
        output.write_text("")
        self.process, self.address = start_server([str(path), *map(str, more)], output, **variables)

    def request(self, status=200, **content):
        answered, body = self.send(content=content)
        assert answered == status, body
        return json.loads(body)

    def begin(self, table, **flags):
        """Open a table; return the last state."""
        state = self.request(start={"table": table, "by": "Ann", "input_col": ["occ1"]} | flags)
        while "doing" in state:
            state = self.request(state=True)
        return state

    def save(self):
        return self.request(export=True)["exported"].splitlines()


@pytest.fixture
def server(tmp_path, request):
    """Saves in its process, unless the test has the parameter True."""
    (tmp_path / "folder").mkdir()
    more = ["--no-browser", "--guesses", "none", "--port", free_port(), "--language", "Danish"]
    here = {"saves_here": not getattr(request, "param", False)}
    with Choosing(tmp_path / "folder", *more, output=tmp_path / "output.txt", **here) as server:
        server.folder = tmp_path / "folder"
        yield server


def workbook(path, rows, above=()):
    """Write a workbook with an empty sheet before that of the table, and with rows above the names."""
    xlsxwriter = pytest.importorskip("xlsxwriter")
    book = xlsxwriter.Workbook(path)
    book.add_worksheet("Notes").write(0, 0, "Made by Ann")
    sheet = book.add_worksheet("Marriages")
    for place, row in enumerate([*above, *rows]):
        sheet.write_row(place, 0, row)
    book.close()


ROWS = [["occ1", "lang"], *([f"{trade} {place}", "en"] for trade in TRADES for place in PLACES)]


def test_a_folder_lists_its_tables_alone(server):
    assert server.request()["tables"] == [] and server.request()["problem"] == ""
    folder, outside = server.folder, write(server.folder.parent / "secret.csv", ROWS)
    for i in range(500):
        write(folder / f"{i:03}.csv", ROWS)
    for name in ("~$open.xlsx", ".hidden.csv", "000.csv.decisions.csv", "notes.txt"):
        write(folder / name, ROWS)
    (folder / "sub.csv").mkdir()
    (folder / "out.csv").symlink_to(outside)
    (folder / "in.csv").symlink_to("000.csv")
    (folder / "001.csv.decisions.csv").symlink_to(folder.parent / "decisions.csv")
    listed = server.request()["tables"]
    assert len(listed) == 500 and {"in.csv", "002.csv"} < {*listed}
    assert {"001.csv", "out.csv", "~$open.xlsx", "sub.csv"}.isdisjoint(listed)


def test_nothing_outside_the_folder_is_read_or_written(server):
    folder, outside = server.folder, write(server.folder.parent / "secret.csv", ROWS)
    write(folder / "in.csv", ROWS)
    (folder / "out.csv").symlink_to(outside)
    names = ["../secret.csv", str(outside), "out.csv", "", ".", "in.csv/../../secret.csv", None, ["in.csv"]]
    for name in names:
        assert "is not a table in the folder" in server.request(400, table=name)["error"]
        assert "is not a table in the folder" in server.request(400, start={"table": name})["error"]
        if name:
            assert "not a table" in server.request(400, start={"table": "in.csv", "key": name})["error"]
    before = {path: path.read_bytes() for path in folder.parent.rglob("*.csv")}
    assert server.send(server.address + "key.json")[0] == 403
    elsewhere = {"decisions": f"{folder.parent}/x.csv", "known": str(outside), "training_data": "../x.csv"}
    # these flags are not the page's
    assert server.begin("in.csv", key="hisco", **elsewhere) == {"ready": True}
    after = {path: path.read_bytes() for path in folder.parent.rglob("*.csv")}
    assert {path.name for path in after.keys() - before.keys()} == {"in.csv.decisions.csv"}
    assert before.items() <= after.items() and "Traceback" not in server.output.read_text()


@pytest.mark.parametrize("server", [True], indirect=True, ids=["a process saves"])
def test_names_like_flags_reach_no_command(server):
    """Neither a process that saves, nor a command that is printed."""
    folder, victim = server.folder, server.folder.parent / "victim.csv"
    victim.write_text("precious\n")
    smuggled = [f"--output={victim}", "--overwrite"]
    write(folder / "--x.csv", [["occ1", "lang", *smuggled], *([*row, "", ""] for row in ROWS[1:])])
    for flags in ({"input_col": ["occ1", *smuggled]}, {"show": smuggled}, {"language": smuggled[0]}):
        assert "would be a flag in commands" in server.begin("--x.csv", key="hisco", **flags)["error"]
    for by in ("-b", "\ud800", "y" * 10_000, ["Ann"]):
        assert "by" in server.begin("--x.csv", key="hisco", by=by)["error"]
    table, made = str(folder / "--x.csv"), argparse.Namespace(path=f"{folder}/--x.csv.decisions.csv")
    args = ReviewConfig(action="serve", files=[table], input_col=["occ1", *smuggled], key="hisco")
    with pytest.raises(UserError, match="would be a flag in commands"):
        save_table(args, read_table(args), made)
    assert server.begin("--x.csv", key="hisco") == {"ready": True}
    said = server.ask(status=400, id=server.ask()["text"]["id"], answer="none")["error"]
    assert "the request lacks 'seen'" in said
    server.decide(["83110"])
    assert server.save()[0].startswith(f"Saved: {folder}/--x.final.csv: 1 of 32 rows")
    assert victim.read_text() == "precious\n"
    relative = Start(ReviewConfig(action="start", files=["."]), print)
    relative.tables = lambda: ["--x.csv"]
    assert relative._path("--x.csv") == "./--x.csv"


def test_the_decisions_file_is_neither_made_again_nor_followed_elsewhere(server):
    path, outside = server.folder / "register.csv.decisions.csv", server.folder.parent / "outside.csv"
    assert "no table is open yet" in server.request(400, export=True)["error"]
    assert "no table is open yet" in server.ask(status=400)["error"]
    write(server.folder / "register.csv", ROWS)
    assert server.begin("register.csv", key="hisco") == {"ready": True}
    server.decide(["83110"])
    before = path.read_bytes()
    path.rename(outside)
    assert "register.csv.decisions.csv" in server.decide(["83110"], status=507)["error"]
    assert not path.exists()
    path.symlink_to(outside)
    assert "register.csv.decisions.csv" in server.decide(["83110"], status=507)["error"]
    assert outside.read_bytes() == before
    path.unlink()
    outside.rename(path)  # is back
    assert server.decide(["83110"])["decided"] == 2


def test_columns_are_guessed_by_names_and_contents(server):
    trades = [["77610", "no", "baker", "Ashby, the old town", "en"], ["83110", "no", "smith", "Barrow", "da"]]
    tables = {
        "names.csv": [["id", "Beruf", "Sprache"], ["Smith", "Bäcker", "de"], ["Baker", "Schmied", "de"]],
        "contents.csv": [["a", "b", "c", "d", "e"], *trades],
        "numbers.csv": [["occ_code", "", "text"], ["1", "x", "smith"]],
        "names only.csv": [["occ1", "lang"]],
    }
    found = {}
    for name, rows in tables.items():
        write(server.folder / name, rows)
        seen = server.request(table=name)
        found[name] = seen["text"], seen["language"]
        assert (seen["columns"], seen["rows"]) == (rows[0], rows[1:])
    texts = ("Beruf", "Sprache"), ("c", "e"), ("text", ""), ("occ1", "lang")
    assert [*found.values()] == [*texts]
    (server.folder / "old.csv").write_bytes("occ1\nsedlák\n".encode("cp1252"))
    assert server.request(table="old.csv")["rows"] == [["sedlák"]] and server.request()["language"] == "da"
    (server.folder / "damaged.xlsx").write_bytes(b"PK\x03\x04")
    assert "cannot be read as a workbook" in server.request(400, table="damaged.xlsx")["error"]


def test_from_a_workbook_to_a_coded_workbook(server):
    """The input stays, each saving has a name of its own, and the name of who decides is known later."""
    path = server.folder / "register.xlsx"
    rows = [["year", "trade", "speech"], *([1850, *row] for row in ROWS[1:])]
    workbook(path, rows, [["Marriages of five parishes"], []])
    before = path.read_bytes()
    seen = server.request(table="register.xlsx")
    assert (seen["sheet"], seen["text"], seen["by"]) == ("Marriages", "trade", "")
    assert seen["sheets"] == ["Notes", "Marriages"] and seen["rows"][0] == ["1850", *ROWS[1]]
    assert server.request(table="register.xlsx", sheet="Notes")["columns"] == ["Made by Ann"]
    assert "no sheet has the column" in server.begin("register.xlsx", input_col=["gone"])["error"]
    flags = {"sheet": "Marriages", "input_col": ["trade"], "language_col": "speech", "key": "hisco"}
    assert "not a valid name" in server.begin("register.xlsx", **flags, by=" guess ")["error"]
    more = {"by": "Ann\n B", "classes": ["hisclass"], "show": ["year"]}
    assert server.begin("register.xlsx", **flags, **more) == {"ready": True}
    assert "another window" in server.request(400, start={"table": "register.xlsx"})["error"]
    assert b"Save the coded table" in server.send(server.address)[1]
    assert server.ask()["text"]["about"] == [["year", "1850"]]
    for _ in range(12):
        text = server.ask()["text"]
        server.decide([TRADES[text["text"].split()[0]]], text)
    said = server.save()
    what = "12 of 32 rows decided, 20 guessed (decided_by: guess); 12 texts decided, 0 skipped"
    assert said[0] == f"Saved: {path.with_suffix('')}.final.xlsx: {what}"
    assert "histocc train " in said[-2] and said[-1].startswith("Cite it as: ")
    assert server.save()[0].startswith(f"Saved: {path.with_suffix('')}.final1.xlsx: ")
    columns = ["trade", "hisco_1", "title_1", "hisclass_1", "decided_by"]
    final = read_columns(str(server.folder / "register.final.xlsx"), columns)
    assert {by for *_, by in final} == {"Ann B", "guess"} and len(final) == 32
    mine = [row[:-1] for row in final if row[-1] == "Ann B"]
    assert all(code == TRADES[text.split()[0]] and title and of for text, code, title, of in mine)
    assert server.request(table="register.xlsx")["by"] == "Ann B" and path.read_bytes() == before


def test_decisions_are_continued_in_their_language(server):
    write(server.folder / "register.csv", [["occ1"], ["smith"], ["baker"], ["weaver"]])
    write(server.folder / "register.final.csv", [["occ1"], ["smith"]])
    assert server.request()["table"] == "register.csv"
    write(server.folder / "zoo.csv", [["occ1"], ["smith"]])
    listed = server.request()
    assert listed["tables"] == ["register.csv", "zoo.csv", "register.final.csv"] and listed["table"] == ""
    assert server.begin("register.csv", key="hisco", language="en") == {"ready": True}
    for by in ("Ann", "Ann", "Bo"):
        server.decide(["83110"], by=by)
        seen = server.request(table="register.csv")
        assert (seen["spoken"], seen["language"], seen["by"]) == ("en", "", "Ann" if by == "Ann" else "")
    assert seen["decided"] == 3 and seen["decisions"] == "register.csv.decisions.csv"
    table = server.folder / "register.csv"
    to = ["--to", table, "--key", "hisco", "--output", server.folder / "x.csv"]
    said = run("apply", f"{table}.decisions.csv", *to, code=2)
    assert "made with language en, not with the present one: choose en (in commands: --language en)" in said


def test_a_column_or_a_key_file_has_the_codes(server):
    """Codes that stand in the table already count as decided, and stay."""
    coded = [[*row, f"{row[0][0].upper()} x" if i % 2 else "NA"] for i, row in enumerate(ROWS[1:])]
    write(server.folder / "own.csv", [[*ROWS[0], "class"], *coded])
    write(server.folder / "key.csv", [["code", "system_code"], ["0", "B x"], ["1", "Q"]])
    assert "a key file has the columns" in server.begin("own.csv", key="own.csv")["error"]
    assert "--key" in server.begin("own.csv")["error"]
    assert server.begin("own.csv", target_cols=["class"]) == {"ready": True}
    key = dict(json.loads(server.send(server.address + "key.json")[1]))
    assert {*key} == {"B x", "F x", "S x", "W x"} and server.ask()["texts"] == 16
    text = server.ask()["text"]
    server.decide(["W x"], text)
    server.save()
    final = read(server.folder / "own.final.csv")
    assert all(row["class"] == old for row, (*_, old) in zip(final, coded) if old != "NA")
    mine = [row for row in final if row["decided_by"] == "Ann"]
    assert [(row["occ1"], row["class"]) for row in mine] == [(text["text"], "W x")]
    guesses = [row["class"][0] == row["occ1"][0].upper() for row in final if row["decided_by"] == "guess"]
    assert len(guesses) == 15 and sum(guesses) > 12


def test_a_coded_file_goes_on_with_its_codes(server):
    columns = ["occ1", "lang", "hisco_1", "prob_1", "conf", "conf_fitted", "needs_review"]
    write(server.folder / "coded.csv", [columns, ["smith", "en", "83110", "0.5", "0.5", "1", "1"]])
    assert server.request(table="coded.csv")["coded"]
    assert server.begin("coded.csv", target_cols=[]) == {"ready": True}
    assert server.ask()["text"]["choices"][0]["prob"] == "0.5"


def test_a_table_that_changes_meanwhile(server):
    """Before it is opened, and before it is saved."""
    path = server.folder / "register.csv"
    write(path, ROWS)
    assert server.request(table="register.csv")["text"] == "occ1"
    write(path, [["job"], ["smith"]])
    assert "has no column 'occ1'" in server.begin("register.csv", key="hisco")["error"]
    write(path, ROWS)
    assert server.begin("register.csv", key="hisco") == {"ready": True}
    server.decide(["83110"])
    path.unlink()
    assert "register.csv" in server.request(400, export=True)["error"]
    os.kill(server.process.pid, signal.SIGINT)
    server.process.join(60)
    assert "histocc review apply" in server.output.read_text()


def test_columns_of_the_coded_table_are_not_in_the_table_already(server):
    for name in ("conf", "needs_review"):
        write(server.folder / "own.csv", [["occ1", name], ["smith", "12"]])
        assert f"fill columns {name}" in server.begin("own.csv", key="hisco")["error"]
    for name in ("hisco_1", "decided_by"):
        write(server.folder / "own.csv", [[name, "lang"], *ROWS[1:]])
        said = server.begin("own.csv", key="hisco", input_col=[name])["error"]
        assert f"column {name} has the texts, but review writes a column of this name" in said


def test_what_is_left_out_is_said_on_the_page(server):
    """And a table without a decision is saved without the advice to train on it."""
    path = server.folder / "register.csv"
    write(path, [*ROWS, ["smith of Ashby", "en", "one cell too many"]])
    sheet = [["text", "language", "rows", "decision", "unsure", "note", "by", "id"]]
    sheet += [["mason Dover", "en", "1", "95100", "", "", "Ann", "t-0123456789abcdef"]]
    text = CodedText(*ROWS[1])
    sheet += [[*ROWS[1], "1", "skip", "", "", "Ann", f"t-{text.id}"]]
    write(server.folder / "register.csv.decisions.csv", sheet)
    assert server.begin("register.csv", key="hisco") == {"ready": True}
    unread, unused = server.ask()["notes"]
    assert "register.csv: rows left out, as they cannot be read: 1; the first is line 34" in unread
    assert "decisions that are not used (1)" in unused and "mason Dover" in unused
    assert not any("train" in line for line in server.save())


def test_a_table_on_whose_rows_somebody_has_decided(server):
    write(server.folder / "own.csv", [[*ROWS[0], "decided_by"], *([*row, "1850"] for row in ROWS[1:])])
    assert server.begin("own.csv", key="hisco") == {"ready": True}
    shown = server.ask()
    [note] = shown["notes"]
    assert shown["text"] is None and "no text is open" in note and "in column decided_by" in note


class Started(Choosing):
    """The same, as a process that Python ends itself."""

    def __init__(self, path, output):
        command = [sys.executable, "-m", "histocc.review", str(path), "--no-browser", "--guesses", "none"]
        with open(output, "wb") as file:
            how = {"stdout": file, "stderr": file, "env": environment(OMP_NUM_THREADS="2")}
            self.process = subprocess.Popen([*command, "--port", str(free_port())], **how)
        self.process.join = self.process.wait
        wait_until(lambda: re.search(r"http://\S+/", output.read_text()), output.read_text)
        self.address = re.search(r"http://\S+/", output.read_text())[0]


def test_it_ends_while_it_learns(tmp_path):
    texts = [f"{trade} {place} {i}" for i in range(100) for trade in TRADES for place in PLACES]
    write(tmp_path / "many.csv", [["occ1"], *([text] for text in texts)])
    output = tmp_path / "output.txt"
    with Started(tmp_path, output) as server:
        assert server.begin("many.csv", key="hisco") == {"ready": True}
        for _ in range(12):
            server.decide([TRADES[server.ask()["text"]["text"].split()[0]]])
        server.process.terminate()
        assert server.process.wait(60) == 0, output.read_text()
    assert "12 texts decided" in output.read_text() and "terminate" not in output.read_text()


def test_what_cannot_begin_is_said_first(tmp_path):
    for name in ("aply", tmp_path / "gone.csv"):
        assert "action of review has this name" in run(name, code=2)
    (tmp_path / "~$open.xlsx").touch()

    def start(path):
        return Start(ReviewConfig(action="start", files=[path]), print)

    with pytest.raises(UserError, match="is not a table in the folder"):
        start(str(tmp_path / "~$open.xlsx"))
    if os.path.isdir("/proc/self"):
        assert "cannot write there" in start("/proc/self").answer({})["problem"]


@pytest.mark.full
def test_from_nothing_to_a_coded_workbook_by_keys(tmp_path, browser):  # noqa: F811
    """Without a flag, with the guesses of the built-in model: 600 rows, 60 decisions."""
    people = ["", "master ", "retired ", "journeyman ", "young "]
    trades = [("baker", "77610"), ("blacksmith", "83110"), ("weaver", "75400"), ("farmer", "61110")]
    trades += [("tailor", "79100"), ("carpenter", "95410"), ("shoemaker", "80110"), ("mason", "95100")]
    ends = ("", " (dec.)")
    texts = {f"{of}{trade}{more}": code for of in people for trade, code in trades for more in ends}
    rows = [[1850 + i % 40, f"<b>{i}</b>", text] for i, text in enumerate([*texts] * 8)][:600]
    (tmp_path / "work").mkdir()
    workbook(tmp_path / "work" / "register.xlsx", [["year", "<img src=x>", "occupation"], *rows], [["Title"]])
    variables = {"BROWSER": "true"}
    with Choosing(tmp_path / "work", output=tmp_path / "output.txt", **variables) as server:
        browser.open(server.address)
        shown = "document.getElementById({!r}).{}".format
        browser.wait("!!document.querySelector('#tables button')")
        browser.value("document.querySelector('#tables button').click()")
        browser.wait(f"!{shown('form', 'hidden')}")
        assert browser.value(shown("text", "value")) == "occupation"
        assert "<img src=x>" in browser.value(shown("rows", "textContent"))
        assert browser.value("document.images.length + document.querySelectorAll('td b').length") == 0
        browser.value(shown("begin", "click()"))
        assert "Write your name" in browser.value(shown("error", "textContent"))
        for letter in "ann":
            browser.press(letter)
        browser.value(shown("begin", "click()"))
        wait_until(lambda: browser.value("typeof windowName !== 'undefined' && !!text"), seconds=600)
        decide_by_keys(browser, texts.__getitem__, 60)
        browser.value(shown("export", "click()"))
        wait_until(lambda: "Cite" in browser.value(shown("exported", "textContent")), seconds=300)
    columns = ["occupation", "hisco_1", "decided_by"]
    final = read_columns(str(tmp_path / "work" / "register.final.xlsx"), columns)
    assert len(final) == 600 and {by for *_, by in final} == {"ann", "guess"}
    assert all(code == texts[text] for text, code, by in final if by == "ann")
    right = sum(code == texts[text] for text, code, _ in final)
    assert right > 540
