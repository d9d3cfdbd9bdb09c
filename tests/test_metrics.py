"""Metrics against Python sets and hand-counted cases."""

import torch
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st

from histocc.model.metrics import flat_sets_equal, same_code_sets, token_counts

PAD = 1


def block_rows(blocks):
    """Rows of blocks of two tokens out of few codes, empty ones among them."""
    code = st.sampled_from([(PAD, PAD), (5, 5), (5, 6), (6, 5), (6, PAD)])
    return st.lists(st.lists(code, min_size=blocks, max_size=blocks), min_size=3, max_size=3)


@examples(150)
@given(st.data())
def test_sets_of_codes(data):
    """In any order, repeated codes once; two empty sets are equal."""
    pred, target = (data.draw(block_rows(data.draw(st.integers(1, 4)))) for _ in range(2))
    equal = same_code_sets(torch.tensor(pred), torch.tensor(target), PAD)
    sets = [[set(row) - {(PAD, PAD)} for row in rows] for rows in (pred, target)]
    assert equal.tolist() == [one == other for one, other in zip(*sets)]


def test_token_counts():
    #                        BOS |  code  | short: EOS | PAD  | last EOS
    targets = torch.tensor([[2, 5, 6, 7, 3, PAD, PAD, 3], [2, 8, 9, PAD, PAD, PAD, PAD, 3]])
    predicted = torch.tensor([[5, 6, 6, 3, PAD, PAD, 3], [8, 9, 5, PAD, PAD, PAD, 9]])
    logits = torch.nn.functional.one_hot(predicted, 10).double()
    right, total = token_counts(logits, targets, PAD)
    assert right.tolist() == [3, 2] and total.tolist() == [4, 2]  # neither PAD nor the last EOS is counted


def test_flat_sets():
    logits = torch.tensor([[2.0, -1.0], [0.1, 0.2], [-1.0, -2.0], [0.0, 1.0], [float("nan"), 1.0]])
    target = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [1.0, 1.0]])
    for kind in (target, target.bool()):
        assert flat_sets_equal(logits, kind).tolist() == [True, False, True, False, False]
    several, one = torch.tensor([[0.3, 2.0, 1.0], [-1.0, -2.0, -3.0]]), torch.tensor([[0, 1, 0], [1, 0, 0]])
    assert flat_sets_equal(several, one, at_most=1).tolist() == [True, False]
    assert flat_sets_equal(several, one, at_least_one=True, at_most=1).all()
    assert flat_sets_equal(several, torch.tensor([[0, 1, 1], [0, 0, 0]]), at_most=2).all()
