"""Figures of a report, against the plainest way to compute them."""

import numpy as np
import pytest

from histocc.evaluate import measures as rm
from histocc.formatter import cut

CODES = ["61110", "61220", "61115", "75400", "-1", "-2", "07540"]


def random_sets(rng, n, most=3):
    return [set(rng.choice(CODES, size=rng.integers(0, most + 1), replace=False).tolist()) for _ in range(n)]


def as_pairs(sets, digits=5):
    number, _ = rm.numbered([cut(code, digits) for code in CODES])
    place = dict(zip(CODES, number.tolist()))
    rows = [(row, place[code]) for row, codes in enumerate(sets) for code in codes]
    rows, codes = (
        (np.array(values, dtype=np.int64) for values in zip(*rows)) if rows else (np.zeros(0, np.int64),) * 2
    )
    return rm.distinct_pairs(rows, codes)


def brute(pred, true):
    return [1, pred == true, len(pred & true), len(pred - true), len(true - pred)]


class TestCutting:
    @pytest.mark.parametrize(
        "code, digits, separator, expected",
        [
            ("61110", 1, None, "6"),
            ("61110", 3, None, "611"),
            ("61110", 5, None, "61110"),
            ("-1", 1, None, "-1"),
            ("-3", 5, None, "-3"),
            ("?", 2, None, "?"),
            ("a1", 3, None, "a1"),
            ("10,2,-1", 1, ",", "10"),
            ("10,2,-1", 2, ",", "10,2"),
            ("-1", 1, ",", "-1"),
        ],
    )
    def test_prefixes(self, code, digits, separator, expected):
        assert cut(code, digits, separator) == expected

    def test_a_whole_code_is_a_prefix_of_nothing(self):
        number, names = rm.numbered([cut(code, 1) for code in ("-1", "-2", "12345", "-1")])
        assert names == ["-1", "-2", "1"] and number.tolist() == [0, 1, 2, 0]

    def test_codes_of_a_row_that_become_equal_are_one(self):
        counts = rm.row_counts(1, as_pairs([{"61110", "61220"}], 2), as_pairs([{"61115"}], 2))
        assert counts.tolist() == [[1, 1, 1, 0, 0]]


class TestCounts:
    @pytest.mark.parametrize("digits", [1, 2, 5])
    def test_sets(self, digits):
        rng = np.random.default_rng(digits)
        pred, true = random_sets(rng, 200), random_sets(rng, 200)
        short = [[{cut(code, digits) for code in codes} for codes in sets] for sets in (pred, true)]
        found = rm.row_counts(200, as_pairs(pred, digits), as_pairs(true, digits))
        assert found.tolist() == [list(map(float, brute(p, t))) for p, t in zip(*short)]

    def test_no_codes_at_all(self):
        assert rm.row_counts(2, as_pairs([set(), set()]), as_pairs([set(), {"-1"}])).tolist() == [
            [1, 1, 0, 0, 0],
            [1, 0, 0, 0, 1],
        ]

    def test_a_group(self):
        rng = np.random.default_rng(5)
        pred, true = random_sets(rng, 100), random_sets(rng, 100)
        group_of, names = rm.numbered([cut(code, 1) for code in sorted(CODES)])
        right = np.array([p == t for p, t in zip(pred, true)])
        for group, name in enumerate(names):
            found = rm.group_counts(100, as_pairs(pred), as_pairs(true), group_of, group, right)
            for row, p, t in zip(found, pred, true):
                inside = [{code for code in codes if cut(code, 1) == name} for codes in (p, t)]
                assert row.tolist() == [bool(inside[1]), bool(inside[1]) and p == t, *brute(*inside)[2:]]

    def test_ratios(self):
        assert rm.ratios(np.array([10.0, 4, 6, 2, 3])).tolist() == pytest.approx([0.4, 0.75, 6 / 9, 12 / 17])
        assert rm.ratios(np.array([1.0, 0, 0, 0, 0])).tolist() == [0, 0, 0, 0] and np.isnan(
            rm.ratios(np.zeros(5))[0]
        )


def rows_of(right, copies):
    """COLUMNS of rows of one code each, and the number of each row's text."""
    right = np.repeat(np.asarray(right, dtype=float), copies)
    return np.stack([np.ones_like(right), right, right, 1 - right, 1 - right], axis=1), np.repeat(
        np.arange(len(copies)), copies
    )


class TestBootstrap:
    def test_is_that_of_texts_drawn_one_by_one(self):
        rng = np.random.default_rng(0)
        columns, text = rows_of(rng.random(60) < 0.6, rng.integers(1, 8, 60))
        found = rm.measured(columns, text, 4000, 1)
        by_text = [columns[text == each] for each in range(60)]
        draws = [np.concatenate([by_text[i] for i in rng.integers(0, 60, 60)]) for _ in range(4000)]
        naive = np.percentile([draw[:, 1].sum() / len(draw) for draw in draws], [2.5, 97.5])
        value, low, high = found["over_rows"]["accuracy"]
        assert value == pytest.approx(columns[:, 1].mean()) and [low, high] == pytest.approx(naive, abs=0.015)
        assert (found["rows"], found["texts"]) == (len(columns), 60)

    def test_over_texts_each_text_weighs_the_same(self):
        columns, text = rows_of([1, 0, 0], [10, 1, 1])
        columns[:5, 1] = 0  # the first text is right in half of its rows
        found = rm.measured(columns, text, 10, 1)
        assert found["over_rows"]["accuracy"][0] == pytest.approx(5 / 12) and found["over_texts"]["accuracy"][
            0
        ] == pytest.approx(0.5 / 3)

    def test_repeated_rows_make_nothing_surer(self):
        right = np.random.default_rng(2).random(80) < 0.5
        once, often, alone = (
            rm.measured(*rows, 2000, 3)["over_rows"]["accuracy"]
            for rows in (
                rows_of(right, [1] * 80),
                rows_of(right, [9] * 80),
                rows_of(np.repeat(right, 9), [1] * 720),
            )
        )
        assert often == pytest.approx(once) and alone[2] - alone[1] < 0.5 * (once[2] - once[1])

    def test_is_seeded(self):
        rows = rows_of(np.arange(50) % 3 == 0, [1] * 50)
        assert rm.measured(*rows, 50, 1) == rm.measured(*rows, 50, 1) != rm.measured(*rows, 50, 2)

    def test_rows_of_zeros_take_no_part(self):
        columns, text = rows_of([1, 0, 1], [1, 2, 3])
        left = rm.measured(columns * (text != 1)[:, None], text, 10, 1)
        assert (left["rows"], left["texts"], left["over_rows"]["accuracy"]) == (4, 2, [1, 1, 1])
        assert rm.measured(columns * 0, text, 10, 1)["rows"] == 0

    def test_a_group_whose_rows_no_draw_holds_has_figures(self):
        columns = np.array([[1.0, 1, 1, 0, 0]] + [[0.0, 0, 0, 1, 0]] * 200)
        found = rm.measured(columns, np.arange(201), 1, 4)
        assert found["texts"] == 1 and np.isfinite(list(found["over_rows"].values())).all()


def test_calibration():
    rng = np.random.default_rng(3)
    confidence = np.concatenate([rng.random(300), [0.0, 1.0, 0.1, 0.5]])
    right = rng.random(304) < confidence**2
    found = rm.calibration(confidence, right)
    error, rows = 0.0, 0
    for each in found["bins"]:
        inside = (confidence <= each["to"]) & ((confidence > each["from"]) | (each["from"] == 0))
        assert each["rows"] == inside.sum() and each["accuracy"] == pytest.approx(right[inside].mean())
        error = error + inside.sum() * abs(right[inside].mean() - confidence[inside].mean())
        rows = rows + inside.sum()
    assert rows == 304 and found["expected_calibration_error"] == pytest.approx(error / 304) and error > 0


def test_top_k():
    best, worst = np.array([0, 0, 2, 7]), np.array([0, 3, 2, 9])
    assert rm.top_k(best, worst, 4) == [
        {"k": 1, "one": 0.5, "all": 0.25},
        {"k": 2, "one": 0.5, "all": 0.25},
        {"k": 3, "one": 0.75, "all": 0.5},
        {"k": 4, "one": 0.75, "all": 0.75},
    ]


def test_best_threshold():
    # right, tp, predicted, true
    counts = np.array([[2, 6, 14, 10], [5, 6, 7, 10], [6, 5, 5, 10], [6, 4, 4, 10]])
    found = rm.best_threshold(counts, np.array([0.2, 0.4, 0.6, 0.8]))
    assert (found["threshold_f1"], found["threshold_accuracy"], found["right"]) == (0.4, 0.6, 6) and found[
        "f1"
    ] == pytest.approx(12 / 17)


def test_confusions_count_texts_before_rows():
    true, pred = ["a", "a", "a", "b", "b"], ["b", "b", "b", "", ""]
    found = rm.confusions(true, pred, np.array([7, 7, 7, 1, 2]), lambda i: f"text {i}")
    assert found == [
        {"true": "b", "predicted": "", "rows": 2, "texts": 2, "examples": ["text 3", "text 4"]},
        {"true": "a", "predicted": "b", "rows": 3, "texts": 1, "examples": ["text 0"]},
    ]
    assert rm.confusions(true, pred, np.arange(5), str, most=1)[0]["true"] == "a"


def test_distinct_rows():
    table = np.random.default_rng(6).integers(0, 3, (500, 4))
    kinds, times = rm.distinct_rows(table)
    expected = np.unique(table, axis=0, return_counts=True)
    assert kinds.tolist() == expected[0].tolist() and times.tolist() == expected[1].tolist()
