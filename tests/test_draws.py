"""`predict --draws`: codes are drawn as often as their probabilities say; the rules of the page pool them."""

import math
import re
import shutil
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import REPO, read, run_here, write_csv

import finetune
from histocc.evaluate import __main__ as evaluate
from histocc.formatter import hisco_classes
from histocc.model import confidence
from histocc.model.confidence import Confidence, Thresholds
from histocc.predict import __main__ as predict
from histocc.predict.coder import Coded, Coder
from histocc.predict.draws import Draws
from histocc.review import __main__ as review
from histocc.sample.generate import rows as sample_rows
from histocc.text import AS_IS

CODES = ["61110", "61220", "77610", "83110", "99910"]


def draws_of(probs, answer, conf, at_most, number=4000, source="model", unsure=0.0):
    """Return (how often each set of codes is drawn, cells after the draws). unsure: of the map, how much."""
    coder = SimpleNamespace(
        confidence=Confidence(1, {"flat": [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, unsure]}),
        formatter=SimpleNamespace(kind="hisco"),
        thresholds=Thresholds({None: 0.5}, "usual", True, at_most),
        **{"codes": CODES, "decoders": ["flat"], "languages": ["en"], "text_rule": AS_IS, "known": str},
        probabilities=lambda texts, *_, **__: np.array([probs] * len(texts), dtype=np.float32),
    )
    made = Draws(coder, "flat", number, ["hisclass_5"])
    (cells,) = made.cells(["a text"], ["en"], [Coded(answer, [], conf, source=source)])
    shares = Counter(tuple(sorted(cell.split("&"))) for cell in cells[:number])
    return {codes: n / number for codes, n in shares.items()}, dict(zip(made.columns, cells))


def test_one_code_is_drawn_by_its_probability_and_what_is_left_over_goes_to_the_others():
    found, cells = draws_of([0.6, 0.2, 0.1, 0.0, 0.0], ["61110"], 0.6, 1)
    expected = {("61110",): 0.6, ("61220",): 0.4 * 2 / 3, ("77610",): 0.4 / 3}
    assert found == pytest.approx(expected, abs=0.03)
    classes = hisco_classes()
    mean = sum(p * float(classes["hiscam"][code]) for (code,), p in expected.items())
    assert float(cells["expected_hiscam"]) == pytest.approx(mean, rel=1e-5)
    of_class = Counter()
    for (code,), p in expected.items():
        of_class[f"prob_hisclass_5_{classes['hisclass_5'][code]}"] += p
    given = {name: float(cell) for name, cell in cells.items() if name.startswith("prob_")}
    assert {name: p for name, p in given.items() if p} == pytest.approx(of_class, rel=1e-5)
    assert draws_of([0.6, 0.2, 0.1, 0, 0], ["99910"], 0.9, 1, source="trained")[0]["99910",] > 0.88


def test_the_map_of_confidence_does_not_count_for_texts_of_the_training():
    share = {
        source: draws_of([0.6, 0.2, 0.1, 0, 0], ["61110"], 0.9, 1, source=source, unsure=4.0)[0]["61110",]
        for source in ("trained", "model")
    }
    assert share["trained"] == pytest.approx(0.9, abs=0.02) and share["model"] < 0.85


def test_several_codes_are_a_set_in_which_each_is_as_often_as_its_probability_says():
    probs = dict(zip(CODES, (0.9, 0.7, 0.3, 0.05, 0.0)))
    found, _ = draws_of([*probs.values()], ["61110", "61220"], 0.5, 5)
    assert found["61110", "61220"] >= 0.48
    for code, p in probs.items():
        assert sum(share for codes, share in found.items() if code in codes) == pytest.approx(p, abs=0.03)


def test_an_answer_that_is_hardly_sure_is_drawn_as_often_as_its_conf_says():
    found, _ = draws_of([0.29, 0.1, 0.1, 0.05, 0.0], ["61110"], 0.08, 5)
    assert found["61110",] == pytest.approx(0.08, abs=0.02)
    assert sum(share for codes, share in found.items() if "61110" in codes) == pytest.approx(0.29, abs=0.03)


def test_a_map_is_as_uncertain_as_fits_to_other_texts_make_it():
    draw = np.random.default_rng(1)
    probs, none, one = draw.random(600), np.zeros(600), np.ones(600)
    right = draw.random(600) < 0.2 + 0.6 * probs
    fitted = Confidence(1, {"flat": confidence.fit(probs, none, right, one)})
    conf = np.array([0.3, 0.5, 0.7])
    found = fitted.redrawn("flat", conf, draw.standard_normal((2000, 2)))
    assert np.abs(found.mean(1) - conf).max() < 0.01
    resampled = []
    for _ in range(200):
        i = draw.integers(600, size=600)
        again = Confidence(1, {"flat": confidence.fit(probs[i], none, right[i], one)})
        raw = np.interp(conf, 0.2 + 0.6 * np.linspace(0, 1, 99), np.linspace(0, 1, 99))
        resampled.append(again.mapped("flat", *map(confidence.torch.from_numpy, (raw, none[:3]))).numpy())
    assert found.std(1) == pytest.approx(np.std(resampled, axis=0), rel=0.5)
    older = Confidence(1, {"flat": fitted.maps["flat"][:4]})
    assert older.redrawn("flat", conf, np.ones((2, 2))) == pytest.approx(np.stack([conf, conf], 1))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    place = tmp_path_factory.mktemp("draws")
    rows = [row[:3] for row in sample_rows(600, 5) if not row[3]]
    source = write_csv(place / "rows.csv", ("occ1", "lang", "hisco_1"), rows)
    given = ["--dataset", source, "--formatter", "hisco", "--language-col", "lang", "--prior", "none"]
    run_here(finetune.main, *given, "--model-size", "ngrams", "--device", "cpu", "--save-path", place / "run")
    texts = [row[:2] for row in sample_rows(80, 9)]
    return place, write_csv(place / "new.csv", ("occ1", "lang"), [*texts, ("", "en"), *texts[:3]])


def code(trained, name, *more, code=0, source=None, draws=4):
    place, new = trained
    given = ["--model", place / "run", "--input", source or new, "--output", place / name, "--draws", draws]
    said = run_here(predict.main, *given, "--overwrite", *more, code=code)
    return said if code else read(place / name)


def test_a_draw_depends_on_seed_text_language_and_number_alone(trained):
    place, new = trained
    names = [f"draw_{i}" for i in range(1, 5)]
    found = code(trained, "a.csv")
    of_text = {(row["occ1"], row["lang"]): [row[name] for name in names] for row in found}
    assert len({tuple(drawn) for drawn in of_text.values()}) > 20 and of_text["", "en"] == [""] * 4
    assert sum(len(set(drawn)) > 1 for drawn in of_text.values()) > 10
    rows = [(row["occ1"], row["lang"]) for row in reversed(read(new)[40:])]
    other = write_csv(place / "other.csv", ("occ1", "lang"), rows)
    again = code(trained, "b.csv", "--processes", 2, "--batch-size", 3, source=other, draws=6)
    for row in again:  # more draws, too, leave the first ones as they are
        assert [row[name] for name in names] == of_text[row["occ1"], row["lang"]]


def test_known_rows_and_those_that_keep_their_codes_have_them_in_all_draws(trained):
    place, _ = trained
    known = write_csv(place / "known.csv", ("occ1", "hisco_1"), [("Weaver", "75400")])
    source = write_csv(place / "part.csv", ("occ1", "hisco_1"), [("weaver", ""), ("?!", "61110")])
    one, two = code(trained, "c.csv", "--known", known, "--only-missing", "--language", "en", source=source)
    for row, its in ((one, "75400"), (two, "61110")):
        assert {row[f"draw_{i}"] for i in range(1, 5)} == {its}
        assert float(row["expected_hiscam"]) == float(hisco_classes()["hiscam"][its])
    again = code(trained, "d.csv", "--overwrite-columns", source=place / "a.csv")
    assert list(again[0]) == list(read(place / "a.csv")[0])


def test_a_decision_empties_the_draws_until_they_are_drawn_again(trained):
    place, _ = trained
    names, sheet, final = [f"draw_{i}" for i in range(1, 5)], place / "sheet.csv", place / "final.csv"
    code(trained, "g.csv")
    run_here(review.main, "make", place / "g.csv", "--output", sheet, "--rows", 3)
    rows = [{**row, "decision": "02305"} for row in read(sheet)]
    write_csv(sheet, [*rows[0]], [row.values() for row in rows])
    run_here(review.main, "apply", sheet, "--to", place / "g.csv", "--output", final)
    decided = [row for row in read(final) if row["hisco_1"] == "02305"]
    assert decided and all(row["expected_hiscam"] == row["draw_1"] == "" for row in decided)
    again = code(trained, "h.csv", "--only-missing", source=final)
    again = [row for row in again if row["hisco_1"] == "02305"]
    assert all({row[name] for name in names} == {"02305"} and row["expected_hiscam"] for row in again)


def test_what_is_refused(trained):
    place, _ = trained
    source = write_csv(place / "taken.csv", ("draw_1", "occ1"), [("x", "weaver")])
    assert "several columns 'draw_1'" in code(trained, "e.csv", "--language", "en", code=2, source=source)
    for number in (0, 1, 10_000, "x"):
        assert "not a whole number from 2 to 100" in code(trained, "e.csv", code=2, draws=number)
    said = code(trained, "e.csv", "--raw-confidence", code=2)
    assert "--draws and --raw-confidence are mutually exclusive" in said
    unfitted = SimpleNamespace(confidence=Confidence())
    with pytest.raises(Exception, match="evaluate CODED.csv --model m --fit-confidence") as error:
        Coder.need_fitted(unfitted, "--draws", ["greedy"], "m")
    flags = re.findall(r"--[a-z-]+", str(error.value).partition("evaluate")[2])
    assert set(flags) <= set(evaluate.get_args_parser()._option_string_actions)


@pytest.mark.parametrize("language, command", [("python", [sys.executable]), ("r", ["Rscript"])])
def test_the_rules_of_the_page(language, command, tmp_path):
    """A slope of exactly known draws, without a λ that matters."""
    if language == "python":
        pytest.importorskip("pandas")
    elif not shutil.which("Rscript"):
        pytest.skip("needs Rscript")
    page = (REPO / "docs" / "draws.md").read_text(encoding="utf-8")
    script = (REPO / "examples" / "rubin.R").read_text(encoding="utf-8")
    if language == "python":
        script = re.search(r"^```python\n(.*?)^```", page, re.M | re.S)[1]
    (tmp_path / "page").write_text(script)
    (tmp_path / "histocc").symlink_to(REPO / "histocc")
    draw = np.random.default_rng(1)
    codes, scores = CODES, {code: float(hisco_classes()["hiscam"][code]) for code in CODES}
    years, drawn = 1850 + np.arange(60), draw.choice(codes, (60, 20))
    drawn[0, :] = "-1"  # a code without a score
    y = np.vectorize(lambda code: scores.get(code, math.nan))(drawn)
    rows = [(year, *row, 60 + 3 * (i % 2)) for i, (year, row) in enumerate(zip(years, drawn))]
    names = ("year", *(f"draw_{i}" for i in range(1, 21)), "expected_hiscam")
    write_csv(tmp_path / "drawn.csv", names, rows)
    done = subprocess.run([*command, "page"], cwd=tmp_path, capture_output=True, text=True, check=True)
    fits = [np.polyfit(years[1:], column, 1, cov=True) for column in y[1:].T]
    slopes, variances = np.array([(fit[0][0], fit[1][0, 0]) for fit in fits]).T
    told = np.var([row[-1] for row in rows], ddof=1) / y[1:].var(axis=0, ddof=1).mean()
    error = math.sqrt(variances.mean() + 1.05 * slopes.var(ddof=1))
    expected = [slopes.mean() / told, error / told]
    assert list(map(float, done.stdout.split())) == pytest.approx(expected, rel=1e-4)
