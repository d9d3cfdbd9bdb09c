"""Which rows meet in which step: each once per epoch, the same on any number of processes, and micro-batches
of similar length.
"""

import itertools
from unittest import mock

import numpy as np
import torch
from helpers import examples
from hypothesis import example, given
from hypothesis import strategies as st

from histocc.text import padded_width
from histocc.trainer.batches import BatchLoader, BatchPlan, MicroBatches, Rows, cut_by_width, widest

plans = st.builds(
    BatchPlan,
    rows=st.integers(1, 300),
    global_batch_size=st.integers(1, 90),
    processes=st.integers(1, 9),
    micro_batch_size=st.integers(0, 12),
    groups=st.integers(1, 5),
    group_rows=st.integers(1, 4),
)


class Numbers(Rows):
    has_lengths = True

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def batch(self, numbers, epoch):
        return {"x": torch.from_numpy(numbers), "epoch": torch.full((len(numbers),), epoch)}

    def lengths(self, numbers):
        return (np.asarray(numbers) * 7919) % 61 + 3


def batches_of(plan, seed=3):
    return MicroBatches(Numbers(plan.rows), plan, shuffle_seed=seed)


def rows_of(plan, batch, rank, epoch=5):
    """Rows that a rank takes in a batch."""
    parts = MicroBatches(Numbers(plan.rows), plan, rank, shuffle_seed=3)[epoch, batch]
    assert {int(each) for part in parts for each in part["epoch"]} == {epoch}
    assert {part["global_count"] for part in parts} == {plan.batch_rows(batch)}
    assert [part["last_micro_batch"] for part in parts] == [False] * (len(parts) - 1) + [True]
    pairs = (zip(part["rows"].tolist(), part["weights"].tolist()) for part in parts)
    return [row for row, weight in itertools.chain(*pairs) if weight]


@examples(200)
@given(plans, plans)
def test_every_row_once_in_the_same_steps_whatever_the_processes(plan, other):
    other = BatchPlan(plan.rows, plan.global_batch_size, other.processes, other.micro_batch_size)
    of_plan, of_other = (
        [
            sorted(itertools.chain(*(rows_of(p, batch, rank) for rank in range(p.processes))))
            for batch in range(plan.steps_per_epoch)
        ]
        for p in (plan, other)
    )
    assert of_plan == of_other and sorted(itertools.chain(*of_plan)) == list(range(plan.rows))
    assert [plan.batch_rows(batch) for batch in range(plan.steps_per_epoch)] == list(map(len, of_plan))
    assert plan.steps_per_epoch == -(-plan.rows // plan.global_batch_size)


@examples(200)
@given(plans)
def test_shares_are_even_and_micro_batches_few_and_small(plan):
    for batch in range(plan.steps_per_epoch):
        shares = [len(rows_of(plan, batch, rank)) for rank in range(plan.processes)]
        assert max(shares) - min(shares) <= 1
        assert plan.accumulation(batch) == max(1, -(-max(shares) // plan.micro_batch_size))
        assert plan.accumulation(batch) <= plan.micro_batches(batch) < plan.accumulation(batch) + plan.groups
        whole = BatchPlan(plan.rows, plan.global_batch_size, plan.processes)
        assert whole.micro_batches(batch) == 1  # unless it is asked for


@examples(60)
@given(st.integers(1, 300), st.integers(1, 90), st.integers(0, 3), st.data())
def test_starting_in_mid_epoch_gives_the_tail(rows, total, epoch, data):
    loader = BatchLoader(batches_of(BatchPlan(rows, total)))
    first = data.draw(st.integers(0, loader.plan.steps_per_epoch))
    whole = [batch["x"].tolist() for batch in loader.at(epoch)]
    assert sorted(itertools.chain(*whole)) == list(range(rows))
    assert [batch["x"].tolist() for batch in loader.at(epoch, first)] == whole[first:]
    assert len(loader) == len(whole[first:])


def test_order_differs_by_epoch_and_seed_and_stays_from_version_to_version():
    first = BatchPlan(50, 10)
    places = itertools.product(range(10), range(10))
    assert len({tuple(batches_of(first, seed).global_batch(epoch, 0)) for seed, epoch in places}) == 100
    batches = batches_of(BatchPlan(50, 3), 42)
    assert [batches.global_batch(0, b).tolist() for b in (0, 1, 16)] == [[25, 35, 34], [49, 24, 18], [0, 8]]


def padding(shares):
    """Share of positions beyond those that each row asks for."""
    lengths = Numbers(0).lengths
    widths = [np.array([padded_width(int(n)) for n in lengths(share)]) for share in shares]
    return 1 - sum(w.sum() for w in widths) / sum(w.max() * len(w) for w in widths)


def test_a_share_is_cut_into_micro_batches_with_little_padding_and_batches_stay_random_samples():
    plan, lengths = BatchPlan(64 * 50, 64, groups=4), Numbers(0).lengths
    batches = [batches_of(plan, 1).global_batch(0, b) for b in range(50)]
    widths = [np.array([padded_width(int(n)) for n in lengths(rows)]) for rows in batches]
    cut = [
        rows[piece]
        for rows, w in zip(batches, widths)
        for piece in cut_by_width(w, plan.micro_batches(0), plan.micro_batch_size)
    ]
    assert padding(cut) < 0.15 < 0.3 < padding(batches)
    means = [lengths(rows).mean() for rows in batches]
    assert np.std(means) < 2 * np.std(lengths(np.arange(61))) / 8


@given(
    st.lists(st.sampled_from([16, 24, 32, 40, 48, 64, 128]), min_size=1, max_size=60),
    st.integers(1, 20),
    st.integers(1, 5),
)
@examples(200)
def test_cuts_hold_every_row_once_and_no_more_than_the_limit(widths, micro, groups):
    parts = -(-len(widths) // micro) + groups - 1
    pieces = cut_by_width(np.array(widths), parts, micro)
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


@example(rows=3000, total=40)
@given(rows=st.integers(1, 3000), total=st.integers(1, 40))
@examples(40)
def test_validation_takes_every_row_once_by_length_and_the_longest_are_tried_first(rows, total):
    plan, numbers = BatchPlan(rows, total), Numbers(rows)
    with mock.patch("histocc.trainer.batches.SPAN", 700):
        order = batches_of(plan, None)
        batches = [order.global_batch(0, b) for b in range(plan.steps_per_epoch)]
        longest = widest(numbers, total)["rows"].tolist()
    lengths = numbers.lengths(np.arange(rows))
    assert np.concatenate(batches).tolist() == np.argsort(lengths, kind="stable").tolist()
    assert longest == np.argsort(-lengths, kind="stable")[:total].tolist()
    assert [len(batch) for batch in batches] == [plan.batch_rows(b) for b in range(plan.steps_per_epoch)]
    middle = plan.steps_per_epoch // 2
    assert np.array_equal(batches_of(plan, None).global_batch(3, middle), batches[middle])
    if rows == 3000 and total == 40:
        assert padding(batches) < 0.1
