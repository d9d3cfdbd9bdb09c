"""Metrics against Python sets and hand-counted cases."""

import pytest
import torch
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st

from histocc.model.metrics import (
    flat_sets_equal,
    precision_recall_f1,
    same_code_sets,
    set_counts,
    token_counts,
)

PAD = 1


def block_rows(blocks):
    """Rows of blocks of two tokens out of few codes, empty ones among them."""
    code = st.sampled_from([(PAD, PAD), (5, 5), (5, 6), (6, 5), (6, PAD)])
    return st.lists(st.lists(code, min_size=blocks, max_size=blocks), min_size=3, max_size=3)


def code_set(row):
    return {code for code in row if code != (PAD, PAD)}


@examples(150)
@given(st.data())
def test_sets_of_codes(data):
    pred_rows = data.draw(block_rows(data.draw(st.integers(1, 4))))
    target_rows = data.draw(block_rows(data.draw(st.integers(1, 4))))
    pred, target = torch.tensor(pred_rows), torch.tensor(target_rows)
    equal, counts = same_code_sets(pred, target, PAD), set_counts(pred, target, PAD)
    assert equal.dtype == torch.bool and equal.shape == (3,) and set(counts) == {"tp", "fp", "fn"}
    for i, (p, t) in enumerate(zip(map(code_set, pred_rows), map(code_set, target_rows))):
        assert equal[i].item() == (p == t)
        assert [counts[name][i].item() for name in ("tp", "fp", "fn")] == [len(p & t), len(p - t), len(t - p)]


def test_sets_by_hand():
    a, b, empty = [5, 6], [7, 8], [PAD, PAD]
    pred = torch.tensor([[b, a, a], [a, empty, empty], [empty, empty, empty], [empty, a, b], [a, b, empty]])
    target = torch.tensor([[a, b], [a, b], [empty, empty], [b, a], [a, empty]])
    assert same_code_sets(pred, target, PAD).tolist() == [True, False, True, True, False]


def test_token_counts():
    #                        BOS |  code  | short: EOS | PAD  | last EOS
    targets = torch.tensor([[2, 5, 6, 7, 3, PAD, PAD, 3], [2, 8, 9, PAD, PAD, PAD, PAD, 3]])
    predicted = torch.tensor([[5, 6, 6, 3, PAD, PAD, 3], [8, 9, 5, PAD, PAD, PAD, 9]])
    logits = torch.nn.functional.one_hot(predicted, 10).double()
    right, total = token_counts(logits, targets, PAD)
    assert right.tolist() == [3, 2] and total.tolist() == [4, 2]  # neither PAD nor the last EOS is counted


@examples(50)
@given(
    st.lists(
        st.lists(st.tuples(st.floats(-3, 3, width=32), st.booleans()), min_size=3, max_size=3),
        min_size=1,
        max_size=4,
    )
)
def test_flat_sets(rows):
    logits = torch.tensor([[logit for logit, _ in row] for row in rows])
    target = torch.tensor([[float(is_code) for _, is_code in row] for row in rows])
    expected = [
        {i for i, (logit, _) in enumerate(row) if logit > 0}
        == {i for i, (_, is_code) in enumerate(row) if is_code}
        for row in rows
    ]
    assert flat_sets_equal(logits, target).tolist() == expected
    assert flat_sets_equal(logits, target.bool()).tolist() == expected


def test_flat_sets_by_hand():
    logits = torch.tensor([[2.0, -1.0], [0.1, 0.2], [-1.0, -2.0], [0.0, 1.0], [float("nan"), 1.0]])
    target = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [1.0, 1.0]])
    assert flat_sets_equal(logits, target).tolist() == [True, False, True, False, False]


def test_precision_recall_f1():
    tp, fp, fn = torch.tensor([3, 0, 0, 1]), torch.tensor([1, 0, 2, 0]), torch.tensor([2, 0, 0, 0])
    precision, recall, f1 = precision_recall_f1(tp, fp, fn)
    assert precision.tolist() == pytest.approx([0.75, 0, 0, 1])
    assert recall.tolist() == pytest.approx([0.6, 0, 0, 1])
    assert f1.tolist() == pytest.approx([2 * 0.75 * 0.6 / 1.35, 0, 0, 1])
    totals = (torch.tensor(x, dtype=torch.float64) for x in (3.0, 1.0, 2.0))
    exact = precision_recall_f1(*totals)
    assert exact[1].dtype == torch.float64 and exact[1].item() == pytest.approx(0.6, rel=1e-15)
