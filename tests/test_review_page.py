"""`python -m histocc.review serve`: decisions through the page's interface, with a real server process."""

import contextlib
import csv
import fcntl
import functools
import http.client
import io
import json
import multiprocessing
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import replace

import pytest
from helpers import _as_script, environment, free_port, wait_until
from test_errors import in_child
from test_review import read, run, write

from histocc.data.descriptions import read_descriptions
from histocc.formatter import hisco_key
from histocc.review import search, serve
from histocc.review.learn import Learner
from histocc.review.serve import CHANGED, Decisions
from histocc.review.sheet import CodedFile, CodedText, Codes, formatter_of
from histocc.runtime.errors import TrainingError

SCRIPT = "<script>document.title='ran'</script> smith"
TEXTS = [  # text, language, rows, code and probability of the best answer; the others are the same for all
    ("smith", "en", 10, "83110", 0.5),
    ("clerk", "en", 6, "39310", 0.25),
    (SCRIPT, "en", 5, "83110", 0.4),
    ("=1+1\nsmid", "da", 4, "83120", 0.4),
    ("farmer", "en", 30, "61110", 0.99),
]
OTHERS = ["75400", "0.1", "-1", "0.05"]
CODES = [f"{name}_{i}" for i in (1, 2, 3) for name in ("hisco", "prob")]
pytestmark = pytest.mark.processes


@pytest.fixture
def folder(tmp_path):
    rows = [
        [text, lang, code, str(prob), *OTHERS, str(prob), "1", "1"]
        for text, lang, times, code, prob in TEXTS
        for _ in range(times)
    ]
    write(tmp_path / "coded.csv", [["occ1", "lang", *CODES, "conf", "conf_fitted", "needs_review"], *rows])
    write(tmp_path / "texts.csv", [["occ1", "lang"], *(row[:2] for row in rows)])
    return tmp_path


@functools.cache
def hisco_search():
    """The codes of HISCO and their search, which takes most of a server's start."""
    codes = Codes(list(hisco_key()), "hisco", read_descriptions(None, [*hisco_key()], formatter_of("hisco")))
    return codes, search.Search(codes, search.word_lists())


def save_here(line, input, **_):
    """What the process of `save_table` does, in this one."""
    out, problem = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(problem):
        sys.stdin = io.StringIO(input)
        with pytest.raises(SystemExit) as ended:
            exec(line[-1])
    return subprocess.CompletedProcess(line, ended.value.code, out.getvalue(), problem.getvalue())


def start_server(arguments, output, saves_here=False, **variables):
    """Fork a server that has its search for codes of HISCO, and saves as a process of its own or here."""
    codes, made = hisco_search()

    def as_made(given, lists):
        is_hisco = lists and (given.codes, given.words) == (codes.codes, codes.words)
        return made if is_hisco else search.Search(given, lists)

    def work():
        sys.stdout = sys.stderr = open(output, "a", buffering=1)
        serve.Search = as_made
        subprocess.run = save_here if saves_here else subprocess.run
        _as_script("histocc.review", arguments, output, environment(**variables))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    wait_until(lambda: re.search(r"http://\S+/", output.read_text()), output.read_text)
    return process, re.search(r"http://\S+/", output.read_text())[0]


class Serving:
    """A server process, and a window that asks it."""

    def __init__(self, folder, *more, coded="coded.csv", decisions="decided.csv", **variables):
        self.output = folder / f"output of {decisions}.txt"
        self.output.write_text("")
        arguments = ["serve", folder / coded, *([] if variables else ["--no-browser"]), *more]
        arguments += ["--decisions", folder / decisions] if decisions else []
        arguments += ["--guesses", "none"]
        if "--port" not in more:
            arguments += ["--port", free_port()]
        self.process, self.address = start_server([*map(str, arguments)], self.output, **variables)

    def send(self, address=None, content=None, **headers):
        """(status, content)"""
        body = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(address or self.address + "api", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=20) as reply:
                return reply.status, reply.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def ask(self, window="one", status=200, **content):
        answered, body = self.send(content={"window": window, **content})
        assert answered == status, body
        return json.loads(body)

    def decide(self, answer, text=None, window="one", status=200, **more):
        """On a text, or on the one that the window shows."""
        text = text or self.ask(window)["text"]
        more = {"seen": text["seen"]} | more
        return self.ask(window, status, id=text["id"], answer=answer, **more)

    def kill(self):
        self.process.kill()
        self.process.join()

    def end(self, number=signal.SIGINT):
        """By Ctrl-C; the words of the two commands that it ends with: apply and training."""
        os.kill(self.process.pid, number)
        self.process.join(240)
        apply, _, train = self.output.read_text().splitlines()[-3:]
        return shlex.split(apply), shlex.split(train)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()


@pytest.fixture
def few_titles(monkeypatch):
    """The lists of titles are short: with all of them a search takes most of a test."""
    monkeypatch.setattr(serve, "word_lists", lambda: {"farmer": ("61110",)})


def decisions(folder):
    return [(row["text"], row["decision"]) for row in read(folder / "decided.csv")]


def final(folder, *more, coded="coded.csv"):
    to = ["--to", folder / coded, "--output", folder / "final.csv", "--guesses", "none"]
    run("apply", folder / "decided.csv", *to, *more)
    rows = read(folder / "final.csv")
    return {row["occ1"]: [row[x] for x in row if x.startswith("hisco_") and row[x]] for row in rows}


def test_decisions_are_in_the_file_when_the_next_text_comes_and_outlast_a_kill(folder):
    raw = (folder / "coded.csv").read_bytes()
    with Serving(folder) as server:
        first = server.ask()
        text = first["text"]
        assert (text["text"], text["language"], text["rows"], text["seen"]) == ("smith", "en", 10, "")
        assert text["choices"][0] == {"code": "83110", "title": "Blacksmith, General", "prob": "0.5"}
        assert [choice["code"] for choice in text["choices"]][:3] == ["83110", "75400", "-1"]
        # of 55 rows the model expects 10·.5 + 6·.75 + 5·.6 + 4·.6 + 30·.01 wrong
        assert first["settled"] == 0 and first["accuracy"] == pytest.approx(1 - 15.2 / 55)
        second = server.decide(["83110", "41025"], text)
        assert decisions(folder) == [("smith", "83110 & 41025")]
        assert second["decided"] == 1 and second["settled"] == pytest.approx(10 / 55)
        assert second["accuracy"] == pytest.approx(1 - 10.2 / 55)
        assert second["text"]["text"] == "clerk"
        third = server.decide("none", second["text"])
        fourth = server.decide("skip", third["text"])
        assert fourth["skipped"] == 1 and fourth["decided"] == 2 and fourth["text"]["rows"] == 4
        assert server.decide(["83120"], fourth["text"])["text"]["text"] == "farmer"
        server.kill()
    content = (folder / "decided.csv").read_bytes()
    assert content.endswith(b"\n")
    for before in (content, content[:-1]):  # some editors save it without its last line's end
        (folder / "decided.csv").write_bytes(before)
        with Serving(folder) as server:
            assert server.ask()["decided"] == 3
        assert (folder / "decided.csv").read_bytes() == content
    with open(folder / "decided.csv", "ab") as file:
        file.write("farmer,en,30,væ".encode()[:-1])  # the machine went down in the middle of a letter
    with Serving(folder) as server:
        again = server.ask()
        assert again["text"]["text"] == "farmer" and (again["decided"], again["skipped"]) == (3, 1)
        server.decide("undo", server.ask(id=text["id"], stay=True)["text"])
        server.decide("undo", server.ask(id=second["text"]["id"], stay=True)["text"])
        server.decide(["39310"], server.ask(id=second["text"]["id"], stay=True)["text"])
        assert server.ask()["text"]["text"] == "smith"  # is open again
    expected = ["83110 & 41025", "none", "skip", "83120", "undo", "undo", "39310"]
    assert [decision for _, decision in decisions(folder)] == expected
    codes = final(folder)
    assert codes["clerk"] == ["39310"] and codes["=1+1\nsmid"] == ["83120"]
    assert codes["smith"] == ["83110", "75400", "-1"] and codes[SCRIPT][0] == "83110"  # as the model has them
    assert (folder / "coded.csv").read_bytes() == raw


def test_a_decision_is_on_the_disk_before_it_counts(folder, few_titles, monkeypatch):
    path, synced, sync = folder / "decided.csv", [], os.fsync

    def fsync(descriptor):
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), path.read_bytes()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    codes = Codes(hisco_key(), "hisco", {"83110": "Blacksmith"})
    decided = Decisions(CodedFile(str(folder / "coded.csv")), codes, str(path))
    assert synced == [(str(folder), path.read_bytes())] and (before := decided.find("farmer"))
    for number, answer in enumerate(("none", ["blacksmith"], ["83110"]), 2):
        decided.decide(decided.texts[number].id, answer, "")
        assert len(synced) == number and synced[-1] == (str(path), path.read_bytes())
    assert decided.find("farmer") != before
    decided.decide(decided.texts[4].id, "undo", "83110")
    assert [answer for _, answer in decisions(folder)] == ["none", "83110", "83110", "undo"]
    assert [*decided.known] == [3] and decided.find("farmer") == before
    assert [*decided.made] == [*Decisions(decided.coded, codes, str(path)).made] == [2, 3]


def test_two_windows_lose_and_double_nothing(folder):
    with Serving(folder) as server:
        one, two = server.ask("one")["text"], server.ask("two")["text"]
        assert (one["text"], two["text"]) == ("smith", "clerk")
        assert server.ask("one")["text"] == one  # loaded again
        server.ask("two", leave=True)
        assert server.ask("another")["text"] == two  # that window was closed
        server.ask("another", leave=True)
        for _ in range(3):  # sent again: the answer got lost
            server.decide(["83110"], one)
        shown = server.decide(["41025"], one, "two", status=409)  # as it stands in a window that is behind
        assert shown["text"]["seen"] == "83110" and decisions(folder) == [("smith", "83110")]
        server.decide(["41025"], shown["text"], "two")  # on purpose

        def work(window):
            while text := server.ask(window)["text"]:
                server.decide(["61110"], text, window)

        threads = [threading.Thread(target=work, args=(window,)) for window in ("one", "two", "three")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lines = decisions(folder)
    assert lines[:2] == [("smith", "83110"), ("smith", "41025")] and len(lines) == 6
    assert len({text for text, _ in lines}) == 5


def test_other_users_sites_and_requests_are_refused(folder):
    with Serving(folder) as server:
        host, token = server.address.split("/")[2:4]
        status, page = server.send(server.address)
        assert status == 200 and b"NONCE" not in page and b"Shift" in page
        with urllib.request.urlopen(server.address) as reply:
            policy = reply.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        for address, headers in (
            (f"http://{host}/", {}),
            (f"http://{host}/wrong/", {}),
            (server.address + "../sheet.py", {}),
            (server.address, {"Host": "evil.example"}),
            (server.address, {"Host": "evil.example:80"}),
            (server.address, {"Origin": "http://evil.example"}),
            (server.address, {"Origin": "null"}),
            (server.address + "key.json", {"Origin": "http://localhost:1"}),
        ):
            status, said = server.send(address, **headers)
            assert status == 403 and token not in said.decode(), (address, headers)
            line = server.output.read_text().splitlines()[-1]
            assert line.replace(server.address, "http://127.0.0.1:PORT/TOKEN/") in said.decode()
        text = server.ask()["text"]
        request = {"window": "w", "id": text["id"], "answer": "none", "seen": ""}
        assert server.send(content=request, Origin="http://evil.example")[0] == 403
        assert server.send(f"http://{host}/wrong/api", request)[0] == 403
        assert server.send(content={**request, "window": "w" * 70_000})[0] == 413
        too_many = ["83110", "75400", "-1", "41025"]  # room for 3
        changes = [{"id": "?"}, {"id": [1]}]
        changes += [{"answer": answer} for answer in (["9"], "maybe", "1", {"83110": 1}, None, too_many)]
        for content in (*(request | change for change in changes), [1]):
            assert server.send(content=content)[0] == 400, content
        path = server.address.partition(host)[2]
        for method, status, length in (
            ("POST", 400, "60000"),
            ("POST", 413, "9" * 5000),
            ("POST", 413, "-1"),
            ("GET", 200, "0"),  # an address that is reached through another port
        ):
            connection = http.client.HTTPConnection(host)
            headers = {"Host": "localhost:9000", "Content-Length": length}
            connection.request(method, path + "api" * (method == "POST"), "[" * 60_000, headers)
            assert connection.getresponse().status == status, length[:9]
        assert decisions(folder) == [] and "Traceback" not in server.output.read_text()


def test_a_table_without_answers(folder):
    with Serving(folder, "--key", "hisco", coded="texts.csv") as server:
        first = server.ask()
        assert first["text"]["text"] == "farmer" and first["accuracy"] is None  # most rows
        titles = [choice["title"] for choice in first["text"]["choices"]]  # share a word with the text
        assert len(titles) == 5 and titles[:2] == ["General Farmer", "Farmers"]
        said = server.decide(["buyers"], first["text"], status=400)["error"]
        assert "42000 and 42200" in said
        assert server.decide(["general  FARMER", "61115"], first["text"])["saved"] == "61110 & 61115"
        text = server.decide(["83110"])["text"]
        while text["text"] != SCRIPT:
            text = server.decide("skip", text)["text"]
        assert text["near"] == [{"text": "smith", "codes": ["83110"]}]
        offered = {"code": "83110", "title": "Blacksmith, General", "prob": "", "near": True}
        assert text["choices"][0] == offered
        key = dict(json.loads(server.send(server.address + "key.json")[1]))
        assert len(key) == 1919 and key["83110"] == "Blacksmith, General"
    codes = final(folder, "--key", "hisco", coded="texts.csv")
    assert (codes["farmer"], codes["smith"], codes["clerk"]) == (["61110", "61115"], ["83110"], [])
    names = ["hisco_1", "title_1", "hisco_2", "title_2", "decided_by"]  # as many as a row has, with titles
    rows = {row["occ1"]: [row[name] for name in names] for row in read(folder / "final.csv")}
    assert list(read(folder / "final.csv")[0])[2:] == names
    assert rows["smith"] == ["83110", "Blacksmith, General", "", "", "person"]


def test_a_text_is_known_by_language(folder):
    write(folder / "two.csv", [["occ1", "lang"], ["Smith", "en"], ["smith", "da"]])
    with Serving(folder, "--key", "hisco", coded="two.csv") as server:
        other = server.decide(["83110"])["text"]
        assert other["near"] == [{"text": "Smith", "codes": ["83110"]}]  # as it is written
        server.decide(["61110"], other)
        server.decide("undo", server.ask(id=other["id"], stay=True)["text"])
        assert server.ask(id=other["id"], stay=True)["text"]["near"] == other["near"]


def test_the_search_finds_codes_by_words(folder):
    """Of titles, of lists in six languages, and of texts that are decided."""
    with Serving(folder) as server:

        def found(words):
            return [code for code, *_ in server.ask(find=words)]

        for words in ("general black", "blacksmiths", "blaksmith", "smed", "8-31.10", "83110"):
            assert found(words)[0] == "83110", words
        assert server.ask(find="smed")[0][1:] == ["Blacksmith, General", "smed"]
        assert server.ask(find="83110")[0][1:] == ["Blacksmith, General", ""]  # once
        assert "61110" in found("1110") and found("xyzzy") == found(" ") == []
        assert found("farmer")[0] == found("farmers")[0] == "61110"
        assert "61100" in found("general farmer")[-2:]  # the heading General Farmers
        smith = server.ask()["text"]
        assert found("maker")[0] != "79475"
        for code in ("51020", "77610"):  # a code that was used does not win over the word in the plural
            server.decide([code], smith)
            assert found("cultivateurs")[0] == "61110" and found("journaliere")[0] == "99920"
            server.decide("undo", server.ask(id=smith["id"], stay=True)["text"])
        server.decide(["79475"], smith)
        assert found("maker")[0] == "79475" and "79475" in found("smith")
        server.decide("undo", server.ask(id=smith["id"], stay=True)["text"])
        assert found("maker")[0] != "79475" and "79475" not in found("smith")


def test_similar_texts_share_rare_letters():
    trades = "farmer", "platelayer", "grocer", "nurse", "clerk", "mason"
    texts = [f"{before}{trade} (deceased)" for before in ("", "old ") for trade in trades]
    texts += ["platelayers", "gold miner", "cook"]
    learner = Learner([CodedText(text, "en", 1) for text in texts], [])
    assert learner.nearest(0, range(1, len(texts))) == [6]  # the old farmer
    assert learner.nearest(1, range(2, len(texts)))[:2] == [7, 12]
    texts = [f"{name} (deceased)" for name in ("tailor", "nailer", "miner", "farmer", "taylor")]
    texts += [f"clerk {i}" for i in range(20)]
    nearest = Learner([CodedText(text, "en", 1) for text in texts], []).nearest(0, range(1, 5))
    assert nearest[0] == 4


def test_remarks_on_decisions_and_the_texts_that_are_asked_for(folder):
    """The file of decisions is that of another coding of the same texts, too."""
    with Serving(folder, "--by", "Ann", "--show", "lang") as server:
        first = server.ask()["text"]
        assert first["about"] == [["lang", "en"]]
        server.decide(["83110"], first, unsure=True, note=" see  p. 4 ")
        server.decide(["39310"], by="Bo")
        assert server.ask(only="FARM en")["text"]["text"] == "farmer"
        assert server.ask(only="da")["text"]["language"] == "da"
        assert server.ask(only="smi")["fits"] == [2, 3] and server.ask(only="smi da")["fits"] == [1, 1]
        assert server.ask(only="unicorn")["text"] is None and server.ask()["fits"] is None
        while (shown := server.ask())["text"]["text"] != "smith":
            server.decide("skip", shown["text"])
        again = shown["text"]  # at the end
        assert shown["unsure"] == 1 and (again["seen"], again["note"]) == ("83110", "see p. 4")
    coded = (folder / "coded.csv").read_text().replace("83110", "83990")
    (folder / "coded.csv").write_text(coded)
    with Serving(folder) as server:
        server.decide(["83110"], server.ask()["text"])
        assert server.ask()["text"] is None
    rows = [row for row in read(folder / "decided.csv") if row["decision"] != "skip"]
    remarks = [("?", "see p. 4", "Ann"), ("", "", "Bo"), ("", "", "person")]
    assert [(row["unsure"], row["note"], row["by"]) for row in rows] == remarks
    final(folder, "--by", "Cy")
    by = {row["occ1"]: row["decided_by"] for row in read(folder / "final.csv")}
    assert (by["smith"], by["clerk"], by["farmer"]) == ("person", "Bo", "model")


def test_names_of_nobody_are_refused_and_sigterm_ends_it_as_ctrl_c(folder):
    with Serving(folder) as server:
        text = server.ask()["text"]
        for name in ("model", "guess", "NA", " ", "A\nB", "A\0B", "A\u2028B"):
            assert "is not a valid name" in server.decide("none", text, status=400, by=name)["error"]
        server.decide("none", text, by="Zoë O'Hara")
        apply, _ = server.end(signal.SIGTERM)
        assert apply[2] == "apply" and "\n1 text decided.\n" in server.output.read_text()
    [row] = read(folder / "decided.csv")
    assert (row["decision"], row["by"]) == ("none", "Zoë O'Hara")


def saved(rows, encoding="utf-8", **how):
    """A file of decisions as another program saves it."""
    out = io.StringIO()
    csv.writer(out, **how).writerows(rows)
    return out.getvalue().encode(encoding)


@pytest.mark.parametrize(
    "save",
    [
        lambda rows: saved(rows).rstrip(),
        lambda rows: saved(rows, delimiter=";", quoting=csv.QUOTE_ALL),
        lambda rows: saved([[*reversed(row)] for row in rows], "utf-8-sig"),
        lambda rows: saved([[*row, "mine"] for row in rows], "utf-16", delimiter="\t"),
        # R, with the numbers of the rows and NA for empty cells
        lambda rows: saved([[i or "", *(cell or "NA" for cell in row)] for i, row in enumerate(rows)]),
    ],
)
def test_decisions_that_another_program_has_saved(folder, few_titles, save):
    key, path = Codes([*hisco_key(), "NA"], "hisco", {}), folder / "decided.csv"

    def opened(coded="coded.csv"):
        decided = Decisions(CodedFile(str(folder / coded)), key, str(path))
        return decided, [(text.text, decided.made.get(i)) for i, text in enumerate(decided.texts)]

    decided, _ = opened()
    for text, answer in zip(decided.texts, ("none", ["83110", "NA"], ["NA"])):
        decided.decide(text.id, answer, "", False, "", "")
    decided.decide(decided.texts[3].id, "skip", "", True, "- no; idea", "Bo")
    before = opened()[1]
    content = save(list(csv.reader(io.StringIO(path.read_text("utf-8-sig")))))
    path.write_bytes(content)
    decided, after = opened()
    old, new = ([replace(made, place="") for _, made in each if made] for each in (before, after))
    assert old == new
    assert (folder / "decided.csv.before").read_bytes() == content
    decided.decide(decided.texts[4].id, ["61110"], "", False, "", "Cy")
    assert [row["by"] for row in read(path)] == ["", "", "", "Bo", "Cy"]
    # a text that is gone takes no decision of others with it
    coded = (folder / "coded.csv").read_text()
    (folder / "coded.csv").write_text(coded.replace("clerk,en", "clark,en"))
    decided, again = opened()
    assert [made for _, made in again].count(None) == 1 and len(read(path)) == 5
    assert re.search(r"decisions that are not used \(1\).*: line [23]: 'clerk'$", decided.sheets.unused[0])


def test_texts_that_are_known_are_not_asked_for(folder):
    rows = [["SMITH", "en", "83990", "Ann"], ["clerk", "", "39310", ""], ["farmers", "da", "83110", ""]]
    rows += [["farmer", "en", "83110", "guess"], ["farmer", "", "83110", "model"]]
    known = write(folder / "known.csv", [["occ1", "lang", "hisco_1", "decided_by"], *rows])
    more = ["--key", "hisco", "--known", known]
    with Serving(folder, *more, coded="texts.csv") as server:
        asked, near = [], []
        while text := server.ask()["text"]:
            asked.append(text["text"])
            near += text["near"]
            server.decide(["61110"], text)
    assert asked == ["farmer", SCRIPT, "=1+1\nsmid"] and {"text": "farmers", "codes": ["83110"]} in near
    codes = final(folder, *more, coded="texts.csv")
    assert (codes["smith"], codes["clerk"], codes["farmer"]) == (["83990"], ["39310"], ["61110"])
    by = {row["occ1"]: row["decided_by"] for row in read(folder / "final.csv")}
    assert (by["smith"], by["clerk"], by["farmer"]) == ("Ann", "known", "person")
    assert "known.csv: 3 known texts" in server.output.read_text()


def test_the_page_is_opened_in_a_browser(folder):
    opened = folder / "opened.txt"
    (folder / "browser").write_text(f'#!/bin/sh\necho "$1" > "{opened}"\n')
    (folder / "browser").chmod(0o755)
    with Serving(folder, BROWSER=f"{folder}/browser %s", DISPLAY=":0") as server:
        wait_until(lambda: opened.exists() and opened.read_text().strip())
        assert opened.read_text().strip() == server.address


@pytest.mark.parametrize("delimiter", [",", "/"])
def test_the_command_that_it_ends_with_works(folder, delimiter):
    """Also if the decisions, in a sheet with commas, are of a file with other delimiters and no quotes."""
    coded = folder / "my texts.csv"
    coded.write_text(f'job{delimiter}lang\n"smith{delimiter}en\nclerk{delimiter}en\n')
    more = ["--key", "HISCO", "--column", "job", "--by", "Ann B", "--no-quotes"]
    more += ["--delimiter", "/"] * (delimiter == "/")
    (folder / "my texts.final.csv").touch()
    with Serving(folder, *more, coded=coded.name, decisions=None) as server:
        server.decide(["83110"])
        command, train = server.end()
    assert command[:3] == ["histocc", "review", "apply"]
    run(*command[2:])
    final = str(folder / "my texts.final1.csv")
    assert train == ["histocc", "train", final, "--formatter", "hisco", "--input-col", "job"]
    codes = [(row["hisco_1"], row["decided_by"]) for row in read(final)]
    assert sorted(codes) == [("", ""), ("83110", "Ann B")]


def test_a_table_with_codes_of_ones_own(folder):
    """They are offered, read as training data are, and kept if nobody decides."""
    rows = [["smith", "8-31.10", "na"], ["chemist", "1110", ""], ["clerk", "", ""]]
    write(folder / "texts.csv", [["occ1", "hisco_1", "hisco_2"], *rows])
    with Serving(folder, "--key", "hisco", coded="texts.csv") as server:
        offered = {}
        while text := server.ask()["text"]:
            offered[text["text"]] = [choice["code"] for choice in text["choices"]][:1]
            server.decide(["41025"] if text["text"] == "clerk" else "skip", text)
    assert offered == {"smith": ["83110"], "chemist": ["01110"], "clerk": ["30000"]}  # by its title
    codes = final(folder, "--key", "hisco", coded="texts.csv")
    assert codes == {"smith": ["8-31.10", "na"], "chemist": ["1110"], "clerk": ["41025"]}
    titles = {row["occ1"]: row["title_1"] for row in read(folder / "final.csv")}  # also where nobody decided
    assert titles["chemist"] == "Chemist, General" and titles["smith"] == "Blacksmith, General"


TRADES = {"baker": "77610", "smith": "83110", "weaver": "75432", "farmer": "61110"}
PLACES = ["ashby", "barrow", "corby", "derby", "ely", "filey", "goole", "hull"]


def test_decisions_teach(folder):
    """Choices, order, the share that is right and --fill follow from them; undo takes that back."""
    rows = [[f"{trade} {place}", "en"] for trade in TRADES for place in PLACES]
    write(folder / "texts.csv", [["occ1", "lang"], *rows, ["1850", "en"], *[["weaver kent", "en"]] * 2])

    def shown(server, text):
        return server.ask("other", id=text["id"], stay=True)

    def first_choice(server, code, guessed):
        def is_shown():
            state = shown(server, kent)
            return state["text"]["choices"][0]["code"] == code and bool(state["interval"]) == guessed

        wait_until(is_shown, lambda: shown(server, kent))

    coded = CodedFile(str(folder / "texts.csv"), system="hisco")
    texts = {text.text: {"id": text.id, "seen": ""} for text in coded.texts.values()}
    kent = texts["weaver kent"]
    with Serving(folder, "--key", "hisco", coded="texts.csv") as server:
        assert server.ask("new")["text"]["text"] == "weaver kent"  # most rows
        weavers = [texts[f"weaver {place}"] for place in PLACES]
        for place in PLACES:
            server.decide([TRADES["baker"]], texts[f"baker {place}"])
        server.decide([TRADES["farmer"]], texts["farmer ely"])
        assert shown(server, kent)["accuracy"] is None
        for text in weavers:
            server.decide(["75432", "83110"] if text == weavers[0] else ["75432"], text)
        first_choice(server, "75432", True)
        # guesses of the moment may lack the last decisions
        wait_until(lambda: shown(server, kent)["text"]["choices"][0]["prob"] > 0.5)
        state = shown(server, kent)
        low, high = state["interval"]
        assert low <= state["accuracy"] <= high and low >= 10 / 35
        wait_until(lambda: server.ask("new")["text"]["text"] != "weaver kent", lambda: server.ask("new"))
        final(folder, "--key", "hisco", "--fill", coded="texts.csv")
        before = (folder / "final.csv").read_bytes()
        rows = {row["occ1"]: row for row in read(folder / "final.csv")}
        guess, decided = rows["weaver kent"], rows["weaver ashby"]
        assert (guess["hisco_1"], guess["decided_by"], guess["needs_review"]) == ("75432", "guess", "0")
        conf = float(guess["conf"])  # of the answer, which lacks the second code that one weaver has
        wait_until(lambda: shown(server, kent)["text"]["choices"][0]["prob"] > conf > 0.5, lambda: guess)
        assert (decided["hisco_2"], decided["decided_by"], decided["conf"]) == ("83110", "person", "")
        assert (rows["1850"]["hisco_1"], rows["1850"]["decided_by"]) == ("", "")  # nothing is like it
        final(folder, "--key", "hisco", "--fill", "--overwrite", coded="texts.csv")
        assert (folder / "final.csv").read_bytes() == before
        for text in weavers:
            server.decide("undo", shown(server, text)["text"])
        first_choice(server, "75400", False)  # of the most similar title


def test_a_decision_that_was_taken_back_is_no_guess(folder, few_titles):
    rows = [[f"{trade} {place}", "en"] for trade in TRADES for place in PLACES]
    write(folder / "texts.csv", [["occ1", "lang"], *rows])
    coded = CodedFile(str(folder / "texts.csv"), system="hisco")
    decisions = Decisions(coded, Codes(hisco_key(), "hisco", {}), str(folder / "decided.csv"))
    threading.Thread(target=decisions.learn, daemon=True).start()
    for text in decisions.texts[:12]:
        decisions.decide(text.id, ["99910"] if text is decisions.texts[0] else ["75400", "83110"], "")
    wait_until(lambda: len(decisions.taught) == 12)
    codes = [choice["code"] for choice in decisions.show(decisions.texts[0].id, "one")["text"]["choices"]]
    assert "99910" in codes
    decisions.has_changed.clear = lambda: time.sleep(60)  # nothing is learned anew
    decisions.decide(decisions.texts[0].id, "undo", "99910")
    choices = decisions.show(decisions.texts[0].id, "one")["text"]["choices"]
    assert "99910" not in [choice["code"] for choice in choices]
    probs = [choice["prob"] for choice in decisions.show(decisions.texts[20].id, "one")["text"]["choices"]]
    assert probs[0] != "" and [prob for prob in probs if prob] == sorted(filter(None, probs), reverse=True)


def test_a_port_in_use_and_a_file_that_another_program_changes(folder):
    with Serving(folder) as server:
        port = server.address.split(":")[2].partition("/")[0]
        with Serving(folder, "--port", port, decisions="other.csv") as second:
            assert re.search(rf"Port {port} is in use; using \d+ instead", second.output.read_text())
            assert second.ask()["text"]["text"] == "smith"
        path, text = folder / "decided.csv", server.ask()["text"]
        before = path.read_bytes()
        with open(path, "ab") as other, Serving(folder) as second:
            fcntl.flock(other, fcntl.LOCK_EX)  # as while another server writes
            assert CHANGED in server.decide("none", text, status=507)["error"]
            fcntl.flock(other, fcntl.LOCK_UN)
            second.decide("none", text)
        after = path.read_bytes()
        assert CHANGED in server.decide("none", text, status=507)["error"] and len(after) > len(before)
        assert path.read_bytes() == after


def test_a_decision_that_finds_no_room_is_not_in_the_file(folder, few_titles):
    coded, key = CodedFile(str(folder / "coded.csv")), Codes([*hisco_key(), "3"], "hisco", {})
    decided = Decisions(coded, key, str(folder / "decided.csv"))

    with pytest.raises(ValueError, match="neither a list of codes nor none, skip or undo"):
        decided.decide(decided.texts[0].id, "3", "")

    def refused():
        decided.decide(decided.texts[0].id, "none", "")

    kind, said = in_child(refused, resource.RLIMIT_FSIZE, decided.size + 9)
    assert kind is TrainingError and said.startswith(f"{decided.path}: the file is too large")
    assert os.path.getsize(decided.path) == decided.size
    refused()
    assert decisions(folder) == [(decided.texts[0].text, "none")]
