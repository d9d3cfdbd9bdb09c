"""Figures of a report, against the plainest way to compute them."""

from types import SimpleNamespace

import numpy as np
import pytest

from histocc.evaluate import baseline
from histocc.evaluate import report as figures
from histocc.figure import wilson
from histocc.formatter import cut, hisco_classes, levels_of
from histocc.model.confidence import Thresholds
from histocc.predict.coder import Coded
from histocc.text import join_columns

CODES = ["61110", "61220", "61115", "75400", "-1", "-2", "07540"]


def random_sets(rng, n):
    return [set(rng.choice(CODES, size=rng.integers(0, 4), replace=False).tolist()) for _ in range(n)]


def as_pairs(sets, digits=5):
    number = np.unique([cut(code, digits) for code in CODES], return_inverse=True)[1]
    pairs = [(row, number[CODES.index(code)]) for row, codes in enumerate(sets) for code in codes]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2).T


def test_codes_cut_to_fewer_digits():
    whole = [("61110", 5), ("-1", 1), ("?", 2), ("a1", 3)]
    for code, digits, expected in (("61110", 1, "6"), *((code, digits, code) for code, digits in whole)):
        assert cut(code, digits) == expected
    assert cut("10,2,-1", 2, ",") == "10,2" and cut("-1", 1, ",") == "-1"


def test_a_table_shows_cells_as_they_are():
    """Whatever signs of Markdown they hold; a line break would end the row."""
    rows = [["a|b *c* _d_ `e` <b>f\\", 1234], ["two\nlines [x](y)", "83110 Smith"]]
    assert figures.table(["`conf`", "n"], rows) == [
        "| `conf` | n |",
        "|---|---|",
        r"| a\|b \*c\* \_d\_ \`e\` \<b>f\\ | 1,234 |",
        r"| two lines \[x\](y) | 83110 Smith |",
        "",
    ]


@pytest.mark.parametrize("digits", [1, 2, 5])
def test_counts_of_sets(digits):
    """Codes of a row that become equal are one; two empty sets are equal."""
    rng = np.random.default_rng(digits)
    pred, true = [*random_sets(rng, 200), set()], [*random_sets(rng, 200), set()]
    short = [[{cut(code, digits) for code in codes} for codes in sets] for sets in (pred, true)]
    found = figures.row_counts(201, figures.kinds_of(as_pairs(pred, digits), as_pairs(true, digits)))
    assert found.tolist() == [[1, p == t, len(p & t), len(p - t), len(t - p)] for p, t in zip(*short)]


def test_ratios():
    assert figures.ratios(np.array([10.0, 4, 6, 2, 3])) == pytest.approx([0.4, 0.75, 6 / 9, 12 / 17])
    assert figures.ratios(np.array([1.0, 0, 0, 0, 0])) == [0, 0, 0, 0]


def rows_of(right, copies):
    """COLUMNS of rows of one code each, and the number of each row's text."""
    right = np.repeat(np.asarray(right, dtype=float), copies)
    columns = np.stack([np.ones_like(right), right, right, 1 - right, 1 - right], axis=1)
    return columns, np.repeat(np.arange(len(copies)), copies)


class TestMeasured:
    def test_over_texts_each_text_weighs_the_same_in_each_measure(self):
        rows = [("ab", "ab"), ("ab", "a"), ("a", "abc"), ("", "c"), ("b", "a")]  # predicted, true
        both = [[(i, ord(code)) for i, row in enumerate(rows) for code in row[side]] for side in (0, 1)]
        columns = figures.row_counts(5, figures.kinds_of(*(np.array(each).T for each in both)))
        found = figures.measured(columns, np.array([0, 0, 1, 2, 3]))
        assert list(found["over_rows"].values()) == pytest.approx([1 / 5, 4 / 6, 4 / 8, 8 / 14])
        accuracy, *others = found["over_texts"].values()
        assert accuracy == pytest.approx([0.5 / 4, *wilson(0.5 / 4, 4)])
        assert others == pytest.approx([2.5 / 4, 2.5 / 6.5, 5 / 10.5])

    def test_repeated_rows_make_nothing_surer(self):
        right = np.random.default_rng(2).random(80) < 0.5
        copies = rows_of(right, [1] * 80), rows_of(right, [9] * 80), rows_of(np.repeat(right, 9), [1] * 720)
        once, often, alone = (figures.measured(*rows)["over_texts"]["accuracy"] for rows in copies)
        assert often == pytest.approx(once) and alone[2] - alone[1] < 0.5 * (once[2] - once[1])

    def test_rows_of_zeros_take_no_part(self):
        columns, text = rows_of([1, 0, 1], [1, 2, 3])
        left = figures.measured(columns * (text != 1)[:, None], text)
        assert (left["rows"], left["texts"], left["over_rows"]["accuracy"]) == (4, 2, 1)


def test_each_code_and_macro_f1_against_plain_loops():
    """Macro-F1 as scikit-learn has it: over the codes that are true or predicted."""
    rng = np.random.default_rng(4)
    pred, true = random_sets(rng, 90), random_sets(rng, 90)
    kinds, names = figures.kinds_of(as_pairs(pred), as_pairs(true)), sorted(CODES)
    table, expected = {row["code"]: row for row in figures.figures_of_codes(kinds, names, {"-1": "none"})}, []
    for code in names:
        cases = [(code in p, code in t) for p, t in zip(pred, true)]
        tp, fp, fn = map(cases.count, ((True, True), (True, False), (False, True)))
        row, f1 = table[code], 2 * tp / (2 * tp + fp + fn)
        assert (row["rows"], row["precision"]) == (tp + fn, pytest.approx(tp / (tp + fp)))
        assert row["f1"] == pytest.approx(f1) and row["title"] == ("none" if code == "-1" else "")
        mistakes = [other for p, t in zip(pred, true) if code in t - p for other in p - t or {"(no code)"}]
        often = max(map(mistakes.count, mistakes))
        assert mistakes.count(row["most_frequent_mistake"]) == often
        expected.append(f1)
    assert figures.macro_f1(kinds, len(names), np.ones(90)) == pytest.approx(np.mean(expected))
    assert figures.macro_f1(kinds, len(names), np.full(90, 0.5)) == pytest.approx(np.mean(expected))


@pytest.mark.parametrize(
    "codes, asked, separator, numbers",
    [
        (["61110", "83110", "-1"], [], None, [1, 2, 3, 4, 5]),
        (["0110", "5312"], ["1", "2"], None, [1, 2, 4]),
        (["01.1.1.3.1", "08.3.9.2", "9"], [], ".", [1, 2, 3, 4, 5]),
        (["I51.9", "A00"], ["."], ".", [1, 2]),
        (["I51-9", "A00-1"], [], None, [5]),
        (["baker", "old smith"], [], None, [9]),
        (["111", "12"], [], None, [3]),
        (["10,2,-1", "3"], [], ",", [1, 2, 3]),
        (["-1"], [], None, [1]),
    ],
)
def test_levels_are_those_of_the_codes(codes, asked, separator, numbers):
    given = "," if "10,2,-1" in codes else None
    assert levels_of(codes, given, asked) == (separator, numbers)


def test_classes_of_codes():
    """Smith, farmer, and no code; a code without HISCAM takes no part."""
    classes, true, pred = hisco_classes(), ["83110", "61110", "83110", "-1"], ["83110", "83110", "", "83110"]
    found = figures.hiscam_errors(true, pred)
    gap = (float(classes["hiscam"]["83110"]) - float(classes["hiscam"]["61110"])) / 2
    assert found == {"error": pytest.approx(gap), "absolute_error": pytest.approx(abs(gap))}
    assert figures.hiscam_errors(["-1"], ["61110"]) == {}


def test_calibration():
    rng = np.random.default_rng(3)
    confidence = np.concatenate([rng.random(300), [0.0, 1.0, 0.1, 0.5]])
    right, weight = rng.random(304) < confidence**2, rng.random(304)
    found = figures.calibration(confidence, right, weight)
    for name, each in (("", np.ones(304)), ("_over_texts", weight)):
        error = 0.0
        for one in found["bins"]:
            inside = (confidence <= one["to"]) & ((confidence > one["from"]) | (one["from"] == 0))
            assert one["rows"] == inside.sum() and one["accuracy"] == pytest.approx(right[inside].mean())
            error += abs(((right - confidence) * each)[inside].sum())
            assert one["texts"] == pytest.approx(weight[inside].sum())
            gap = one["accuracy_over_texts"] - one["confidence_over_texts"]
            assert gap == pytest.approx(((right - confidence) * weight)[inside].sum() / one["texts"])
        assert found[f"expected_calibration_error{name}"] == pytest.approx(error / each.sum()) and error > 0
    assert sum(one["rows"] for one in found["bins"]) == 304


class Rows:
    """Rows of a prepared folder: codes [N, K], and texts by their hash."""

    def __init__(self, codes, text_hash=None):
        self.codes = np.array(codes)
        self.text_hash = np.arange(len(codes)) if text_hash is None else np.array(text_hash)

    def __len__(self):
        return len(self.codes)

    def strings(self, rows):
        return [f"text {row}" for row in rows]


def random_rows(n=60, codes=9, seed=5):
    """(rows of one to three codes, logits [n, codes])"""
    rng = np.random.default_rng(seed)
    true = np.stack([rng.permutation(codes)[:3] for _ in range(n)])
    true[: n // 2, 1:] = -1
    logits = rng.normal(size=(n, codes))
    np.put_along_axis(logits, true[:, :1], logits.max(1, keepdims=True) + rng.normal(size=(n, 1)), axis=1)
    return Rows(true, rng.integers(0, n // 2, n)), logits


@pytest.mark.parametrize("at_least_one, at_most", [(False, None), (True, 2)])
def test_best_thresholds_against_plain_loops(at_least_one, at_most):
    rows, logits = random_rows()
    order = np.argsort(-logits, axis=1)
    probs = np.take_along_axis(1 / (1 + np.exp(-logits)), order, axis=1)
    thresholds = Thresholds({None: 0.5}, "usual", at_least_one, at_most)
    groups = {"all": np.ones(60, dtype=bool), "some": np.arange(60) % 3 == 0}
    found = figures.best_thresholds(order, probs, rows.codes, thresholds, groups)
    for name, part in groups.items():
        scores = []
        for threshold in figures.GRID:
            hits = total = 0
            for i in np.flatnonzero(part):
                count = int(np.clip((probs[i] > threshold).sum(), int(at_least_one), at_most))
                pred, true = {*order[i, :count].tolist()}, {*rows.codes[i].tolist()} - {-1}
                hits, total = hits + len(pred & true), total + len(pred) + len(true)
            scores.append((round(2 * hits / total, 12), -abs(threshold - 0.5), threshold))
        best = max(scores, key=lambda each: each[:2])
        assert found[name]["f1"] == pytest.approx(best[0]) and found[name]["threshold_f1"] == best[2]
        assert found[name]["rows"] == part.sum()


def test_rows_of_several_codes_are_right_where_all_of_them_are():
    rows = Rows([[0, 1, -1], [2, 0, -1], [1, 2, -1], [0, -1, -1], [0, 1, 2]], [5, 5, 7, 8, 9])
    rows.rows = SimpleNamespace(part="val")
    data = SimpleNamespace(codes=["11", "12", "21"], report={"rows_outside_key": {"val": 5}})
    answers = [["12", "11"], ["21"], ["21", "13"], ["13"], ["21", "12", "11"]]
    coded = [Coded(codes, [0.5] * len(codes), 0.5) for codes in answers]
    levels = SimpleNamespace(separator=None)
    coder = SimpleNamespace(levels=levels, fitted_levels=[], formatter=SimpleNamespace(kind="occ1950"))
    groups = {"codes": ((rows.codes >= 0).sum(1), range(4))}
    found = figures.decoder_report(coder, coded, np.arange(5), data, rows, groups, (None, [1, 2]), {})
    assert (found["right_rows"], found["accuracy"], found["accuracy_with_rows_outside_key"]) == (2, 0.4, 0.2)
    each = {name: group["over_rows"]["accuracy"] for name, group in found["by_codes"].items()}
    assert each == {"1": 0, "2": pytest.approx(1 / 3), "3": 1}
    shares = [(x["over_rows"]["accuracy"], x["over_texts"]["accuracy"][0]) for x in found["by_digits"]]
    assert shares == [pytest.approx((4 / 5, 3.5 / 4)), pytest.approx((2 / 5, 1.5 / 4))]
    assert found["coverage"] == [[0.5, 1.0, pytest.approx(1.5 / 4)]]


def test_confusions_count_rows_before_texts():
    rows = Rows([[0, -1], [0, -1], [0, -1], [1, -1], [1, -1], [0, -1]], [7, 7, 7, 1, 2, 3])
    answers = [["b"], ["b"], ["b"], [], [], ["a"]]
    a, b = figures.confusions(np.arange(5), answers, ["a", "b"], rows, {"a": "Smith"})
    counts = {"rows": 2, "texts": 2, "examples": ["text 3", "text 4"]}
    assert b == {"true": "b", "predicted": "", "titles": ["", ""], **counts}
    counts = {"rows": 3, "texts": 1, "examples": ["text 0"]}
    assert a == {"true": "a", "predicted": "b", "titles": ["Smith", ""], **counts}


def test_what_can_be_coded_automatically():
    """The most texts with at most 5 and 10 % wrong answers, and the confidence from which they are."""
    rng = np.random.default_rng(6)
    conf = rng.permutation(np.linspace(0.2, 1, 400))
    right, weight = rng.random(400) < conf, rng.random(400)
    for found, error in zip(figures.automatic(conf, right, weight), (0.05, 0.1), strict=True):
        kept = conf >= found["conf"]
        shares = {limit: (weight * (conf >= limit)).sum() / weight.sum() for limit in conf}
        wrong = {limit: np.average(~right, weights=weight * (conf >= limit)) for limit in conf}
        assert found["errors"] == error >= wrong[found["conf"]] and found["rows"] == kept.mean()
        assert found["texts"] == pytest.approx(max(shares[x] for x in conf if wrong[x] <= error))
    few = figures.automatic(np.array([0.9, 0.1]), np.array([True, False]), np.ones(2))
    assert [each["conf"] for each in few] == [None, None]  # one right answer shows nothing


@pytest.mark.parametrize("has_rows, several", [(False, False), (True, True)])
def test_columns_that_repeat_others_are_left_out(has_rows, several):
    """Levels have what their confidence expects, classes a line each, a single group none."""
    columns, text = rows_of([1, 0, 1], [1, 1, 1 + has_rows])
    each = figures.measured(columns, text)
    content = {
        "by_digits": [each | {"digits": 1, "expected": 0.7}, each | {"digits": 2, "expected": 0.5}],
        "by_class": {"hisclass_5": each | {"expected": 0.7}, "socpo": each},
        "by_language": {"en": each},
        "by_column place": {"Lund": each | {"expected": 0.6}, "all others": each | {"expected": 0.4}},
        "hiscam": {},
    }
    lines = figures.right_lines("digits", content, has_rows, several)
    header, _, *rows = [line.split(" | ") for line in lines if line.startswith("|")]
    labels = "digits: 1|digits: 2|hisclass_5|socpo|column place: Lund|column place: all others"
    assert [row[0][2:] for row in rows] == labels.split("|")
    assert header[1:] == ["texts", *["rows"] * has_rows, "right, % of texts"] + (
        ["expected, %", "right, % of rows", "precision, %", "recall, % |"] if several else ["expected, % |"]
    )
    expected = [row[header.index("expected, %" + " |" * (not several))].strip(" |") for row in rows]
    assert expected == ["70.0", "50.0", "70.0", "", "60.0", "40.0"]
    low, high = (f"{100 * bound:.1f}" for bound in wilson(2 / 3, 3))
    assert all(f"66.7 ({low}–{high})" in row for row in rows)


FARMER, SMITH, TAILOR = "61110", "83110", "79100"
WORDS = {FARMER: ("farmer", "farmhand"), SMITH: ("blacksmith", "smith"), TAILOR: ("tailor", "tailoress")}
TOWNS = ("leeds", "york", "hull", "bath", "ripon")
ONE = [(f"{word} of {town}", {code}) for code, words in WORDS.items() for word in words for town in TOWNS]
TWO = [
    (f"{WORDS[a][0]} and {WORDS[b][1]} of {town}", {a, b})
    for a, b in ((FARMER, SMITH), (SMITH, TAILOR), (FARMER, TAILOR))
    for town in TOWNS
]


def test_svm_is_that_of_repeated_rows():
    """Weights against the rows themselves, one-vs-rest; columns of length 1; one code; several codes."""
    pytest.importorskip("sklearn")
    from scipy.sparse import hstack
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.preprocessing import normalize
    from sklearn.svm import LinearSVC

    def svm(rows, asked):
        return baseline.svm([text for text, _ in rows], [frozenset(codes) for _, codes in rows], asked)

    rows = [*ONE, *ONE[::2], *ONE[::3], (ONE[1][0], {SMITH}), ("skrædder 𝕏å", {TAILOR})]
    asked = [f"{word}s of {town}e" for word in ("smith", "maid", "tail", "farm") for town in TOWNS]

    def features(known, asked):
        same = {"sublinear_tf": True, "norm": None}
        padded = {"preprocessor": lambda text: f" {text.lower()} "}
        chars = TfidfVectorizer(analyzer="char", ngram_range=(2, 5), **padded, **same)
        words = TfidfVectorizer(token_pattern=r"\S+", ngram_range=(1, 2), **same)
        tables = [chars.fit(known), words.fit(known)]
        return [normalize(hstack([table.transform(each) for table in tables])) for each in (known, asked)]

    def expected(*columns):
        known, new = (hstack(each) for each in zip(*columns))
        machine = LinearSVC(C=1.0, random_state=0).fit(known, [*(code for _, (code,) in rows)])
        return [{code} for code in machine.predict(new)]

    first = features([text for text, _ in rows], asked)
    assert svm(rows, asked) == expected(first)
    further = ["mill", "farm", *(("mill", "tailor", "farm")[i * i % 3] for i in range(len(rows) - 2))]
    also = ["farm", "mill", "tailor", "mill", ""] * 4
    joined = zip(join_columns([text for text, _ in rows], [further]), (codes for _, codes in rows))
    assert svm([*joined], join_columns(asked, [also])) == expected(first, features(further, also))
    assert svm([("-", {FARMER})], ["?"]) == [{FARMER}]
    several = svm([*ONE, *TWO], ["farmer of leedz", "smith and tailoress of selby"])
    assert several == [{FARMER}, {SMITH, TAILOR}]
