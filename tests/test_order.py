"""The order of an epoch: every row once, batches of similar length, and nothing but (seed, epoch, batch, total) decides it."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from histocc.sampler import BatchPlan, EpochOrder
from histocc.text import padded_width


def lengths_of(rows):
    return (np.asarray(rows) * 7919) % 61 + 3


@given(rows=st.integers(1, 3000), total=st.integers(1, 40), seed=st.integers(0, 2**32), epoch=st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_every_row_comes_once_and_any_batch_can_be_asked_first(rows, total, seed, epoch):
    plan = BatchPlan(rows, total)
    order = EpochOrder(plan, seed, lengths_of)
    batches = [order.batch(epoch, b) for b in range(plan.steps_per_epoch)]
    assert [len(batch) for batch in batches] == [plan.batch_rows(b) for b in range(plan.steps_per_epoch)]
    assert sorted(np.concatenate(batches)) == list(range(rows))
    middle = plan.steps_per_epoch // 2
    assert np.array_equal(EpochOrder(plan, seed, lengths_of).batch(epoch, middle), batches[middle])


def test_the_number_of_processes_and_micro_batches_plays_no_part():
    one, four = (EpochOrder(BatchPlan(1000, 32, processes, micro), 5, lengths_of) for processes, micro in ((1, 32), (4, 3)))
    assert all(np.array_equal(one.batch(2, b), four.batch(2, b)) for b in (0, 7, 31))


def test_seed_and_epoch_change_the_batches():
    plan = BatchPlan(1000, 32)
    first = EpochOrder(plan, 5, lengths_of).batch(0, 3)
    assert set(first) != set(EpochOrder(plan, 5, lengths_of).batch(1, 3)) and set(first) != set(EpochOrder(plan, 6, lengths_of).batch(0, 3))


def test_batches_hold_similar_lengths_and_need_little_padding():
    """Less than 10 % of positions beyond what each row's own width asks for; without sorting it is far more."""
    plan = BatchPlan(64 * 200, 64)

    def padding(order):
        batches = [lengths_of(order.batch(0, b)) for b in range(plan.steps_per_epoch)]
        asked = sum(padded_width(int(n)) for batch in batches for n in batch)
        return sum(padded_width(int(batch.max())) * len(batch) for batch in batches) / asked - 1

    assert padding(EpochOrder(plan, 1, lengths_of)) < 0.1 < 0.3 < padding(EpochOrder(plan, 1))


def test_long_and_short_batches_are_mixed():
    order = EpochOrder(BatchPlan(64 * 32, 32), 9, lengths_of)
    means = [lengths_of(order.batch(0, b)).mean() for b in range(64)]
    assert abs(np.corrcoef(means, np.arange(64))[0, 1]) < 0.35


def test_order_of_a_small_case_stays():
    order = EpochOrder(BatchPlan(50, 3), 42, lengths_of)
    assert [order.batch(0, b).tolist() for b in (0, 1, 2, 3, 16)] == [[49, 25, 24], [35, 18, 34], [5, 10, 32], [3, 12, 23], [8, 0]]
