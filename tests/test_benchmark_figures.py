"""What the benchmarks of confidence and of reviewing count."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import REPO
from test_review import CODES, HEADER, TEXTS, coded_rows, write

from histocc.review.coded import CodedFile, Layout, key_of
from histocc.text import text_hashes

sys.path.insert(0, str(REPO / "benchmarks"))

import confidence
import review


def report(*bins):
    rows = [
        {"from": start, "texts": texts, "confidence_over_texts": conf, "accuracy_over_texts": right}
        for start, texts, conf, right in bins
    ]
    return {"linear": {"calibration": {"bins": rows}}}


class TestConfidence:
    def test_errors_of_several_seeds_together(self):
        one, two = report((0.5, 100, 0.55, 0.75), (0.9, 300, 0.95, 0.95)), report((0.5, 100, 0.55, 0.35))
        assert confidence.error(confidence.bins_of([one], "linear")) == pytest.approx(100 * 0.2 / 400)
        assert confidence.error(confidence.bins_of([one, two], "linear")) == pytest.approx(0.0)
        exact = confidence.exact_error(confidence.bins_of([one], "linear"))
        expected = (
            (100 * np.sqrt(0.55 * 0.45 / 100) + 300 * np.sqrt(0.95 * 0.05 / 300)) * np.sqrt(2 / np.pi) / 400
        )
        assert exact == pytest.approx(expected, rel=0.15)

    def test_texts_are_in_one_part_each_and_others_with_another_seed(self):
        hashes = text_hashes([f"text {i // 2}" for i in range(4000)])
        rows = SimpleNamespace(text_hash=hashes, language=np.arange(4000) // 2 % 3)
        nothing = SimpleNamespace(text_hash=hashes[:0], language=np.zeros(0, dtype=np.int64))
        data = SimpleNamespace(train=rows, val=nothing, languages=["da", "en", "se"])
        found = {seed: confidence.parts(data, seed, None) for seed in (1, 2)}
        texts = {name: set(hashes[pieces[0][1]]) for name, pieces in found[1].items()}
        assert sum(map(len, texts.values())) == 2000 == len(set.union(*texts.values()))
        assert len(texts["test"]) / 2000 == pytest.approx(confidence.TESTED, abs=0.03)
        assert len(texts["val"]) / 2000 == pytest.approx(confidence.FITTED, abs=0.03)
        again = set(hashes[found[2]["test"][0][1]])
        assert 0.1 < len(again & texts["test"]) / len(again) < 0.3
        without = confidence.parts(data, 1, "da")
        assert set(rows.language[without["test"][0][1]]) == {0}
        assert 0 not in rows.language[np.concatenate([without[name][0][1] for name in ("train", "val")])]


class TestReview:
    def test_decisions_in_order_are_worth_more_than_at_random(self, tmp_path):
        path = write(tmp_path / "coded.csv", [HEADER + CODES, *coded_rows()])
        file = CodedFile(str(path), Layout.of(str(path), "occ1", None, None))
        wrong = {("smith", "en"), ("clerk", "da")}
        true = {
            key_of(text, language): [{codes[1][0] if (text, language) in wrong else codes[0][0]}] * times
            for text, language, times, codes in TEXTS
        }
        found = review.curves(file, true, [0, 1, 4, 8])
        assert found["review"] == [44, 54, 57, 57]
        assert found["random"][0] == 44 and found["random"][-1] == 57
        assert 44 < found["random"][1] < 48 and found["doubt alone"][-1] == 57
