"""Losses against hand-computed values, plain loops and finite differences."""

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from histocc.model.loss import (
    BLOCK_LOSSES,
    BlockOrderInvariantLoss,
    LossMixer,
    OrderInvariantSeq2SeqCrossEntropy,
    _hungarian,
    cheapest_assignment,
)

PAD, BOS, EOS = 1, 2, 3


def make_targets(counts, nb_blocks=3, block_size=2, vocab=9, seed=0):
    """[B, S] with counts[i] random codes in row i; some end in EOS as short codes do."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.full((len(counts), nb_blocks * block_size + 2), PAD)
    targets[:, 0], targets[:, -1] = BOS, EOS
    for row, count in enumerate(counts):
        used = count * block_size
        targets[row, 1 : 1 + used] = torch.randint(4, vocab, (used,), generator=generator)
        if count > 1:
            targets[row, used] = EOS
    return targets


def make_logits(rows, nb_blocks=3, block_size=2, vocab=9, seed=1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(rows, nb_blocks * block_size + 1, vocab, generator=generator, dtype=dtype)


def cross_entropy(logits, token):
    return (torch.logsumexp(logits, 0) - logits[token]).item()


def plain_loss(logits, targets, nb_blocks, block_size):
    """The definition, one number at a time."""
    losses = []
    for row, target in zip(logits, targets):
        blocks = [range(i * block_size, (i + 1) * block_size) for i in range((len(target) - 2) // block_size)]
        count = sum(target[1 + block[0]].item() != PAD for block in blocks)
        total = 0.0
        for block in blocks[:count]:
            candidates = [
                sum(cross_entropy(row[p], target[1 + t]) for p, t in zip(candidate, block)) / block_size
                for candidate in blocks[:count]
            ]
            total += min(candidates) / count
        for block in blocks[count:]:
            total += sum(cross_entropy(row[p], PAD) for p in block) / block_size / nb_blocks
        losses.append(total)
    return torch.tensor(losses, dtype=torch.float64)


def plain_older_loss(logits, targets, nb_blocks, block_size, scale, smoothing):
    losses = []
    for row, target in zip(logits, targets):
        blocks = [range(i * block_size, (i + 1) * block_size) for i in range(nb_blocks)]
        real = [block for block in blocks if target[1 + block[0]].item() != PAD]
        total = 0.0
        for block in real:
            total += min(
                sum(
                    cross_entropy(row[p], target[1 + t])
                    for p, t in zip(candidate, block)
                    if target[1 + t] != PAD
                )
                / block_size
                for candidate in blocks
            ) / len(real)
        vocab = row.shape[1]
        for position in row[:-1]:
            even = sum(cross_entropy(position, token) for token in range(vocab)) / vocab
            total += (
                scale
                * ((1 - smoothing) * cross_entropy(position, PAD) + smoothing * even)
                / (nb_blocks * block_size)
            )
        losses.append(total)
    return torch.tensor(losses, dtype=torch.float64)


def published_loss(logits, targets, nb_blocks, block_size):
    """As published: for the j-th target block, the mean over rows of the best fit among the row's first n
    predicted blocks (0 for rows without a j-th code), averaged over j up to the batch's largest n; plus the
    PAD part, averaged over rows and blocks.
    """
    rows = len(targets)
    starts = [1 + i * block_size for i in range(nb_blocks)]
    counts = [sum(target[s].item() != PAD for s in starts) for target in targets]
    fit = pad = 0.0
    for logit, target, count in zip(logits, targets, counts):
        for start in starts[:count]:
            fit += min(
                sum(cross_entropy(logit[s - 1 + i], target[start + i]) for i in range(block_size))
                / block_size
                for s in starts[:count]
            )
        for start in starts[count:]:
            pad += sum(cross_entropy(logit[start - 1 + i], PAD) for i in range(block_size)) / block_size
    return fit / rows / max(counts) + pad / rows / nb_blocks


def test_by_hand():
    """Two blocks of one token, uniform logits but for one: -log softmax is log 4, or log(3 + e) and log(3 +
    e) - 1.
    """
    loss_fn = BlockOrderInvariantLoss(PAD, nb_blocks=2, block_size=1)
    logits = torch.zeros(1, 3, 4, dtype=torch.float64)
    logits[0, 0, 0] = 1.0  # the first block favours token 0
    sharp = math.log(3 + math.e)
    one_code = torch.tensor([[BOS, 0, PAD, EOS]])
    assert loss_fn(logits, one_code).item() == pytest.approx(sharp - 1 + math.log(4) / 2)
    two_codes = torch.tensor([[BOS, 3, 0, EOS]])  # 0 fits the first block, 3 the second
    assert loss_fn(logits, two_codes).item() == pytest.approx((math.log(4) + sharp - 1) / 2)


@examples(40)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(0, 10**6), st.integers(1, 3))
def test_matches_plain_loops(counts, seed, block_size):
    logits = make_logits(len(counts), block_size=block_size, seed=seed)
    targets = make_targets(counts, block_size=block_size, seed=seed + 1)
    loss_fn = BlockOrderInvariantLoss(PAD, nb_blocks=3, block_size=block_size)
    expected = plain_loss(logits, targets, 3, block_size)
    got = loss_fn(logits, targets, reduction="none")
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(loss_fn(logits, targets), expected.mean(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_older_loss_matches_plain_loops(smoothing):
    logits, targets = make_logits(4), make_targets([1, 3, 2, 0])
    targets[0, 2] = PAD  # a code that PAD fills up: that token counts 0
    loss_fn = OrderInvariantSeq2SeqCrossEntropy(
        PAD, 3, 2, push_to_pad_scale_factor=0.3, push_to_pad_label_smoothing=smoothing
    )
    expected = plain_older_loss(logits, targets, 3, 2, 0.3, smoothing)
    torch.testing.assert_close(loss_fn(logits, targets, reduction="none"), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(loss_fn(logits, targets), expected.mean(), rtol=1e-12, atol=1e-12)


def test_published_loss_with_one_code_per_row_and_only_then():
    logits, loss_fn = make_logits(4), BlockOrderInvariantLoss(PAD, nb_blocks=3, block_size=2)
    one_each, mixed = make_targets([1, 1, 1, 1]), make_targets([1, 3, 1, 2])
    assert loss_fn(logits, one_each).item() == pytest.approx(
        published_loss(logits, one_each, 3, 2), rel=1e-12
    )
    assert loss_fn(logits, mixed).item() != pytest.approx(published_loss(logits, mixed, 3, 2), rel=1e-2)


@pytest.mark.parametrize(
    "loss_fn", [BlockOrderInvariantLoss(PAD, 3, 2), OrderInvariantSeq2SeqCrossEntropy(PAD, 3, 2)]
)
def test_gradient_of_a_row_does_not_depend_on_other_rows(loss_fn):
    gradients = []
    for other in (1, 3):
        logits = make_logits(2).requires_grad_()
        targets = torch.cat([make_targets([1], seed=5), make_targets([other], seed=6)])
        loss_fn(logits, targets).backward()
        gradients.append(logits.grad[0])
    assert gradients[0].abs().max() > 0.01
    assert torch.equal(*gradients)


def test_order_of_codes_does_not_matter():
    loss_fn = BlockOrderInvariantLoss(PAD, nb_blocks=4, block_size=2)
    logits, targets = make_logits(1, nb_blocks=4), make_targets([3], nb_blocks=4)
    loss = loss_fn(logits, targets)
    for order in ([2, 0, 1], [1, 0, 2]):
        positions = torch.tensor([2 * block + i for block in order for i in range(2)])
        moved = targets.clone()
        moved[:, 1:7] = targets[:, 1:7][:, positions]
        torch.testing.assert_close(loss_fn(logits, moved), loss)
        shuffled = logits.clone()
        shuffled[:, :6] = logits[:, :6][:, positions]
        torch.testing.assert_close(loss_fn(shuffled, targets), loss)
    beyond = logits.clone()  # swapping in a block beyond the codes does matter
    beyond[:, 4:6], beyond[:, 6:8] = logits[:, 6:8], logits[:, 4:6]
    assert abs(loss_fn(beyond, targets) - loss) > 1e-3


@pytest.mark.parametrize(
    "loss_fn",
    [
        BlockOrderInvariantLoss(PAD, 3, 2),
        OrderInvariantSeq2SeqCrossEntropy(PAD, 3, 2, push_to_pad_label_smoothing=0.1),
    ],
)
def test_gradients_are_right(loss_fn):
    logits, targets = make_logits(4, vocab=7), make_targets([0, 1, 2, 3], vocab=7)
    assert torch.autograd.gradcheck(lambda x: loss_fn(x, targets, reduction="none"), logits.requires_grad_())


def test_row_without_a_code():
    logits, targets = make_logits(2).requires_grad_(), make_targets([0, 3])
    loss = BlockOrderInvariantLoss(PAD, 3, 2)(logits, targets, reduction="none")
    loss.sum().backward()
    towards_pad = nn.functional.cross_entropy(logits[0, :-1], torch.full((6,), PAD))
    assert loss[0].item() == pytest.approx(towards_pad.item())
    assert torch.isfinite(loss).all() and torch.isfinite(logits.grad).all()


def test_last_eos_is_not_trained_but_eos_inside_a_code_is():
    logits, targets = make_logits(1).requires_grad_(), make_targets([2])
    BlockOrderInvariantLoss(PAD, 3, 2)(logits, targets).backward()
    assert (logits.grad[0, -1] == 0).all()
    assert logits.grad[0, :4, EOS].min() < 0  # some position is pushed towards EOS


def test_empty_tail_blocks_may_be_cut():
    logits, targets = make_logits(2, nb_blocks=2), make_targets([1, 2], nb_blocks=2)
    loss = BlockOrderInvariantLoss(PAD, nb_blocks=5, block_size=2)(logits, targets, reduction="none")
    torch.testing.assert_close(loss, plain_loss(logits, targets, 5, 2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    logits, targets = make_logits(3).to(dtype), make_targets([1, 2, 3])
    outputs = torch.randn(3, 4).to(dtype), torch.ones(3, 4)
    for seq2seq in (BlockOrderInvariantLoss(PAD, 3, 2), OrderInvariantSeq2SeqCrossEntropy(PAD, 3, 2)):
        mixer = LossMixer(seq2seq, nn.BCEWithLogitsLoss())
        halves = mixer.per_sample(logits, outputs[0], targets, outputs[1])
        floats = mixer.per_sample(logits.float(), outputs[0].float(), targets, outputs[1])
        for name, value in halves.items():
            assert value.dtype == torch.float32 and torch.equal(value, floats[name])


@pytest.mark.parametrize(
    "logits_shape, targets_shape",
    [
        ((2, 7, 9), (3, 8)),
        ((2, 8, 9), (2, 8)),
        ((2, 6, 9), (2, 7)),
        ((2, 9, 9), (2, 10)),
        ((2, 1, 9), (2, 2)),
    ],
)
def test_shapes_that_do_not_fit(logits_shape, targets_shape):
    with pytest.raises(ValueError, match="do not fit"):
        BlockOrderInvariantLoss(PAD, 3, 2)(
            torch.zeros(logits_shape), torch.ones(targets_shape, dtype=torch.long)
        )


def test_unknown_reduction():
    with pytest.raises(ValueError, match="'sum'"):
        BlockOrderInvariantLoss(PAD, 3, 2)(make_logits(1), make_targets([1]), reduction="sum")


# ---- one predicted block for each code


def one_to_one(nb_blocks=5, block_size=2, **options):
    return BlockOrderInvariantLoss(PAD, nb_blocks, block_size, matching="one-to-one", **options)


def plain_one_to_one(logits, targets, nb_blocks, block_size, empty="all"):
    """The definition, order by order: [B], and for each row the target block of each predicted one."""
    losses, chosen = [], []
    for row, target in zip(logits, targets):
        blocks = [range(i * block_size, (i + 1) * block_size) for i in range((len(target) - 2) // block_size)]
        count = sum(target[1 + block[0]].item() != PAD for block in blocks)
        costs = [
            [
                sum(cross_entropy(row[p], target[1 + t]) for p, t in zip(predicted, block)) / block_size
                for block in blocks[:count]
            ]
            for predicted in blocks[:count]
        ]
        sums = {order: sum(costs[p][t] for p, t in enumerate(order)) for order in permutations(range(count))}
        best = min(sums, key=sums.get)
        total = sums[best] / max(count, 1)
        for block in blocks[count : count + 1 if empty == "first" else None]:
            total += sum(cross_entropy(row[p], PAD) for p in block) / block_size / nb_blocks
        losses.append(total)
        chosen.append(best)
    return torch.tensor(losses, dtype=torch.float64), chosen


@examples(40)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=4),
    st.integers(0, 10**6),
    st.integers(1, 3),
    st.sampled_from(["all", "first"]),
)
def test_one_to_one_is_the_best_of_all_orders(counts, seed, block_size, empty):
    logits = make_logits(len(counts), 5, block_size, seed=seed)
    targets = make_targets(counts, 5, block_size, seed=seed + 1)
    loss_fn = one_to_one(5, block_size, empty_blocks=empty)
    expected, _ = plain_one_to_one(logits, targets, 5, block_size, empty)
    torch.testing.assert_close(loss_fn(logits, targets, reduction="none"), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(loss_fn(logits, targets), expected.mean(), rtol=1e-12, atol=1e-12)


def test_one_to_one_of_more_codes_than_all_orders_are_tried_for():
    """Seven columns: rows of six and seven codes go through the Hungarian method, beside rows of fewer."""
    counts = [7, 1, 6, 5, 0, 7, 2]
    for seed in range(5):
        logits, targets = make_logits(7, 7, seed=seed), make_targets(counts, 7, seed=seed + 50)
        expected, _ = plain_one_to_one(logits, targets, 7, 2)
        found = one_to_one(7)(logits, targets, reduction="none")
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n", range(1, 7))
def test_hungarian_method_finds_the_smallest_sum(n):
    random = np.random.default_rng(n)
    for trial in range(40):
        costs = random.random((n, n)) if trial % 2 else random.integers(0, 3, (n, n)) * 1.0  # ties
        columns = _hungarian(costs)
        assert sorted(columns) == list(range(n))
        least = min(sum(costs[pair] for pair in enumerate(order)) for order in permutations(range(n)))
        assert costs[np.arange(n), columns].sum() == pytest.approx(least, abs=1e-12)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_assignments_of_costs_that_are_not_finite_are_assignments(value):
    for blocks in (3, 7):
        costs = torch.full((4, blocks, blocks), value)
        found = cheapest_assignment(costs, torch.tensor([0, 1, blocks - 1, blocks]))
        assert found.sort(1).values.tolist() == [list(range(blocks))] * 4
        assert found[0].tolist() == list(range(blocks)) and found[2, -1] == blocks - 1


def test_two_codes_that_fit_one_block_teach_the_other_one_too():
    """Both codes are likelier in the first block: best-fit leaves the second block without a gradient."""
    logits = torch.zeros(1, 3, 6, dtype=torch.float64)
    logits[0, 0, 4], logits[0, 0, 5] = 3.0, 2.0
    targets = torch.tensor([[BOS, 4, 5, EOS]])
    gradients = {}
    for matching in BLOCK_LOSSES:
        x = logits.clone().requires_grad_()
        BlockOrderInvariantLoss(PAD, 2, 1, matching=matching)(x, targets).backward()
        gradients[matching] = x.grad[0]
    assert (gradients["best-fit"][1] == 0).all() and gradients["best-fit"][0, 5] < 0
    assert gradients["one-to-one"][1, 5] < -0.1 and gradients["one-to-one"][1, 4] > 0
    assert gradients["one-to-one"][0, 4] < 0 < gradients["one-to-one"][0, 5]


def test_gradient_goes_through_the_chosen_assignment_alone():
    logits, targets = make_logits(6, 5), make_targets([5, 4, 3, 2, 1, 0], 5)
    _, chosen = plain_one_to_one(logits, targets, 5, 2)
    assigned = targets.clone()  # at each predicted block its target
    for row, order in enumerate(chosen):
        for predicted, target in enumerate(order):
            assigned[row, 1 + 2 * predicted : 3 + 2 * predicted] = targets[
                row, 1 + 2 * target : 3 + 2 * target
            ]
    x, y = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    one_to_one()(x, targets, reduction="none").sum().backward()
    token = nn.functional.cross_entropy(y[:, :-1].transpose(1, 2), assigned[:, 1:-1], reduction="none")
    scale = torch.tensor(
        [
            [1 / (2 * max(len(order), 1)) if place < 2 * len(order) else 1 / 10 for place in range(10)]
            for order in chosen
        ],
        dtype=torch.float64,
    )
    (token * scale).sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("nb_blocks", [3, 6])
def test_gradients_of_one_to_one_are_right(nb_blocks):
    logits = make_logits(4, nb_blocks, vocab=6)
    targets = make_targets([0, 1, 2, nb_blocks], nb_blocks, vocab=6)
    loss_fn = one_to_one(nb_blocks, many_codes_weight=2.5)
    assert torch.autograd.gradcheck(lambda x: loss_fn(x, targets, reduction="none"), logits.requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("empty", ["all", "first"])
def test_with_one_code_per_row_both_are_the_same_bits(dtype, empty):
    losses, gradients = [], []
    for matching in BLOCK_LOSSES:
        logits = make_logits(40, 5, 5, vocab=18, dtype=dtype).requires_grad_()
        loss_fn = BlockOrderInvariantLoss(PAD, 5, 5, empty_blocks=empty, matching=matching)
        losses.append(loss_fn(logits, make_targets([1] * 38 + [0] * 2, 5, 5, vocab=18), reduction="none"))
        losses[-1].sum().backward()
        gradients.append(logits.grad)
    assert torch.equal(*losses) and torch.equal(*gradients) and gradients[0].abs().max() > 0.01


def test_one_to_one_is_never_below_best_fit_and_above_it_where_blocks_are_shared():
    logits, targets = make_logits(200, 5), make_targets([1, 2, 3, 4, 5] * 40, 5)
    best, one = (
        BlockOrderInvariantLoss(PAD, 5, 2, matching=name)(logits, targets, reduction="none")
        for name in BLOCK_LOSSES
    )
    more = one > best + 1e-3
    assert (one >= best - 1e-12).all() and more[1::5].any() and more[4::5].float().mean() > 0.5


@pytest.mark.parametrize("nb_blocks", [5, 6])
def test_order_of_codes_does_not_matter_one_to_one(nb_blocks):
    """To the last bit: the losses are summed in the order of the predicted blocks."""
    counts = [nb_blocks, 4, 2]
    logits, targets = make_logits(3, nb_blocks), make_targets(counts, nb_blocks)
    results = []
    for seed in range(6):
        moved, generator = targets.clone(), torch.Generator().manual_seed(seed)
        for row, count in enumerate(counts):
            order = torch.randperm(count, generator=generator)
            moved[row, 1 : 1 + 2 * count] = targets[row, 1 : 1 + 2 * count].view(count, 2)[order].flatten()
        x = logits.clone().requires_grad_()
        loss = one_to_one(nb_blocks)(x, moved, reduction="none")
        loss.sum().backward()
        results.append((loss.detach(), x.grad))
    for loss, gradient in results:
        assert torch.equal(loss, results[0][0]) and torch.equal(gradient, results[0][1])


@pytest.mark.parametrize("empty", ["all", "first"])
def test_one_to_one_of_a_row_does_not_depend_on_its_micro_batch(empty):
    """Alone, in another order, with as many blocks as the micro-batch needs: the same loss and gradient."""
    counts = [1, 2, 5, 3, 0, 2, 4, 1]
    targets, loss_fn = make_targets(counts, 5), one_to_one(empty_blocks=empty, many_codes_weight=3.0)

    def rows_of(rows, blocks=5):
        x = make_logits(8, 5)[rows].requires_grad_()
        kept = torch.cat([targets[rows][:, : 1 + 2 * blocks], targets[rows][:, -1:]], dim=1)
        loss = loss_fn(x[:, : 1 + 2 * blocks], kept, reduction="none")
        loss.sum().backward()
        return loss.detach(), x.grad

    whole, gradient = rows_of(list(range(8)))
    for rows in ([7, 2, 0], [4], [3, 5, 6, 1]):
        loss, own = rows_of(rows)
        assert torch.equal(loss, whole[rows]) and torch.equal(own, gradient[rows])
    if empty == "first":  # what is cut off has no gradient
        for rows, blocks in (([1, 5, 0], 3), ([4], 1), ([3, 1], 4)):
            loss, own = rows_of(rows, blocks)
            torch.testing.assert_close(loss, whole[rows], rtol=1e-14, atol=0)
            torch.testing.assert_close(own, gradient[rows], rtol=1e-14, atol=0)


@pytest.mark.parametrize("matching", BLOCK_LOSSES)
def test_weight_of_rows_with_many_codes(matching):
    """Only their rows, only the seq2seq part, and the mean still divides by the number of rows."""
    logits, targets = make_logits(4), make_targets([0, 1, 2, 3])
    plain, heavy = (
        BlockOrderInvariantLoss(PAD, 3, 2, matching=matching, many_codes_weight=weight)
        for weight in (1.0, 2.5)
    )
    losses = [loss_fn(logits, targets, reduction="none") for loss_fn in (plain, heavy)]
    torch.testing.assert_close(losses[1], losses[0] * torch.tensor([1.0, 1.0, 2.5, 2.5], dtype=torch.float64))
    torch.testing.assert_close(heavy(logits, targets), losses[1].sum() / 4)
    outputs, labels = torch.randn(4, 3, dtype=torch.float64), torch.ones(4, 3, dtype=torch.float64)
    mixers = [LossMixer(loss_fn, nn.BCEWithLogitsLoss(), 0.25) for loss_fn in (plain, heavy)]
    parts = [mixer.per_sample(logits, outputs, targets, labels) for mixer in mixers]
    assert torch.equal(parts[0]["loss_linear"], parts[1]["loss_linear"])
    torch.testing.assert_close(parts[1]["loss"] - parts[0]["loss"], 0.25 * (losses[1] - losses[0]))


@pytest.mark.parametrize(
    "options, words",
    [
        ({"matching": "hungarian"}, "'best-fit' or 'one-to-one'"),
        ({"many_codes_weight": 0}, "above 0"),
        ({"many_codes_weight": math.inf}, "above 0"),
        ({"many_codes_weight": math.nan}, "above 0"),
    ],
)
def test_settings_of_the_block_loss_out_of_range(options, words):
    with pytest.raises(ValueError, match=words):
        BlockOrderInvariantLoss(PAD, **options)


LINEAR = [
    nn.BCEWithLogitsLoss(),
    nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)),
    nn.BCEWithLogitsLoss(weight=torch.tensor([4.0, 2.0, 3.0, 4.0], dtype=torch.float64)),
    nn.MSELoss(),
]


@pytest.mark.parametrize("linear", LINEAR)
def test_mixer(linear):
    seq2seq = BlockOrderInvariantLoss(PAD, 3, 2)
    mixer = LossMixer(seq2seq, linear, seq2seq_weight=0.1)
    logits, targets = make_logits(3), make_targets([1, 2, 3])
    outputs = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    labels = torch.tensor([[1.0, 0, 0, 0], [1, 0, 1, 0], [0, 1, 1, 1]])
    parts = mixer.per_sample(logits, outputs, targets, labels)
    assert list(parts) == ["loss", "loss_linear", "loss_seq2seq"] and all(
        part.shape == (3,) for part in parts.values()
    )
    torch.testing.assert_close(parts["loss_seq2seq"], plain_loss(logits, targets, 3, 2))
    for row in range(3):
        assert parts["loss_linear"][row].item() == pytest.approx(
            linear(outputs[row : row + 1], labels[row : row + 1]).item()
        )
    torch.testing.assert_close(parts["loss"], 0.1 * parts["loss_seq2seq"] + 0.9 * parts["loss_linear"])
    loss = mixer(logits, outputs, targets, labels)
    assert loss.shape == () and loss.item() == pytest.approx(parts["loss"].mean().item())
    assert loss.item() == pytest.approx(
        0.1 * seq2seq(logits, targets).item() + 0.9 * linear(outputs, labels).item()
    )
    assert linear.reduction == "mean"  # the user's module is as it was


def test_mixer_takes_other_sequence_losses():
    class TokenLoss(nn.CrossEntropyLoss):
        def forward(self, logits, targets):
            return super().forward(logits.transpose(1, 2), targets[:, 1:])

    mixer = LossMixer(TokenLoss(), nn.BCEWithLogitsLoss(), seq2seq_weight=1.0)
    logits, targets = make_logits(2), make_targets([1, 2])
    loss = mixer(logits, torch.zeros(2, 4), targets, torch.zeros(2, 4))
    assert loss.item() == pytest.approx(
        nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten()).item()
    )


@pytest.mark.parametrize("weight", [-0.1, 1.1, math.nan])
def test_mixer_weight_out_of_range(weight):
    with pytest.raises(ValueError, match="between 0 and 1"):
        LossMixer(BlockOrderInvariantLoss(PAD), nn.BCEWithLogitsLoss(), weight)
