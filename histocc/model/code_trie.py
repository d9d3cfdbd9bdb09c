"""The codes of a key as a tree of the prefixes of their tokens."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from histocc.formatter import BOS_IDX, BlockyFormatter


class CodeTrie:
    """The distinct prefixes of the codes' blocks of tokens.

    Nodes are numbered level by level; the first `inner` of them are prefixes that continue, from 0, the
    empty one, and node `inner` + i is the code `code_of_leaf`[i]. Every int64 tensor below has an entry
    per node, or per inner node: token: the last token of the prefix, BOS for the empty one; depth: its
    number of tokens; first_child, children: the nodes below it follow each other; path [inner, depth + 1
    at most]: the nodes from the empty prefix down to itself, which also fills the rest; leaves: number of
    codes that begin with the prefix. nodes [codes, depth + 1]: those from the empty prefix down to each code.

    codes: in the order of the results. Raises ValueError where there is none or two have the same tokens,
    CodeError where one does not fit the formatter.
    """

    def __init__(self, codes: Sequence[str], formatter: BlockyFormatter):
        if not codes:
            raise ValueError("a tree of no codes")
        self.codes = list(codes)
        blocks = np.stack([formatter.encode_code(code) for code in self.codes])  # [codes, depth]
        order = np.lexsort(blocks.T[::-1])
        blocks = blocks[order]
        # a new prefix of length 1 … depth
        changed = np.logical_or.accumulate(blocks[1:] != blocks[:-1], axis=1)
        # of each code's prefix in its level
        place = np.zeros((len(blocks), formatter.block_size + 1), dtype=np.int64)
        place[1:, 1:] = np.cumsum(changed, axis=0)
        sizes = place[-1] + 1
        if sizes[-1] < len(blocks):
            same = order[np.flatnonzero(~changed[:, -1])[0] :][:2]
            raise ValueError(
                f"the codes {self.codes[same[0]]!r} and {self.codes[same[1]]!r} have the same tokens"
            )
        self.levels = np.concatenate([[0], np.cumsum(sizes)]).tolist()  # where each level begins
        self.inner, self.depths = self.levels[-2], formatter.block_size
        nodes = place + np.array(self.levels[:-1])  # [codes, depth + 1]
        token, depth = (np.zeros(self.levels[-1], dtype=np.int64) for _ in range(2))
        path = np.arange(self.inner)[:, None].repeat(self.depths, axis=1)
        first_child = np.full(self.inner, self.levels[-1])
        for level in range(self.depths + 1):
            at = nodes[:, level]
            token[at], depth[at] = blocks[:, level - 1] if level else BOS_IDX, level
            if level < self.depths:
                path[at, : level + 1] = nodes[:, : level + 1]
                np.minimum.at(first_child, at, nodes[:, level + 1])
        children = np.diff(np.append(first_child, self.levels[-1]))
        leaves = np.bincount(nodes.ravel(), minlength=self.levels[-1])
        self.token, self.depth, self.path, self.first_child, self.children, self.code_of_leaf, self.leaves = (
            map(torch.from_numpy, (token, depth, path, first_child, children, order, leaves))
        )
        self.nodes = torch.from_numpy(nodes[order.argsort()])

    def to(self, device: torch.device) -> "CodeTrie":
        """This tree with its tensors on `device`, in place."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))
        return self
