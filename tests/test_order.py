"""The order of an epoch: every row once, micro-batches of similar length, and nothing but (seed, epoch,
batch, total) decides it.
"""

import itertools

import numpy as np
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st

from histocc.text import padded_width
from histocc.trainer.plan import BatchPlan, EpochOrder, WindowOrder, cut_by_width


def lengths_of(rows):
    return (np.asarray(rows) * 7919) % 61 + 3


@given(
    rows=st.integers(1, 3000), total=st.integers(1, 40), seed=st.integers(0, 2**32), epoch=st.integers(0, 3)
)
@examples(60)
def test_every_row_comes_once_and_any_batch_can_be_asked_first(rows, total, seed, epoch):
    plan = BatchPlan(rows, total)
    order = EpochOrder(plan, seed, lengths_of)
    batches = [order.batch(epoch, b) for b in range(plan.steps_per_epoch)]
    assert [len(batch) for batch in batches] == [plan.batch_rows(b) for b in range(plan.steps_per_epoch)]
    assert sorted(np.concatenate(batches)) == list(range(rows))
    middle = plan.steps_per_epoch // 2
    assert np.array_equal(EpochOrder(plan, seed, lengths_of).batch(epoch, middle), batches[middle])


def test_the_number_of_processes_and_micro_batches_plays_no_part():
    one, four = (
        EpochOrder(BatchPlan(1000, 32, processes, micro), 5, lengths_of)
        for processes, micro in ((1, 32), (4, 3))
    )
    assert all(np.array_equal(one.batch(2, b), four.batch(2, b)) for b in (0, 7, 31))


def test_seed_and_epoch_change_the_batches():
    plan = BatchPlan(1000, 32)
    first = EpochOrder(plan, 5, lengths_of).batch(0, 3)
    assert set(first) != set(EpochOrder(plan, 5, lengths_of).batch(1, 3)) and set(first) != set(
        EpochOrder(plan, 6, lengths_of).batch(0, 3)
    )


def test_rows_of_a_batch_stand_by_length_and_the_order_is_otherwise_free_of_it():
    plan = BatchPlan(64 * 100, 64)
    sorted_, plain = EpochOrder(plan, 1, lengths_of), EpochOrder(plan, 1)
    for batch in (0, 50, 99):
        rows = sorted_.batch(0, batch)
        assert set(rows) == set(plain.batch(0, batch)) and (np.diff(lengths_of(rows)) >= 0).all()
    means = [lengths_of(sorted_.batch(0, b)).mean() for b in range(100)]
    assert np.std(means) < 2 * np.std(lengths_of(np.arange(61))) / 8  # batches differ as random samples do


def padding(shares: list[np.ndarray]) -> float:
    """Share of positions beyond those that each row asks for."""
    widths = [np.array([padded_width(int(n)) for n in lengths_of(share)]) for share in shares]
    return 1 - sum(w.sum() for w in widths) / sum(w.max() * len(w) for w in widths)


def test_a_share_is_cut_into_micro_batches_with_little_padding():
    plan = BatchPlan(64 * 50, 64, groups=4)
    order = EpochOrder(plan, 1, lengths_of)
    whole = [order.batch(0, b) for b in range(50)]
    widths = [np.array([padded_width(int(n)) for n in lengths_of(rows)]) for rows in whole]
    cut = [
        rows[piece]
        for rows, w in zip(whole, widths)
        for piece in cut_by_width(w, plan.micro_batches(0), plan.micro_batch_size)
    ]
    assert padding(cut) < 0.15 < 0.3 < padding(whole)


@given(
    st.lists(st.sampled_from([16, 24, 32, 40, 48, 64, 128]), min_size=1, max_size=60),
    st.integers(1, 20),
    st.integers(1, 5),
)
@examples(200)
def test_cuts_hold_every_row_once_and_no_more_than_the_limit(widths, micro, groups):
    widths = np.array(widths)
    parts = -(-len(widths) // micro) + groups - 1
    pieces = cut_by_width(widths, parts, micro)
    assert len(pieces) == parts and max(map(len, pieces)) <= micro
    assert sorted(np.concatenate(pieces).tolist()) == list(range(len(widths)))


@given(st.lists(st.sampled_from([16, 24, 32, 40, 64]), min_size=1, max_size=12), st.integers(1, 4))
@examples(100)
def test_no_other_cut_into_as_many_groups_has_less_padding(widths, groups):
    ordered = np.sort(widths)

    def cost(bounds):
        return sum((b - a) * ordered[b - 1] for a, b in zip(bounds, bounds[1:]) if b > a)

    best = min(
        cost([0, *middle, len(widths)])
        for middle in itertools.combinations_with_replacement(range(len(widths) + 1), groups - 1)
    )
    pieces = cut_by_width(np.array(widths), groups, len(widths))
    assert sum(len(piece) * np.array(widths)[piece].max() for piece in pieces if len(piece)) == best


@given(rows=st.integers(1, 3000), total=st.integers(1, 40))
@examples(40)
def test_validation_takes_every_row_once_in_batches_of_similar_length(rows, total):
    plan = BatchPlan(rows, total)
    order = WindowOrder(plan, lengths_of)
    batches = [order.batch(0, b) for b in range(plan.steps_per_epoch)]
    assert [len(batch) for batch in batches] == [plan.batch_rows(b) for b in range(plan.steps_per_epoch)]
    assert sorted(np.concatenate(batches)) == list(range(rows))
    middle = plan.steps_per_epoch // 2
    assert np.array_equal(WindowOrder(plan, lengths_of).batch(3, middle), batches[middle])
    if rows == 3000 and total == 40:
        assert padding(batches) < 0.1


def test_order_of_a_small_case_stays():
    order = EpochOrder(BatchPlan(50, 3), 42, lengths_of)
    assert [order.batch(0, b).tolist() for b in (0, 1, 16)] == [[25, 35, 34], [49, 24, 18], [0, 8]]
