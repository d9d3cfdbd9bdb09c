"""Two models compared by their reports: paired, on texts that both have and neither has learned from."""

import json

import numpy as np
import pytest
from helpers import read, run_here, write_csv

from histocc.evaluate import compare

HEADER = ("text", "language", "codes", "predicted", "conf", "rows", "learned", "column place")


def report(folder, rows, system="hisco"):
    """A folder with what compare reads of a report. rows: (text, codes, answer, rows with them, learned)."""
    folder.mkdir()
    content = {"model": {"name": f"{folder}/best.bin", "system": system}, "levels": "digits"}
    content["decoders"] = {"linear": {"by_digits": [{"digits": 1}, {"digits": 2}]}}
    (folder / "report.json").write_text(json.dumps(content))
    cells = [
        (text, "en", true, said, 0.9, number, learned, "Lund" if text < "m" else "Åbo")
        for text, true, said, number, learned in rows
    ]
    write_csv(folder / "answers.csv", HEADER, cells)
    return str(folder)


def words(folders, code=0):
    return run_here(compare.main, *folders, code=code)


def test_the_figures_are_those_of_the_common_new_texts(tmp_path):
    """A text counts once, whatever its rows, case and blanks; the second is right where the first is not."""
    first = [("Smith", "11", "12", 5, 0), ("smith", "22", "22", 5, 0), ("tailor", "33", "33", 1, 0)]
    second = [("SMITH ", "11", "11", 5, 0), ("smith", "22", "22", 5, 0), ("tailor", "33", "34", 1, 0)]
    first += [("sailor", "11&22", "22&11", 2, 0), ("old", "11", "11", 9, 1), ("own", "11", "11", 9, 0)]
    second += [("sailor", "11&22", "11&22", 2, 0), ("old", "11", "12", 9, 0)]
    folders = report(tmp_path / "a", first), report(tmp_path / "b", second)
    found = compare.compare(*folders)
    lines = {each["label"]: each for each in found["lines"]}
    whole = lines["all"]
    assert (found["models"], whole["texts"]) == (["a", "b"], 3) and found["is_new"]
    assert whole["right"] == pytest.approx([2.5 / 3, 2 / 3]) and found["left_out"] == [2, 1]
    assert found["rows"] == pytest.approx([8 / 13, 12 / 13])
    assert whole["difference"][0] == pytest.approx(-0.5 / 3)
    assert lines["digits: 1"]["right"] == [1, 1] and lines["column place: Åbo"]["texts"] == 3
    assert lines["coded with at most 10 % wrong"]["right"] == [0, 0]  # of three texts nothing is known
    said = words(folders)
    begin = "**a is ahead of b by 16.7 points (95 % interval "
    assert begin in said
    assert ", so this may be chance) on 3 texts that neither has learned from: 83.3 %" in said
    assert "that both reports have with the same codes; left out: 2 of a and 1 of b" in said


def test_a_text_is_paired_with_itself_in_its_language_if_the_other_report_has_it(tmp_path):
    rows = [("smed", "11", said, 1, 0) for said in ("11", "12")]
    folders = report(tmp_path / "a", rows), report(tmp_path / "b", rows)
    for folder in folders:
        answers = zip(read(path := f"{folder}/answers.csv"), ("da", "en"))
        write_csv(path, HEADER, [{**row, "language": each}.values() for row, each in answers])
    found = compare.compare(*folders)
    assert found["rows"] == [0.5, 0.5] and found["lines"][0]["texts"] == 1


def test_the_interval_holds_the_true_difference():
    """In about 95 % of draws, also of few texts, and it is never of no width."""
    rng, held = np.random.default_rng(1), []
    for _ in range(2000):
        first, second = rng.random((2, 40)) < [[0.6], [0.75]]
        _, low, high = compare.difference(second.astype(float) - first)
        held.append(low <= 0.15 <= high)
    assert 0.93 < np.mean(held) < 0.98
    value, low, high = compare.difference(np.zeros(10))
    assert low < value == 0 < high


def test_what_cannot_be_compared_is_refused(tmp_path):
    rows = [("smith", "11", "11", 1, "")]
    names = {"a": "hisco", "b": "hisco", "c": "isco"}
    a, b, c = (report(tmp_path / name, rows, system) for name, system in names.items())
    assert "(perhaps not new to both)" in words((a, b))
    assert "compare models with the same codes" in words((a, c), code=2)
    other = report(tmp_path / "d", [("smith", "12", "11", 1, 0)])
    assert "no text with the same codes" in words((a, other), code=2)
    (tmp_path / "b" / "answers.csv").unlink()
    assert "holds no report with answers.csv; make one with histocc evaluate" in words((a, b), code=2)
