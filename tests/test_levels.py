"""Answers at levels: what is answered, how confident it is, and what evaluate finds of that."""

import json

import numpy as np
import pytest
import torch
from helpers import read, run_here, write_csv

import finetune
from histocc import OccCANINE
from histocc.evaluate import __main__ as evaluating
from histocc.formatter import BlockyFormatter
from histocc.model.levels import Levels
from histocc.predict import __main__ as predicting
from histocc.predict.coder import Coder
from histocc.runtime import checkpoint
from histocc.runtime.errors import UserError
from histocc.sample.generate import rows as sample_rows

HEADER = ["occ1", "lang", "hisco_1"]
CODES = ["61110", "61115", "62105", "75400", "-1"]
HISCO = Levels(CODES, BlockyFormatter("hisco", ["hisco_1"]))


@pytest.mark.parametrize("level", ["4", "2", "1", "hisclass_5"])
def test_the_probability_of_an_answer_is_that_of_its_groups_and_no_others(level):
    draw = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(40, 5, generator=draw)
    best, counts = logits.topk(3).indices, torch.arange(40) % 4
    found = HISCO.probability(level, logits, best, counts, torch.zeros(40))
    for i, probs in enumerate(logits.sigmoid().tolist()):
        sums = {}
        for code, prob in zip(CODES, probs):
            group = HISCO.group(code, level)
            sums[group] = min(sums.get(group, 0.0) + prob, 1 - 1e-6)
        answered = {HISCO.group(CODES[j], level) for j in best[i, : counts[i]].tolist()}
        expected = np.prod([prob if group in answered else 1 - prob for group, prob in sums.items()])
        assert float(found[i]) == pytest.approx(expected, rel=1e-4, abs=1e-7)
    assert torch.equal(HISCO.probability(level, logits, best, counts, torch.ones(40)), torch.ones(40))


def test_levels_of_systems_and_groups_of_codes():
    assert HISCO.asked("auto") == ["5", "4", "3", "2", "1"] and HISCO.asked("socpo") == ["socpo"]
    assert [HISCO.group("-1", level) for level in ("2", "hisclass")] == ["-1", "-1"]
    assert HISCO.agree("hisclass", ["61110"], ["99999"]) is None
    assert HISCO.agree("2", ["61110", "75400"], ["75499", "61190"])
    confs = [0.2, 0.4, 0.7, 0.8, 0.95]
    assert HISCO.answer(["61110", "61220", "75400"], HISCO.numbers, confs, 0.75) == ("61&75", "2", 0.8)
    assert HISCO.answer(["61110"], HISCO.numbers, confs, 0.99) is None
    assert HISCO.answer(["61110", "99999"], ["hisclass"], [1.0], 0.5) is None  # one has no class
    assert HISCO.answer(["-1"], HISCO.numbers, confs, 0.9) == ("-1", "1", 0.95)
    formatter = BlockyFormatter("gpf", ["c"], block_size=8, allow_short=True)
    dotted = Levels(["01.1.2", "01.2", "02.1.1.1"], formatter)
    assert dotted.asked("auto") == ["4", "3", "2", "1"] and dotted.group("02.1.1.1", "2") == "02.1"
    for levels, level in ((HISCO, "6"), (HISCO, "hisco"), (dotted, "hisclass_5"), (dotted, "0")):
        with pytest.raises(UserError, match=f"--level {level}: .* 4, 3, 2, 1"):
            levels.asked(level)
    with pytest.raises(UserError, match="has no levels"):
        Levels(["tailor", "weaver"], BlockyFormatter("classes", ["c"])).asked("1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run in closed form, a table to code, and one with codes that the run has not seen."""
    folder = tmp_path_factory.mktemp("levels")
    rows = [row[:3] for row in sample_rows(800, 8)]
    write_csv(folder / "rows.csv", HEADER, rows[:400])
    new = [row for row in rows[400:] if row[:2] not in {row[:2] for row in rows[:400]}]
    write_csv(folder / "new.csv", HEADER, new)
    texts = [*(row[:2] for row in new), rows[0][:2], ("", "en"), ("tinker of wales", "en")]
    write_csv(folder / "in.csv", HEADER[:2], texts)
    write_csv(folder / "known.csv", HEADER, [("tinker of wales", "en", "83110")])
    given = ["--formatter", "hisco", "--target-cols", "hisco_1", "--language-col", "lang", "--prior", "none"]
    given += ["--device", "cpu", "--dataset", folder / "rows.csv", "--save-path", folder / "run"]
    run_here(finetune.main, *given)
    return folder


def predict(folder, *more, model="run", code=0):
    given = ["--model", folder / model, "--input", folder / "in.csv", "--output", folder / "out.csv"]
    how = ["--device", "cpu", "--overwrite", "--known", folder / "known.csv"]
    return run_here(predicting.main, *given, *how, *more, code=code)


def coded(folder, *more, **model):
    said = predict(folder, *more, **model)
    return read(folder / "out.csv"), said


def test_a_level_is_answered_beside_the_code_and_auto_takes_the_deepest_that_is_sure(folder):
    by_level = {}
    for level in ("5", "4", "3", "2", "1", "hisclass_5"):
        by_level[level], said = coded(folder, "--level", level)
        for row in by_level[level]:
            group = row["hisco_1"] and HISCO.group(row["hisco_1"], level)
            assert (row["level_code"], row["level"]) == ((group, level) if group else ("", ""))
            if group:
                assert float(row["level_conf"]) >= float(row["conf"]) - 1e-6
                assert row["needs_review"] == str(int(float(row["level_conf"]) < 0.5))
        assert f"--level {level}: " in said
    sure = [np.mean([float(row["level_conf"] or 0) for row in by_level[level]]) for level in "5321"]
    assert sure == sorted(sure) and sure[-1] > sure[0] + 0.05
    rows, said = coded(folder, "--level", "auto", "--target-accuracy", 0.7)
    for i, row in enumerate(rows):
        levels = (level for level in "54321" if float(by_level[level][i]["level_conf"] or 0) >= 0.7)
        level = next(levels, "")
        assert row["level"] == level and row["needs_review"] == str(int(not level))
        assert row["level_code"] == (by_level[level][i]["level_code"] if level else "")
    assert rows[-1]["level_code"] == "83110" and rows[-1]["level_conf"] == "1"  # of --known
    assert rows[-2]["level_code"] == rows[-2]["level_conf"] == ""  # an empty text
    assert {row["level"] for row in rows} >= {"5", "1", ""} and "level_conf below 0.7" in said
    model, texts = OccCANINE(str(folder / "run"), device="cpu"), [row["occ1"] for row in rows[:-1]]
    speech = [row["lang"] for row in rows[:-1]]
    same = model.predict(texts, speech, level="auto", target_accuracy=0.7, get_dict=True)
    assert [row["level_code"] or "" for row in same] == [row["level_code"] for row in rows[:-1]]
    assert "level" not in model.predict(texts[:1], speech[:1], get_dict=True)[0]


def test_what_cannot_be_answered_is_refused_with_what_to_type(folder):
    assert "add --target-accuracy 0.9" in predict(folder, "--level", "auto", code=2)
    assert "--level 6: " in predict(folder, "--level", "6", code=2)
    file = folder / "run" / "best.bin"
    state = checkpoint.load(str(file))
    maps = state["confidence"]["maps"]
    (folder / "old").mkdir()
    old = {name: weights for name, weights in maps.items() if not name.startswith("level")}
    state["confidence"] = {**state["confidence"], "maps": old}
    checkpoint.rewrite(str(folder / "old" / "best.bin"), state)
    said = predict(folder, "--level", "3", model="old", code=2)
    assert f"evaluate CODED.csv --model {folder / 'old'} --fit-confidence" in said
    rows, _ = coded(folder, "--level", "3", "--raw-confidence", model="old")
    assert rows[0]["level_code"] == rows[0]["hisco_1"][:3]
    # and the command that it names gives them
    given = ["--model", folder / "old", "--data", folder / "new.csv", "--fit-confidence"]
    run_here(evaluating.main, *given, "--device", "cpu")
    rows, _ = coded(folder, "--level", "hisclass_5", model="old")
    assert rows[0]["level"] == "hisclass_5"


def test_evaluate_has_how_often_levels_are_right_and_what_was_expected(folder):
    given = ["--model", folder / "run", "--data", folder / "new.csv", "--output", folder / "report"]
    run_here(evaluating.main, *given, "--device", "cpu")
    report = json.loads((folder / "report" / "report.json").read_text(encoding="utf-8"))
    figures = report["decoders"]["linear"]
    found = {str(each["digits"]): each for each in figures["by_digits"]} | figures["by_class"]
    assert {*found} == {*Coder.load(str(folder / "run")).levels.names}
    for each in found.values():
        assert abs(each["over_texts"]["accuracy"][0] - each["expected"]) < 0.2
        assert each["expected_calibration_error"] < 0.2
    text = (folder / "report" / "report.md").read_text(encoding="utf-8")
    assert all(f"| {name} |" in text for name in ("hisclass_5", "socpo"))
