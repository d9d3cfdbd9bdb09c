"""Rows that say something by the row above: texts such as do., and blank cells of --fill-down."""

import pytest
from helpers import run_here, words
from preparing import codes_of, prepare, written
from test_review import read, run, write
from test_review_page import Serving

from histocc import prepare as command
from histocc.data.records import Table, is_ditto
from histocc.job.config import finetune_parser

WORDS = "do|Do.|d:o|D:o.|dº|d.º|dto|dtto|ditto.|dito|idem|ídem|i\u0301dem|id.|ib.|Ibid.|ibid|desgl.|Desgl"
MARKS = '"|" " "|„|„ „|,,|, ,|,, ,|\'\'|-"-|– „ –|–„–|— ” —|--,,--|〃 〃|»|«'
WORDS += (
    "|dsgl.|d/o|d.o|d.o.|do .|(do.)|dgl|the same|same as above|The same as above|le même|la m\u00eame|la meme"
    "|comme dessus|comme ci-dessus|wie oben|derselbe|dieselbe|samme|Samma|som ovenfor|som ovan|als boven"
    "|dezelfde|zelfde|come sopra|lo stesso|ibidem"
)
MARKS += "|//|-//-|--//--"
OTHERS = 'dock|d|o|do it|id|-|--|.|,|\'|same|none|/|"-"|smed do.|derselbe Schmied|the same smith|"smed"||…'
TRADES = words("baker clerk cooper dyer farmer glazier mason miller sailor smith tailor")
IN_TURN = [row for i in range(70) for row in (TRADES[i * 5 % 11], "do.")]  # as in a register


def test_which_texts_repeat_the_row_above():
    known = f"{WORDS}|ders.|do. do.|as above|do.   |do.\u200b|{MARKS}"
    assert [text for text in known.split("|") if not is_ditto(text)] == []
    assert [text for text in OTHERS.split("|") if is_ditto(text)] == []


@pytest.mark.parametrize(
    ("texts", "left", "more"),
    [
        (IN_TURN, None, {}),
        ([row for trade in TRADES for row in (trade, "do.", '"')], None, {}),  # a directory, by trade
        (["baker", "do.", "smith"], None, {}),
        (["do.", '"', "smith", "do."], (2, "no row is above"), {}),
        (sorted(IN_TURN), (70, "the texts are sorted"), {}),
        (sorted(IN_TURN)[::-1], (70, "the texts are sorted"), {}),
        (sorted(IN_TURN), None, {"ditto": "all"}),
        (["smith", "do.", "smith"], (1, "rows have weights"), {"weight_col": "n"}),
        (["smith", "do.", "smith"], (1, "rows were chosen from others"), {"header": "rows,decision,id"}),
    ],
)
def test_dittos_without_a_row_above_have_no_text(tmp_path, monkeypatch, texts, left, more):
    monkeypatch.setattr("histocc.data.tables.CHUNK", 110)
    header = more.get("header", "a,b,n")
    rows = "".join(f'"{text.replace(chr(34), chr(34) * 2)}",83110,1,1,1\n' for text in texts)
    settings = {name: value for name, value in more.items() if name != "header"}
    result = prepare(tmp_path, f"occ1,hisco_1,{header}\n{rows}", **settings)
    number, why = left or (0, "")
    assert len(result.rejected) == number
    assert all(f"ditto left, because {why}" in kind for kind in result.report["rejected"])
    assert result.report["dittos_filled"] == sum(map(is_ditto, texts)) - number
    above, expected = "", []
    for text in texts:
        above = above if is_ditto(text) else text
        expected += [above] * (not is_ditto(text) or bool(above) and (left is None or number == 2))
    assert result.texts == expected


def test_rows_from_the_middle_of_a_file(tmp_path):
    """Further columns and a blank language come from above, as the text."""
    rows = "smed,jern,da,a\n,,,\ndo.,,,\nvæver,,,b\nd:o,uld,sv,\n–„–,,,\nidem,do.,,c\n"
    path = written(tmp_path / "a.csv", f"occ1,shop,lang,x\nsmed,jern,da,a\ndo.,,,\nid.,guld,,\n{rows}")
    how = {"language_col": "lang", "fill_down": ["x"]}
    table = Table(path, (), ["occ1", "shop"], (), ["x"], **how)
    [whole] = table.records()
    assert whole.texts[:3] == ["smed ␟ jern", "smed ␟ jern", "smed ␟ guld"]
    assert whole.texts[4:6] == ["", ""]
    assert whole.texts[6:] == ["væver", "væver ␟ uld", "væver ␟ uld", "væver ␟ uld"]
    assert whole.languages == ["da"] * 4 + ["", "", "", "sv", "sv", "sv"]
    assert [row[3] for row in zip(*whole.filled)] == ["a"] * 6 + ["b"] * 3 + ["c"]
    assert [row[3] for row in zip(*whole.columns)][1] == ""  # what is copied stays


def test_a_chunk_may_begin_with_one_below_rows_that_cannot_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr("histocc.data.tables.CHUNK", 2)
    rows = "occ1,lang\nsmed,en\nvæver,da\n1,2,3\n1,2,3\ndo.,\n〃,se\nd:o,\n"
    table = Table(written(tmp_path / "a.csv", rows), (), ["occ1"], language_col="lang")
    for _ in range(2):  # rows that are read again are counted once
        found = [(row.text, row.language) for row in table]
        assert found == [("smed", "en"), *[("væver", "da")] * 2, *[("væver", "se")] * 2]
        assert "〃 in 3 rows" in table.about_dittos()


def test_the_flag_has_a_value_or_none():
    for text, value in {"": None, "--ditto": "all", "--ditto all": "all", "--ditto none": "none"}.items():
        assert finetune_parser().parse_args(["--dataset=x", *text.split()]).ditto == value
    for value, read_as in {True: "all", False: "none", "none": "none"}.items():  # of R, and of earlier runs
        assert finetune_parser().checked({"ditto": value}, "") == {"ditto": read_as}


def test_codes_that_are_written_once(tmp_path):
    rows = "smith,83110,61110\nmaster smith,,\nbaker,77610,\nbread baker, ,\nold baker,,\n"
    path = written(tmp_path / "a.csv", f"occ1,hisco_1,hisco_2\n{rows}")
    given = [path, "--target-cols", "hisco_1", "--save-path", tmp_path / "out"]
    said = run_here(command.main, *given)
    assert "Note: rows without a first code: 3; add --fill-down hisco_1 if" in said
    said = run_here(command.main, *given, "--fill-down", "hisco_1")
    assert "5 for training" in said and "no first code" not in said
    both = ["hisco_1", "hisco_2"]
    result = prepare(tmp_path, f"occ1,hisco_1,hisco_2\n{rows}", cols=both, fill_down=both)
    assert codes_of(result) == [["83110", "61110"]] * 2 + [["77610"]] * 3  # a row with a code has its own


def test_a_row_without_a_text_has_no_code_of_another(tmp_path, monkeypatch):
    """Rows below it have the code all the same, also in the next chunk."""
    rows = "smith,83110\n,\nold smith,\nNA,\n,\nmaster smith,\n,61110\nfarmer,\n"
    path = written(tmp_path / "a.csv", f"occ1,hisco_1\n{rows}")
    for chunk in (2, 4096):
        monkeypatch.setattr("histocc.data.tables.CHUNK", chunk)
        codes = [row.codes for row in Table(path, (), ["occ1"], ["hisco_1"], fill_down=["hisco_1"])]
        assert codes == [["83110"], [], ["83110"], [], [], ["83110"], ["61110"], ["61110"]]


CODED = ["id", "occ1", "lang", "hisco_1", "prob_1", "conf", "needs_review"]
REGISTER = [("mason", "en"), ("do.", ""), ("d:o", "en"), ("", ""), ("do.", ""), ("smith", "en"), ("id.", "")]


def test_reviewed_with_their_rows(tmp_path):
    """Decisions and learned codes reach the rows of their text, but none that somebody has decided alone."""
    codes = ["80110", "80110", "80110", "", "", "83110", "83110"]
    rows = [[i, *row, code, "0.9", "0.9", "0"] for i, (row, code) in enumerate(zip(REGISTER, codes))]
    coded, final, sheet = (tmp_path / name for name in ("coded.csv", "final.csv", "sheet.csv"))
    write(coded, [CODED, *rows])

    def decide(path, decisions, *more):
        run("make", path, "--output", sheet, "--overwrite", *more)
        made = read(sheet)
        for row in made:
            row["decision"] = decisions.get(row["text"], "")
        write(sheet, [[*made[0]], *([*row.values()] for row in made)])
        return {row["text"]: row["rows"] for row in made}

    assert decide(coded, {"mason": "61110"}) == {"mason": "3", "smith": "2"}
    said = run("apply", sheet, "--to", coded, "--output", final, "--by", "Ann", "--fill")
    assert "in 4 rows: 4 with the text of the row above" in said and "2 guessed (decided_by: guess)" in said
    found = read(final)
    assert [row["hisco_1"] for row in found[:3]] == ["61110"] * 3 and found[1]["occ1"] == "do."
    assert [row["decided_by"] for row in found] == ["Ann"] * 3 + ["model"] * 2 + ["guess"] * 2
    found[6] |= {"hisco_1": "01110", "decided_by": "Bo"}
    write(final, [[*found[0]], *([*row.values()] for row in found)])
    assert decide(final, {"smith": "none"}) == {"smith": "2"}
    run("apply", sheet, "--to", final, "--output", tmp_path / "last.csv", "--by", "Cy")
    last = [(row["hisco_1"], row["decided_by"]) for row in read(tmp_path / "last.csv")]
    assert last[5:] == [("", "Cy"), ("01110", "Bo")] and last[:3] == [("61110", "Ann")] * 3
    assert set(decide(coded, {}, "--ditto", "none")) == {"mason", "do.", "d:o", "smith", "id."}


@pytest.mark.processes
def test_the_page_offers_none_and_learned_codes_reach_them(tmp_path):
    rows = [[text, "en"] for trade in TRADES for text in (f"{trade} of kent", "do.", f"{trade} of ely", '"')]
    write(tmp_path / "texts.csv", [["occ1", "lang"], *rows])
    with Serving(tmp_path, "--key", "hisco", coded="texts.csv") as server:
        shown = [server.ask()["text"]]
        while len(shown) < 6 and (text := server.decide(["83110"], shown[-1])["text"]):
            shown.append(text)
        assert not any(is_ditto(text["text"]) for text in shown) and {text["rows"] for text in shown} == {2}
    given = ["--to", tmp_path / "texts.csv", "--key", "hisco", "--guesses", "none", "--fill"]
    run("apply", tmp_path / "decided.csv", *given, "--output", tmp_path / "final.csv")
    final = read(tmp_path / "final.csv")
    for row, below in zip(final[::2], final[1::2]):
        assert is_ditto(below["occ1"]) and {**row, "occ1": ""} == {**below, "occ1": ""}
    assert {row["decided_by"] for row in final} == {"person", "guess"}
