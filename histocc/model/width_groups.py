"""Rows of a batch in groups of similar width, so that little is computed for padding: what is done to each
position by itself, most of a layer, is done once for the positions of all groups; attention, group by group.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from histocc.model.layers import product
from histocc.text import padded_width
from histocc.trainer.batches import best_cuts

MOST_GROUPS = 4
LEAST_ROWS = 12  # of a batch, for each group that it is cut into


def width_groups(attention_mask: Tensor) -> tuple[Tensor, list[tuple[int, int]]] | None:
    """(the order in which the rows of a batch go into groups, int64 [B]; rows and positions of each group,
    the narrowest first), chosen for the fewest positions; None where one group is all.

    attention_mask: bool or 0/1 [B, S], on the CPU; S is what the longest row needs, or more.
    """
    rows, most = attention_mask.shape
    groups = max(1, min(MOST_GROUPS, rows // LEAST_ROWS))
    last = (attention_mask != 0) * torch.arange(1, most + 1)
    widths = [min(padded_width(max(0, n - 2), most), most) for n in last.amax(1).tolist()]
    order = sorted(range(rows), key=widths.__getitem__)
    counts: dict[int, int] = {}
    for i in order:
        counts[widths[i]] = counts.get(widths[i], 0) + 1
    distinct, edges = list(counts), [0]
    for count in counts.values():
        edges.append(edges[-1] + count)
    cuts = best_cuts(distinct, edges, groups)
    if len(cuts) < 3 and distinct[-1] == most:
        return None
    found = [(edges[end] - edges[begin], distinct[end - 1]) for begin, end in zip(cuts, cuts[1:])]
    return torch.tensor(order), found


def joined(parts: Sequence[Tensor], length: int | None = None) -> Tensor:
    """The positions of groups [B, S, …] each, one after the other: [N, …]. Of several groups, rows of zeros
    follow up to a round number, or to `length`: libraries of matrix products prepare each new shape, which
    costs as much as a small product does.
    """
    if len(parts) == 1:
        return parts[0].flatten(0, 1)
    flat = [part.flatten(0, 1) for part in parts]
    number = sum(map(len, flat))
    rest = (rounded(number) if length is None else length) - number
    return torch.cat([*flat, flat[0].new_zeros(rest, *flat[0].shape[1:])])


def rounded(number: int) -> int:
    """The next of some numbers, 16 of them between one power of two and the next."""
    step = 1 << max(3, number.bit_length() - 5)
    return -(-number // step) * step


def parted(x: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The opposite of `joined`: x [N, …] as groups, whose (B, S) `shapes` begin with."""
    if len(shapes) == 1:
        return [x.unflatten(0, shapes[0][:2])]
    sizes = [shape[0] * shape[1] for shape in shapes]
    split = x.split([*sizes, len(x) - sum(sizes)])
    return [each.unflatten(0, shape[:2]) for each, shape in zip(split, shapes)]


def product_of_groups(parts: Sequence[Tensor], weight: Any, bias: Tensor | None = None) -> list[Tensor]:
    """`layers.product` of groups [B, S, inputs] each with one weight → [B, S, outputs] each."""
    return parted(product(joined(parts), weight, bias), [part.shape for part in parts])
