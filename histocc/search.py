"""Search over the codes of a key, so that only real codes come out.

The seq2seq decoder gives a code the probability of writing its tokens one after the other in the first block. Codes that begin alike
share those tokens: a key is a tree of prefixes, and each prefix goes through the decoder once. `full` takes level after level
and gives the probability of every code; `topk` takes the most probable open prefixes first. Probabilities only fall along a path, so
that what lies below a prefix less probable than the k-th best code found can be left out, and the result is still exact.
"""

from dataclasses import dataclass
from typing import Sequence

import numpy as np
import torch
from torch import Tensor

from histocc.decoder import ALL, KEY_VALUE, QUERY, MultiheadAttention, visible_memory
from histocc.decoding import evaluating, widened
from histocc.formatter import BOS_IDX, BlockyFormatter
from histocc.mixer import Seq2SeqMixerOccCANINE

PREFIXES_AT_ONCE = {"cpu": 2048, "cuda": 1 << 17}    # of all rows together, in `full`; more would leave a CPU's caches
ROWS_AT_ONCE = {"cpu": 64, "cuda": 512}              # in `topk`
OPENED_AT_ONCE = 4                                   # most prefixes of a row that go through the decoder together, in `topk`
INF = float("inf")


class CodeTree:
    """The distinct prefixes of the codes' blocks of tokens.

    Nodes are numbered level by level; the first `inner` of them are prefixes that go on, from 0, the empty one, and node `inner` + i is
    the code `code_of_leaf`[i]. Every int64 tensor below has an entry per node, or per inner node:
    token: the last token of the prefix, BOS for the empty one; depth: its number of tokens; first_child, children: the nodes below it
    follow each other; path [inner, depth + 1 at most]: the nodes from the empty prefix down to itself, which also fills the rest.

    codes: in the order of the results. Raises ValueError where there is none or two have the same tokens, CodeError where one does
    not fit the formatter.
    """

    def __init__(self, codes: Sequence[str], formatter: BlockyFormatter):
        if not codes:
            raise ValueError("a tree of no codes")
        self.codes = list(codes)
        blocks = np.stack([formatter.encode_code(code) for code in self.codes])          # [codes, depth]
        order = np.lexsort(blocks.T[::-1])
        blocks = blocks[order]
        changed = np.logical_or.accumulate(blocks[1:] != blocks[:-1], axis=1)            # a new prefix of length 1 … depth
        place = np.zeros((len(blocks), formatter.block_size + 1), dtype=np.int64)        # of each code's prefix in its level
        place[1:, 1:] = np.cumsum(changed, axis=0)
        sizes = place[-1] + 1
        if sizes[-1] < len(blocks):
            same = order[np.flatnonzero(~changed[:, -1])[0]:][:2]
            raise ValueError(f"the codes {self.codes[same[0]]!r} and {self.codes[same[1]]!r} have the same tokens")
        self.levels = np.concatenate([[0], np.cumsum(sizes)]).tolist()                   # where each level begins
        self.inner, self.depths = self.levels[-2], formatter.block_size
        nodes = place + np.array(self.levels[:-1])                                       # [codes, depth + 1]
        token, depth = (np.zeros(self.levels[-1], dtype=np.int64) for _ in range(2))
        path = np.arange(self.inner)[:, None].repeat(self.depths, axis=1)
        first_child = np.full(self.inner, self.levels[-1])
        for level in range(self.depths + 1):
            at = nodes[:, level]
            token[at], depth[at] = blocks[:, level - 1] if level else BOS_IDX, level
            if level < self.depths:
                path[at, :level + 1] = nodes[:, :level + 1]
                np.minimum.at(first_child, at, nodes[:, level + 1])
        children = np.diff(np.append(first_child, self.levels[-1]))
        self.token, self.depth, self.path, self.first_child, self.children, self.code_of_leaf = map(
            torch.from_numpy, (token, depth, path, first_child, children, order))

    def to(self, device: torch.device) -> "CodeTree":
        """This tree with its tensors on `device`, in place."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))
        return self


class _Opened:
    """Keys and values of the prefixes that went through a layer's self-attention, [slots, H]; grows."""

    def __init__(self, slots: int):
        self.slots, self.rows = slots, None

    def put(self, start: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Appends key and value [N, H] at slot `start`; returns all keys and all values."""
        end = start + len(key)
        if self.rows is None or end > self.rows.shape[1]:
            grown = key.new_empty(2, max(self.slots, end, 0 if self.rows is None else 2 * self.rows.shape[1]), key.shape[1])
            if self.rows is not None:
                grown[:, :start] = self.rows[:, :start]
            self.rows = grown
        self.rows[0, start:end], self.rows[1, start:end] = key, value
        return self.rows[0], self.rows[1]


def attend_to_path(attention: MultiheadAttention, q: Tensor, keys: Tensor, values: Tensor, path: Tensor, visible: Tensor | None) -> Tensor:
    """Self-attention of N prefixes, each to itself and the prefixes that it begins with, and to nothing else → [N, H].

    q [N, H]; keys, values [slots, H]; path int64 [N, D], slots; visible bool [N, D] or None.
    """
    heads, size = attention.heads, q.shape[1] // attention.heads
    scores = torch.stack([(q * keys.index_select(0, at)).unflatten(1, (heads, size)).sum(-1) for at in path.unbind(1)], dim=2)
    scores = scores * size ** -0.5                                                       # [N, heads, D]
    if visible is not None:
        scores = scores.masked_fill(~visible[:, None], -INF)
    weights = scores.softmax(2).to(values.dtype)
    mixed = q.new_zeros(len(q), heads, size)
    for j, at in enumerate(path.unbind(1)):
        mixed.addcmul_(values.index_select(0, at).unflatten(1, (heads, size)), weights[:, :, j, None])
    return attention.out_proj(mixed.flatten(1))


@dataclass
class _Memory:
    """What the decoder looks at: keys and values [B, heads, S, H / heads] per layer; visible bool [B, 1, 1, S] or None."""

    keys: list[Tensor]
    values: list[Tensor]
    visible: Tensor | None

    def rows(self, index: Tensor | slice) -> "_Memory":
        return _Memory([k[index] for k in self.keys], [v[index] for v in self.values], None if self.visible is None else self.visible[index])


class CodeSearch:
    """A model and a tree of codes. What depends on both but not on a text is worked out here, once, so make a new one when the
    weights have changed."""

    def __init__(self, model: Seq2SeqMixerOccCANINE, tree: CodeTree):
        self.model = model
        self.layers = model.decoder.decoder.layers
        self.tree = tree.to(next(model.parameters()).device)
        with evaluating(model):
            tree, decoder, layer = self.tree, model.decoder, self.layers[0]
            decoder.check_length(tree.depths)
            position = decoder.positional_encoding.pos_embedding[tree.depth[:tree.inner], 0]
            x = decoder.token_emb(tree.token[:tree.inner]) + position                    # [inner, H]
            q, k, v = (part[0].transpose(0, 1).flatten(1) for part in layer.self_attn.project(x[None], ALL))
            reached = torch.arange(tree.depths, device=x.device) <= tree.depth[:tree.inner, None]
            self.x = layer.norm1(x + attend_to_path(layer.self_attn, q, k, v, tree.path, reached))
            self.q = layer.multihead_attn.project(self.x[None], QUERY)[0][0].transpose(0, 1)          # [inner, heads, H / heads]

    def full(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Probability of every code, float [B, codes] in the order of the tree's codes; input_ids, attention_mask [B, S]."""
        with evaluating(self.model):
            memory, rows = self._encode(input_ids, attention_mask), len(input_ids)
            widest = max(b - a for a, b in zip(self.tree.levels, self.tree.levels[1:-1]))
            step = max(1, PREFIXES_AT_ONCE[input_ids.device.type] // widest)
            return torch.cat([self._full(memory.rows(slice(i, i + step)), min(step, rows - i)) for i in range(0, rows, step)])

    def topk(self, input_ids: Tensor, attention_mask: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k most probable codes (all, where there are fewer): (numbers int64 [B, k], probabilities float [B, k]), the most
        probable first, those of the same probability in the order of the tree's codes."""
        if k < 1:
            raise ValueError(f"k must be at least 1, not {k}")
        with evaluating(self.model):
            memory, rows = self._encode(input_ids, attention_mask), len(input_ids)
            step, k = ROWS_AT_ONCE[input_ids.device.type], min(k, len(self.tree.codes))
            parts = [self._topk(memory.rows(slice(i, i + step)), min(step, rows - i), k) for i in range(0, rows, step)]
        return torch.cat([codes for codes, _ in parts]), torch.cat([probs for _, probs in parts])

    def _encode(self, input_ids: Tensor, attention_mask: Tensor) -> _Memory:
        memory, _ = self.model.encode(input_ids, attention_mask)
        keys, values = zip(*(layer.multihead_attn.project(memory, KEY_VALUE) for layer in self.layers))
        return _Memory(list(keys), list(values), visible_memory(self.model.memory_padding_mask(attention_mask)))

    def _open(self, nodes: Tensor, memory: _Memory, opened: list[_Opened], start: int, path: Tensor, visible: Tensor | None) -> Tensor:
        """Log-probability of each token after each prefix, float [B, P, vocabulary].

        nodes: inner nodes [P] of all rows, or [B, P]; their keys and values take the slots from `start` on, row by row; path: slots,
        int64 [B · P, D]; visible: bool [B · P, D] or None.
        """
        rows = len(memory.keys[0])
        q = self.q[nodes].transpose(-3, -2)                                              # [(B,) heads, P, H / heads]
        x = self.layers[0].look_and_think(self.x[nodes], memory.keys[0], memory.values[0], memory.visible, q.expand(rows, -1, -1, -1))
        for i, layer in enumerate(self.layers[1:], start=1):
            flat = x.flatten(0, 1)                                                       # [B · P, H]
            attention = layer.self_attn
            q, k, v = torch.nn.functional.linear(flat, attention.in_proj_weight, attention.in_proj_bias).chunk(3, dim=1)
            x = layer.norm1(flat + attend_to_path(attention, q, *opened[i].put(start, k, v), path, visible)).view_as(x)
            x = layer.look_and_think(x, memory.keys[i], memory.values[i], memory.visible)
        return widened(self.model.decoder.head(x)).log_softmax(-1)

    def _full(self, memory: _Memory, rows: int) -> Tensor:
        tree, levels = self.tree, self.tree.levels
        opened = [_Opened(rows * tree.inner) for _ in self.layers]
        begin = torch.tensor(levels[:tree.depths], device=self.x.device)
        size = torch.tensor(levels[1:tree.depths + 1], device=self.x.device) - begin
        row = torch.arange(rows, device=self.x.device)[:, None, None]
        log_probs = torch.zeros(rows, 1, device=self.x.device)
        for level in range(tree.depths):
            first, last, end = levels[level:level + 3]
            above = slice(0, level + 1)
            path = begin[above] * rows + row * size[above] + tree.path[first:last, above] - begin[above]         # [B, P, level + 1]
            after = self._open(torch.arange(first, last, device=self.x.device), memory, opened, first * rows, path.flatten(0, 1), None)
            parent = torch.repeat_interleave(torch.arange(last - first, device=self.x.device), tree.children[first:last])
            log_probs = log_probs[:, parent] + after.flatten(1)[:, parent * after.shape[2] + tree.token[last:end]]
        return torch.empty_like(log_probs).index_copy_(1, tree.code_of_leaf, log_probs.exp())

    def _topk(self, memory: _Memory, rows: int, k: int) -> tuple[Tensor, Tensor]:
        tree, device = self.tree, self.x.device
        codes, log_probs = torch.empty(rows, k, dtype=torch.int64, device=device), self.x.new_empty(rows, k, dtype=widened(self.x).dtype)
        opened, used = [_Opened(rows * 8 * OPENED_AT_ONCE) for _ in self.layers], 0
        paths = torch.zeros(0, tree.depths, dtype=torch.int64, device=device)            # slots on the way to each slot
        active = torch.arange(rows, device=device)
        queue = _Queue(log_probs.new_zeros(rows, 1), *torch.zeros(2, rows, 1, dtype=torch.int64, device=device))
        while True:
            is_open = queue.shorten(k, tree.inner)
            done = ~is_open.any(1)
            finished = int(done.sum())
            if 4 * finished >= len(active):
                codes[active[done]], log_probs[active[done]] = queue.rows(done).best_codes(k, tree)
                if finished == len(active):
                    return codes, log_probs.exp()
                active, memory, queue, is_open = active[~done], memory.rows(~done), queue.rows(~done), is_open[~done]
            best, nodes, parents = queue.take(is_open, OPENED_AT_ONCE)                   # [b, P] each
            depth = tree.depth[nodes].flatten()
            own = used + torch.arange(nodes.numel(), device=device)
            reach = torch.arange(int(depth.max()) + 1, device=device)                    # [D]
            path = own[:, None].repeat(1, tree.depths)
            if used:
                path = torch.where(torch.arange(tree.depths, device=device) < depth[:, None], paths[parents.flatten()], path)
            after = self._open(nodes, memory, opened, used, path[:, :len(reach)], reach <= depth[:, None])
            paths, used = torch.cat([paths, path]), used + len(own)
            queue.add(best, nodes, own.view_as(nodes), after, tree)


class _Queue:
    """Prefixes and codes that were met, in no order: log_prob float [B, F], −inf where there is none; node and slot int64 [B, F], the
    slot that of the prefix one token shorter."""

    def __init__(self, log_prob: Tensor, node: Tensor, slot: Tensor):
        self.log_prob, self.node, self.slot = log_prob, node, slot

    def rows(self, index: Tensor) -> "_Queue":
        return _Queue(self.log_prob[index], self.node[index], self.slot[index])

    def shorten(self, k: int, inner: int) -> Tensor:
        """Drops what is less probable than the k-th best code; returns which entries are prefixes to be opened, bool [B, F]."""
        if self.log_prob.shape[1] >= k:
            of_codes = self.log_prob.masked_fill(self.node < inner, -INF)
            least = of_codes.topk(k).values[:, -1:]                                      # −inf: fewer than k codes so far
            self.log_prob = self.log_prob.masked_fill(self.log_prob < least, -INF)
        longest = int((self.log_prob > -INF).sum(1).max())
        self.log_prob, at = self.log_prob.topk(longest)
        self.node, self.slot = self.node.gather(1, at), self.slot.gather(1, at)
        return (self.node < inner) & (self.log_prob > -INF)

    def take(self, is_open: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
        """Takes out up to `most` of the most probable open prefixes of each row: (log_prob, node, slot), each [B, P]. A row with
        fewer has the empty prefix with log_prob −inf in their place."""
        found, at = self.log_prob.masked_fill(~is_open, -INF).topk(min(most, int(is_open.sum(1).max())))
        none = found == -INF
        node, slot = self.node.gather(1, at).masked_fill(none, 0), self.slot.gather(1, at).masked_fill(none, 0)
        self.log_prob = self.log_prob.scatter(1, at, self.log_prob.gather(1, at).masked_fill(~none, -INF))
        return found, node, slot

    def add(self, log_prob: Tensor, nodes: Tensor, slots: Tensor, after: Tensor, tree: CodeTree) -> None:
        """What follows the prefixes `nodes` [B, P] of log_prob [B, P] in `slots` [B, P]; after: as `CodeSearch._open` gives it."""
        number = torch.arange(int(tree.children[nodes].max()), device=nodes.device)
        there = number < tree.children[nodes][..., None]                                 # [B, P, C]
        child = torch.where(there, tree.first_child[nodes][..., None] + number, 0)
        found = log_prob[..., None] + after.gather(2, tree.token[child])
        self.log_prob = torch.cat([self.log_prob, found.masked_fill(~there, -INF).flatten(1)], dim=1)
        self.node = torch.cat([self.node, child.flatten(1)], dim=1)
        self.slot = torch.cat([self.slot, slots[..., None].expand_as(child).flatten(1)], dim=1)

    def best_codes(self, k: int, tree: CodeTree) -> tuple[Tensor, Tensor]:
        """(numbers of codes, log_prob), each [B, k]: sorted by number first, then by probability, which leaves equal ones in order."""
        is_code = self.node >= tree.inner
        code, at = torch.where(is_code, tree.code_of_leaf[(self.node - tree.inner).clamp(min=0)], len(tree.codes)).sort(1)
        log_prob, again = self.log_prob.masked_fill(~is_code, -INF).gather(1, at).sort(dim=1, descending=True, stable=True)
        return code.gather(1, again)[:, :k], log_prob[:, :k]


def full(model: Seq2SeqMixerOccCANINE, input_ids: Tensor, attention_mask: Tensor, tree: CodeTree) -> Tensor:
    """`CodeSearch.full` for a single batch."""
    return CodeSearch(model, tree).full(input_ids, attention_mask)


def topk(model: Seq2SeqMixerOccCANINE, input_ids: Tensor, attention_mask: Tensor, tree: CodeTree, k: int) -> tuple[Tensor, Tensor]:
    """`CodeSearch.topk` for a single batch."""
    return CodeSearch(model, tree).topk(input_ids, attention_mask, k)
