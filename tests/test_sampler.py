"""Which rows meet in which step: each once per epoch, and the same on any number of processes."""

import numpy as np
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st

from histocc.trainer.plan import BatchPlan, BatchSampler, EpochOrder, epoch_rows, permuted

plans = st.builds(
    BatchPlan,
    rows=st.integers(1, 300),
    global_batch_size=st.integers(1, 90),
    processes=st.integers(1, 9),
    micro_batch_size=st.integers(0, 12),
    groups=st.integers(1, 5),
    group_rows=st.integers(1, 4),
)


def rows_of(plan: BatchPlan, batch: int, rank: int, seed: int = 3, epoch: int = 5) -> list[int]:
    """Rows that a rank takes in a batch."""
    return (
        EpochOrder(plan, seed, lambda rows: rows % 17)
        .batch(epoch, batch)[plan.rank_positions(batch, rank)]
        .tolist()
    )


@examples(200)
@given(plans)
def test_every_row_once_whatever_the_processes(plan):
    batches = [
        [row for rank in range(plan.processes) for row in rows_of(plan, batch, rank)]
        for batch in range(plan.steps_per_epoch)
    ]
    assert sorted(row for batch in batches for row in batch) == list(range(plan.rows))
    assert [plan.batch_rows(batch) for batch in range(plan.steps_per_epoch)] == list(map(len, batches))
    assert plan.steps_per_epoch == -(-plan.rows // plan.global_batch_size)


@examples(200)
@given(plans)
def test_shares_are_even_and_micro_batches_few_and_small(plan):
    for batch in range(plan.steps_per_epoch):
        shares = [len(plan.rank_positions(batch, rank)) for rank in range(plan.processes)]
        assert max(shares) - min(shares) <= 1
        assert plan.accumulation(batch) == max(1, -(-max(shares) // plan.micro_batch_size))
        assert plan.accumulation(batch) <= plan.micro_batches(batch) < plan.accumulation(batch) + plan.groups


def test_ranks_have_equal_work_in_characters():
    def lengths(rows):
        return (np.asarray(rows) * 7919) % 61 + 3

    plan = BatchPlan(4000, 200, 4)
    order = EpochOrder(plan, 1, lengths)
    sums = np.array(
        [
            [lengths(order.batch(0, b)[plan.rank_positions(b, rank)]).sum() for rank in range(4)]
            for b in range(20)
        ]
    )
    assert (sums.max(axis=1) / sums.min(axis=1)).max() < 1.05


@examples(50)
@given(st.integers(1, 300), st.integers(1, 90), st.integers(1, 9))
def test_one_micro_batch_unless_asked(rows, total, processes):
    plan = BatchPlan(rows, total, processes)
    assert {plan.micro_batches(batch) for batch in range(plan.steps_per_epoch)} == {
        1
    } and plan.micro_batch_size == -(-total // processes)


@examples(30)
@given(plans, plans)
def test_rows_of_a_batch_are_a_function_of_seed_epoch_batch_and_total(plan, other):
    other = BatchPlan(
        plan.rows, plan.global_batch_size, other.processes, other.micro_batch_size, other.groups
    )
    for batch in range(min(plan.steps_per_epoch, 5)):
        rows = [
            sorted(row for rank in range(p.processes) for row in rows_of(p, batch, rank))
            for p in (plan, other)
        ]
        assert rows[0] == rows[1]


@examples(60)
@given(plans, st.integers(0, 3), st.data())
def test_starting_in_mid_epoch_gives_the_tail(plan, epoch, data):
    first = data.draw(st.integers(0, plan.steps_per_epoch))
    whole, tail = BatchSampler(plan, epoch), BatchSampler(plan, epoch, first)
    assert list(tail) == [index for index in whole if index[1] >= first]
    assert len(tail) == len(list(tail)) and len(whole) == len(list(whole))
    assert list(whole) == [(epoch, batch) for batch in range(plan.steps_per_epoch)]


# ---- the order of an epoch


@examples(150)
@given(st.integers(1, 3000), st.integers(0, 2**63 - 1), st.data())
def test_permutation(n, seed, data):
    order = permuted(np.arange(n), n, seed)
    assert order.dtype == np.int64 and sorted(order.tolist()) == list(range(n))
    some = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=5)), dtype=np.int64)
    assert (permuted(some, n, seed) == order[some]).all()


def test_order_differs_by_epoch_and_seed():
    orders = [tuple(epoch_rows(np.arange(50), 50, seed, epoch)) for seed in range(10) for epoch in range(10)]
    assert len(set(orders)) == 100


def test_order_stays_as_it_is():
    """A run that is resumed with another order would see some rows twice and others never."""
    assert epoch_rows(np.arange(10), 10, seed=42, epoch=0).tolist() == [1, 9, 0, 2, 6, 7, 3, 4, 8, 5]
    assert epoch_rows(np.arange(10), 10, seed=42, epoch=1).tolist() == [4, 5, 6, 7, 3, 9, 1, 0, 8, 2]
    assert epoch_rows(np.arange(4), 1_000_000, seed=7, epoch=3).tolist() == [265068, 860614, 185254, 236792]
    assert [
        BatchPlan(11, 7, 2).rank_positions(batch, rank).tolist() for batch in (0, 1) for rank in (0, 1)
    ] == [
        [0, 2, 4, 6],
        [1, 3, 5],
        [0, 2],
        [1, 3],
    ]


def test_part_of_a_huge_epoch_costs_no_memory():
    n = 10**13
    rows = permuted(np.arange(n - 1000, n), n, 1)
    assert len(set(rows.tolist())) == 1000 and 0 <= rows.min() and rows.max() < n
    assert abs(rows.mean() / n - 0.5) < 0.05  # five standard errors


def test_order_is_even():
    """Over many epochs each row comes to each place equally often, and neighbours in the file part."""
    n, epochs = 7, 1500
    counts = np.zeros((n, n))
    for epoch in range(epochs):
        counts[np.arange(n), epoch_rows(np.arange(n), n, 1, epoch)] += 1
    expected = epochs / n
    assert np.abs(counts - expected).max() < 5 * expected**0.5
    order = epoch_rows(np.arange(10_000), 10_000, 1, 0)
    assert (
        abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
        and abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05
    )
    assert abs(np.abs(np.diff(order)).mean() / 10_000 - 1 / 3) < 0.02
