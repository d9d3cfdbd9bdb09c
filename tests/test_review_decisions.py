"""Review: what may be written into a sheet, what is learned, how people agree, how accurate a file is."""

import random
import re

import pytest
from test_review import CODES, HEADER, apply, coded_rows, filled, folder, make, plain, read, run, write  # noqa: F401

from histocc.review import __main__ as review
from histocc.review import learn
from histocc.review.learn import Learner
from histocc.review.sheet import CodedFile, CodedText, Codes, pair_of

HISCO = "1=83110, 3=61110, code 3=3, 2.0=3, 1&3=83110+61110, 1 & 1110=83110+01110, 1 & 1=83110, NONE="
TITLED = "01110=Chemist, 3=Farmer & Hand, 41025=Code clerk, 61110=x, 83110=X, 5=y"
TITLES = "  chemist=01110, FARMER  & hand=3, 1 & chemist=83110+01110, code Clerk=41025"
BOOK = "4-10.25=41025, 41025.0=41025, 4 1025=41025"


@pytest.mark.parametrize(
    "system, key, of_text, decisions",
    [
        ("hisco", "83110 61110 3 01110 41025", "83110 3 61110", f"{HISCO}, {BOOK}, {TITLES}"),
        ("own", "1:2:3 4:5 7:8 1:2", "4:5 1:2:3 7:8", "1:2=1:2, 1 & 7:8=4:5+7:8, 2&3=1:2:3+7:8"),
        ("own", "007 7 B", "7 B", "007=007, 7=7, 1&2=7+B"),
        ("own", "0110 R&D B&C&E B", "R&D", "R&D=R&D, B & R&D=B+R&D, B&C&E & 1=B&C&E+R&D, 110=0110"),
    ],
)
def test_what_may_be_written(system, key, of_text, decisions):
    titles = (pair.split("=") for pair in TITLED.split(", "))
    codes, text = Codes(key.split(), system, dict(titles)), CodedText("smith", "en", 1, 0.0, of_text.split())
    for cell, _, expected in (pair.partition("=") for pair in decisions.split(", ")):
        assert codes.decision(cell, text, 3) == tuple(filter(None, expected.split("+"))), cell
    assert codes.decision(" Skip", text, 3) is None
    for cell in ("&", "/", "code", "1 &", "x", "y"):
        with pytest.raises(ValueError):
            codes.decision(cell, text, 3)


def test_a_language_is_one_however_it_is_spelled():
    assert pair_of("Smith ", "DA") == pair_of("smith", "Danish") and pair_of("a", "") == pair_of("a", "unk")
    names = {"se": "sv sv-SE Swedish Svenska", "ge": "de DE German", "no": "nb nn", "gr": "el"}
    for name, others in names.items():
        assert {pair_of("a", other) for other in others.split()} == {pair_of("a", name)}


@pytest.mark.parametrize("share, several", [(0.4, 0), (0.6, 0), (0.8, 0), (0.6, 1 / 3), (0.9, 1 / 3)])
def test_what_a_confident_model_that_is_often_wrong_gets_right_is_said(share, several):
    """An answer is right if it has all codes of its text. several: share of the texts with two of them."""
    draw, codes = random.Random(1), [f"{number:05}" for number in range(400)]
    texts, true = [], []
    for _ in range(500):
        right = draw.sample(codes, 1 + (draw.random() < several))
        text = " and ".join("".join(draw.choices("abcdefghij", k=9)) for _ in right)
        answer = right if draw.random() < share else draw.choice([right[:1], draw.sample(codes, 1)])
        probs = ["0.95"] * len(answer)
        texts.append(CodedText(text, "en", 1, codes=answer, probs=probs, answer=answer, doubt=0.05))
        true.append({*right})
    learner = Learner(texts, codes)
    guesses = learner.learn({i: tuple(true[i]) for i in range(150)})
    right = sum({*learner.answer(guesses, i)} == true[i] for i in range(150, 500))
    assert abs(guesses.sure[150:].mean() - right / 350) < 0.1
    low, said, high = guesses.right
    assert low < said < high and low < (150 + right) / 500 < high


def test_guesses_stand_on_the_answers_of_the_model_and_on_similar_texts():
    """A language makes texts no more similar; a text like no other has the model's answer, or none."""
    names = [f"{name} {trade}" for trade in ("weaver", "smith") for name in ("ann", "bo", "cy", "di", "ed")]
    texts = [CodedText(name, "en", 1) for name in (*names, "old weaver", "1850")]
    texts.append(CodedText("xyz", "en", 1, codes=["3", "4"], probs=["0.9", "0,1"]))
    learner = Learner(texts, "1234")
    guesses = learner.learn({i: ("1",) if i < 5 else ("2",) for i in range(10)})
    assert [learner.answer(guesses, i) for i in (10, 12)] == [["1"], ["3"]]
    assert learner.nearest(10, [5, 0, 11]) == [0] and guesses.sure[10] > 0.5
    assert learner.codes_of(guesses, 11) == [] and guesses.sure[11] == 0
    assert [code for code, _ in learner.codes_of(guesses, 12)] == ["3", "4"]
    of_none = Learner([], "12").learn({})
    assert (of_none.order, of_none.right) == ([], (1.0, 1.0, 1.0))


def test_a_text_that_is_skipped_teaches_nothing_and_a_decided_one_is_not_drawn():
    names = ["ann smith", "bo smith", "cy weaver", "di weaver", "ed baker"]
    texts = [CodedText(name, "en", 1) for name in names]
    texts.append(CodedText("flo miller", "en", 1, codes=["1"], answer=["1"], decided="Bo"))
    learner = Learner(texts, "12")
    assert sorted(learner.draws) == [0, 1, 2, 3, 4]
    taught = {0: ("1",), 2: ("2",)}
    with_skipped = learner.learn(taught | {4: None})
    assert learner.learn(taught).taught == with_skipped.taught == 3 != learner.learn(taught | {4: ()}).taught
    assert 4 not in with_skipped.order


def test_of_too_many_decisions_the_latest_teach(monkeypatch):
    monkeypatch.setattr(learn, "MAX_TAUGHT", 2)
    learner = Learner([CodedText(f"{name} smith", "en", 1) for name in "abcd"], "12")
    guesses = learner.learn({0: ("1",), 1: ("2",), 2: ("2",)})
    assert {code for text in range(4) for code, _ in learner.codes_of(guesses, text)} == {"2"}


def test_agreement_of_two_people(folder):
    """On sheets of the same draw, whose differences a third person decides."""
    rows = make(folder, "sample.csv", "--sample", "--rows", 400)
    keys = [plain(row) for row in rows]
    mine = dict.fromkeys(keys, "1") | {("smith", "en"): "blacksmith, general", keys[-1]: "skip"}
    other = mine | {("farmer", "en"): "6-11.15", ("clerk", "en"): "none", ("clerk", "da"): "61110 & 83110"}
    ann = filled(folder, mine, "ann.csv", rows)
    bo = filled(folder, other, "bo.csv", make(folder, "again.csv", "--sample", "--rows", 400))
    said = run("agreement", ann, bo, "--output", folder / "differ.csv").splitlines()
    n = len(keys) - 1
    assert said[0].startswith(f"{n} texts decided in both")
    shares = [float(re.search(r": ([0-9.]+) %", line)[1]) for line in said[1:5]]
    assert shares == [round(100 * (n - differ) / n, 1) for differ in (3, 2, 2, 2)]
    differ = read(folder / "differ.csv")
    assert {(row["text"].lower(), row["first"], row["second"]) for row in differ} == {
        ("farmer", "61110", "61115"),
        ("clerk", "39310", "none"),
        ("clerk", "61110", "61110 & 83110"),
    }
    third = filled(folder, {("farmer", "en"): "61115"}, "third.csv", differ)
    apply(folder, third)
    farmers = [row for row in read(folder / "final.csv") if row["occ1"].lower() == "farmer"]
    assert {row["hisco_1"] for row in farmers} == {"61115"}
    numbered = filled(folder, {plain(differ[0]): "1"}, "x.csv", differ)
    assert "this text has no code number 1" in apply(folder, numbered, code=2)
    assert "takes two files" in run("agreement", ann, code=2)
    assert "is named twice" in run("agreement", ann, ann, code=2)
    # words have no levels
    key = write(folder / "key.csv", [["system_code", "code"], ["trade", "0"], ["transport", "1"]])
    columns = ["text", "language", "decision", "id"]
    rows = ["a", "en", "trade", "t-1"], ["b", "en", "trade", "t-2"]
    cy = write(folder / "cy.csv", [columns, *rows])
    di = write(folder / "di.csv", [columns, ["a", "en", "transport", "t-1"], rows[1]])
    said = run("agreement", cy, di, "--key", key).splitlines()
    assert len(said) == 2 and said[1].startswith("  all codes: 50.0 %")
    one, two = "y" * 50 + "n" * 50, "y" * 35 + "n" * 15 + "y" * 20 + "n" * 30
    assert review.kappa(one, two) == pytest.approx(0.3)
    write(folder / "one.csv", [columns, *([text, "en", "trade", f"t-{text}"] for text in "ab")])
    said = run("agreement", folder / "one.csv", di, "--key", key)
    assert "all codes: 50.0 %" in said
    assert f"Cohen's kappa is not defined, because all answers of {folder / 'one.csv'} are the same" in said


def test_each_action_has_a_help_of_its_own():
    said = run("--help")
    assert all(f"\n  {action} " in said for action in review.ABOUT) and len(said.splitlines()) < 20
    shown = {action: review.get_args_parser(action).format_help(True) for action in review.ABOUT}
    actions = {"training-data": {"apply"}, "output": {"make", "apply", "agreement"}}
    for name, having in {**actions, "ditto": {*shown} - {"agreement"}}.items():
        assert {action for action, text in shown.items() if f"  --{name}" in text} == having
    every = review.get_args_parser().named
    shown_flags = {*re.findall(r"  --([a-z-]+)", "".join(shown.values()))}  # one spelling of each
    assert shown_flags >= {action.option_strings[0][2:] for action in every.values()}


class TestReport:
    def test_the_interval_covers_the_truth_as_often_as_it_says(self):
        draw = random.Random(7)
        covered = 0
        for _ in range(200):
            accuracy = draw.uniform(0.5, 0.99)
            said = review.share(sum(draw.random() < accuracy for _ in range(100)), 100)
            interval = said.partition("interval")[2].split("to")
            low, high = (float(part.strip(" %)")) / 100 for part in interval)
            covered += low <= accuracy <= high
        assert 0.90 <= covered / 200 <= 0.995

    def test_by_the_commands(self, folder):
        """Smiths, put right by a sheet, and Danish clerks are wrong; drawn rows count as coded."""
        truth = {("smith", "en"): "2", ("clerk", "da"): "2"}
        rows = make(folder, "sample.csv", "--sample", "--rows", 400)
        sample = filled(folder, {plain(row): truth.get(plain(row), "1") for row in rows}, "drawn.csv", rows)
        output = run("report", sample, "--to", folder / "coded.csv")
        accuracy = float(re.search(r"([0-9.]+) % .* of its rows", output)[1])
        assert abs(accuracy - 100 * 44 / 57) < 6 and "from 400 drawn rows" in output, output
        sheet = filled(folder, {("smith", "en"): "2"})
        output = run("report", sample, sheet, "--to", folder / "coded.csv")
        corrected = float(output.partition("chosen texts: ")[2].partition("%")[0])
        assert abs(corrected - 100 * 54 / 57) < 4 and f"{accuracy} %" in output, output
        rows[0]["decision"] = "skip"
        output = run("report", filled(folder, {}, "skip.csv", rows), "--to", folder / "coded.csv")
        assert "drawn rows without a decision, left out: " in output

    def test_codes_that_are_one_answer_count_together(self, folder):
        """Of the greedy decoder: conf is not the first code's probability."""
        rows = [
            [*row[:-2], f"{float(row[4] or 0) / 2:.6g}" if row[4] else "", row[-1]] for row in coded_rows()
        ]
        file = CodedFile(str(write(folder / "sets.csv", [HEADER + CODES, *rows])))
        assert not file.alternatives and CodedFile(str(folder / "coded.csv")).alternatives
        text = next(iter(file.texts.values()))
        assert file.answer(text.codes, "") == text.codes and len(text.codes) == 3
