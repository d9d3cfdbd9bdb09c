"""Search over the codes of a key, so that only real codes are answered.

For the seq2seq decoder, a code's probability is the probability of writing its tokens in the first
block. A key is a tree of prefixes, and each prefix goes through the decoder once. `full` goes level by level
and returns the probability of every code. `topk` opens the most probable prefixes first. Probabilities only
fall along a path, so all codes below a prefix less probable than the k-th best code so far are left out.

With a `linear_share` a above 0 both decoders rank the codes together, by (1 − a) · log p of the seq2seq
decoder + a · log p of the linear one, whose p is the softmax of its logits: a product of experts (Hinton,
2002, section 2), normalized over all codes of the key. `topk` then computes all of them: leaving some out
took as long, and only the sum of all shows whether 1 − p is 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from histocc.formatter import BOS_IDX, BlockyFormatter
from histocc.model.decoder import KEY_VALUE, QUERY, QUERY_KEY_VALUE, MultiheadAttention, visible_memory
from histocc.model.decoding import evaluating
from histocc.model.layers import product, upcast_half
from histocc.model.mixer import Seq2SeqMixerOccCANINE
from histocc.model.ngrams import TextVectors
from histocc.runtime.device import by_kind

PREFIXES_AT_ONCE = {"cpu": 2048, "cuda": 1 << 17}  # over all rows, in `full`, as more exceed a CPU's caches
ROWS_AT_ONCE = {"cpu": 64, "cuda": 512}  # in `topk`
OPENED_AT_ONCE = 4  # most prefixes of a row that go through the decoder together, in `topk`
CANDIDATES = 20  # codes that `candidates` ranks
EQUAL_SHARE = 0.5  # share of the linear decoder in `candidates`, if the model has none
INF = float("inf")


class CodeTrie:
    """The distinct prefixes of the codes' blocks of tokens. Raises ValueError for two codes with the same
    tokens, CodeError if one does not fit the formatter.

    Nodes are numbered by level. The first `inner` nodes are prefixes that continue, and node 0 is empty.
    Node `inner` + i is the code `code_of_leaf`[i]. The int64 tensors have an entry per node or inner node:
    token: last token of the prefix, BOS for the empty one. depth: its number of tokens. first_child,
    children: the first node below it, and their number, consecutive. path [inner, at most depth + 1]: the
    nodes from the empty prefix down to itself, which also fills the rest. nodes [codes, depth + 1]: the path
    to each code.
    """

    def __init__(self, codes: Sequence[str], formatter: BlockyFormatter):
        self.codes = list(codes)
        blocks = np.stack([formatter.encode_code(code) for code in self.codes])  # [codes, depth]
        order = np.lexsort(blocks.T[::-1])
        blocks = blocks[order]
        changed = np.logical_or.accumulate(blocks[1:] != blocks[:-1], axis=1)  # a new prefix of each length
        place = np.pad(np.cumsum(changed, axis=0), ((1, 0), (1, 0)))  # number of each prefix in its level
        sizes = place[-1] + 1
        if sizes[-1] < len(blocks):
            one, other = (self.codes[i] for i in order[np.flatnonzero(~changed[:, -1])[0] :][:2])
            raise ValueError(f"the codes {one!r} and {other!r} have the same tokens")
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
        self.token, self.depth, self.path, self.first_child, self.children, self.code_of_leaf = map(
            torch.from_numpy, (token, depth, path, first_child, children, order)
        )
        self.nodes = torch.from_numpy(nodes[order.argsort()])


class _PrefixCache:
    """A growing cache of keys and values of the prefixes in a layer's self-attention, [slots, H]."""

    def __init__(self, slots: int):
        self.slots, self.rows = slots, None

    def put(self, start: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write key and value [N, H] at slot `start`, and return all keys and all values."""
        end = start + len(key)
        if self.rows is None:
            self.rows = key.new_empty(2, max(self.slots, end), key.shape[1])
        elif end > self.rows.shape[1]:
            self.rows = F.pad(self.rows, (0, 0, 0, end))
        self.rows[0, start:end], self.rows[1, start:end] = key, value
        return self.rows[0], self.rows[1]


def attend_to_path(
    layer: MultiheadAttention, q: Tensor, keys: Tensor, values: Tensor, path: Tensor, visible: Tensor | None
) -> Tensor:
    """Compute self-attention of N prefixes, each to itself and its own prefixes → [N, H].

    Shapes: q [N, H], keys and values [slots, H], path int64 [N, D] of slots, visible bool [N, D] or None.
    """
    heads, size = layer.heads, q.shape[1] // layer.heads
    scores = torch.stack(
        [(q * keys.index_select(0, at)).unflatten(1, (heads, size)).sum(-1) for at in path.unbind(1)], dim=2
    )
    scores = scores * size**-0.5  # [N, heads, D]
    if visible is not None:
        scores = scores.masked_fill(~visible[:, None], -INF)
    weights = scores.softmax(2).to(values.dtype)
    mixed = q.new_zeros(len(q), heads, size)
    for j, at in enumerate(path.unbind(1)):
        mixed.addcmul_(values.index_select(0, at).unflatten(1, (heads, size)), weights[:, :, j, None])
    return layer.out_proj(mixed.flatten(1))


@dataclass
class _Memory:
    """The memory that the decoder attends to."""

    keys: list[Tensor]  # [B, heads, S, H / heads] per layer
    values: list[Tensor]
    visible: Tensor | None  # bool [B, 1, 1, S]

    def rows(self, index: Tensor) -> "_Memory":
        keys, values = ([x[index] for x in tensors] for tensors in (self.keys, self.values))
        return _Memory(keys, values, None if self.visible is None else self.visible[index])


@dataclass
class _Queue:
    """Prefixes and codes found so far, unordered."""

    log_prob: Tensor  # float [B, F], −inf for none
    node: Tensor  # int64 [B, F]
    slot: Tensor  # int64 [B, F], slot of the prefix one token shorter

    def rows(self, index: Tensor) -> "_Queue":
        return _Queue(self.log_prob[index], self.node[index], self.slot[index])

    def shorten(self, k: int, inner: int) -> Tensor:
        """Drop empty columns and entries that cannot lead to the k best codes, and return which entries
        are prefixes to open, bool [B, F].
        """
        if self.log_prob.shape[1] >= k:
            of_codes = self.log_prob.masked_fill(self.node < inner, -INF)
            least = of_codes.topk(k).values[:, -1:]  # of the k-th best code, −inf if there are fewer
            self.log_prob = self.log_prob.masked_fill(self.log_prob < least, -INF)
        longest = int((self.log_prob > -INF).sum(1).max())
        self.log_prob, at = self.log_prob.topk(longest)
        self.node, self.slot = self.node.gather(1, at), self.slot.gather(1, at)
        return (self.node < inner) & (self.log_prob > -INF)

    def pop(self, is_open: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
        """Remove and return up to `most` of the most probable open prefixes of each row: (log_prob, node,
        slot), [B, P] each, filled up with −inf and the empty prefix.
        """
        priority = self.log_prob.masked_fill(~is_open, -INF)
        first, at = priority.topk(min(most, int(is_open.sum(1).max())))
        none, log_prob = first == -INF, self.log_prob.gather(1, at)
        node, slot = (x.gather(1, at).masked_fill(none, 0) for x in (self.node, self.slot))
        self.log_prob = self.log_prob.scatter(1, at, log_prob.masked_fill(~none, -INF))
        return log_prob.masked_fill(none, -INF), node, slot

    def add(self, log_prob: Tensor, nodes: Tensor, slots: Tensor, after: Tensor, tree: CodeTrie) -> None:
        """Add the children of prefixes `nodes` with log_prob in `slots`, [B, P] each. after: from `_open`."""
        number = torch.arange(int(tree.children[nodes].max()), device=nodes.device)
        exist = number < tree.children[nodes][..., None]  # [B, P, C]
        child = torch.where(exist, tree.first_child[nodes][..., None] + number, 0)
        of_children = (log_prob[..., None] + after.gather(2, tree.token[child])).masked_fill(~exist, -INF)
        self.log_prob = torch.cat([self.log_prob, of_children.flatten(1)], dim=1)
        self.node = torch.cat([self.node, child.flatten(1)], dim=1)
        self.slot = torch.cat([self.slot, slots[..., None].expand_as(child).flatten(1)], dim=1)

    def best_codes(self, k: int, tree: CodeTrie) -> tuple[Tensor, Tensor]:
        """Return (numbers of codes, log_prob), [B, k] each, equal ones by number."""
        is_code = self.node >= tree.inner
        numbers = tree.code_of_leaf[(self.node - tree.inner).clamp(min=0)]
        code, at = torch.where(is_code, numbers, len(tree.codes)).sort(1)
        scores = self.log_prob.masked_fill(~is_code, -INF).gather(1, at)
        scores, again = scores.sort(dim=1, descending=True, stable=True)
        return code.gather(1, again)[:, :k], scores[:, :k]


class CodeSearch:
    """A model and a tree of codes. Values that no text affects are computed once, with the current weights.

    Args:
        linear_share: 0…1, share of the linear decoder in the ranking. Above 0 its outputs must be the codes
            of the tree, in their order.
    """

    def __init__(self, model: Seq2SeqMixerOccCANINE, tree: CodeTrie, linear_share: float = 0.0):
        self.model, self.linear_share = model, linear_share
        self.layers = model.decoder.decoder.layers
        self.tree, device = tree, next(model.parameters()).device
        for name, value in vars(tree).items():
            if isinstance(value, Tensor):
                setattr(tree, name, value.to(device))
        with evaluating(model):
            decoder, layer = model.decoder, self.layers[0]
            decoder.check_length(tree.depths)
            position = decoder.positional_encoding.pos_embedding[tree.depth[: tree.inner], 0]
            x = decoder.token_emb(tree.token[: tree.inner]) + position  # [inner, H]
            q, k, v = layer.self_attn.project(x[None], QUERY_KEY_VALUE)[0].chunk(3, dim=1)
            reached = torch.arange(tree.depths, device=x.device) <= tree.depth[: tree.inner, None]
            self.x = layer.norm1(x + attend_to_path(layer.self_attn, q, k, v, tree.path, reached))
            cross = layer.multihead_attn
            (q,) = cross.by_head(cross.project(self.x[None], QUERY))
            self.q = q[0].transpose(0, 1)  # [inner, heads, H / heads]

    def full(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the probability of every code, float64 [B, codes]: without a linear_share the probability of
        writing it in the first block, else normalized over the codes.
        """
        written, linear = self.log_probs(input_ids, attention_mask)
        if not self.linear_share:
            return written.double().exp()
        return torch.lerp(written, linear.to(written), self.linear_share).double().softmax(1)

    def log_probs(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of all codes, float [B, codes]: (of writing, of the linear decoder)."""
        with evaluating(self.model):
            memory, text = self._encode(input_ids, attention_mask)
            widest = max(b - a for a, b in zip(self.tree.levels, self.tree.levels[1:-1]))
            codes = self._arange(len(self.tree.codes)).expand(len(input_ids), -1)
            written = self._written(memory, codes, widest)
            return written, upcast_half(self.model.classify(text)).log_softmax(1)

    def topk(self, input_ids: Tensor, attention_mask: Tensor, k: int, by_all=False) -> tuple[Tensor, Tensor]:
        """Return the k most probable codes (or all, if fewer), the most probable first, equal ones in the
        order of the tree: (numbers int64 [B, k], probabilities float64 [B, k]). by_all: through `full`.
        """
        k = min(k, len(self.tree.codes))
        if self.linear_share or by_all:
            probs, codes = self.full(input_ids, attention_mask).sort(dim=1, descending=True, stable=True)
            return codes[:, :k], probs[:, :k]
        with evaluating(self.model):
            memory, _ = self._encode(input_ids, attention_mask)
            parts = self._arange(len(input_ids)).split(by_kind(ROWS_AT_ONCE, self.x.device))
            results = [self._topk(memory.rows(part), k) for part in parts]
        codes, log_probs = map(torch.cat, zip(*results))
        return codes, log_probs.double().exp()

    def candidates(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the linear decoder's most probable codes, ranked by both decoders: (numbers int64 [B, N],
        weighted means of both log-probabilities float [B, N], the highest first, logits of the linear decoder
        [B, codes]). N: CANDIDATES, or as many as there are.
        """
        with evaluating(self.model):
            memory, text = self._encode(input_ids, attention_mask)
            logits = upcast_half(self.model.classify(text))
            codes = logits.topk(min(CANDIDATES, logits.shape[1])).indices
            written = self._written(memory, codes, codes.shape[1])
            linear = logits.log_softmax(1).gather(1, codes).to(written)
            scores = torch.lerp(written, linear, self.linear_share or EQUAL_SHARE)
            scores, best = scores.sort(dim=1, descending=True, stable=True)
            return codes.gather(1, best), scores, logits

    def _encode(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[_Memory, TextVectors]:
        """Return the input of both decoders: (memory, vectors of the texts)."""
        memory, text = self.model.encode(input_ids, attention_mask)
        layers = [layer.multihead_attn for layer in self.layers]
        keys, values = zip(*(layer.by_head(layer.project(memory, KEY_VALUE)) for layer in layers))
        visible = visible_memory(self.model.memory_padding_mask(attention_mask))
        return _Memory(list(keys), list(values), visible), text

    def _arange(self, count: int) -> Tensor:
        return torch.arange(count, device=self.x.device)

    def _open(
        self, nodes: Tensor, memory: _Memory, opened: list, start: int, path: Tensor, visible: Any = None
    ) -> Tensor:
        """Return the log-probability of each token after each prefix, float [B, P, V].

        Args:
            nodes: inner nodes, int64 [B, P].
            opened: a `_PrefixCache` for each layer. The nodes take its slots from `start` on, row by row.
            path, visible: slots, int64 [B · P, D], and bool [B · P, D] or None.
        """
        q = self.q[nodes].transpose(1, 2)  # [B, heads, P, H / heads]
        x = self.layers[0].cross_attend_and_feed_forward(
            self.x[nodes], memory.keys[0], memory.values[0], memory.visible, q
        )
        for i, layer in enumerate(self.layers[1:], start=1):
            flat, attention = x.flatten(0, 1), layer.self_attn  # [B · P, H]
            q, k, v = product(flat, *attention.in_proj()).chunk(3, dim=1)
            mixed = attend_to_path(attention, q, *opened[i].put(start, k, v), path, visible)
            x = layer.norm1(flat + mixed).view_as(x)
            x = layer.cross_attend_and_feed_forward(x, memory.keys[i], memory.values[i], memory.visible)
        return upcast_half(self.model.decoder.head(x)).log_softmax(-1)

    def _written(self, memory: _Memory, codes: Tensor, most: int) -> Tensor:
        """Return log-probabilities float [B, N] of codes int64 [B, N] in the first block, level by level, for
        as many rows at once as allow `most` prefixes each.
        """
        at_once = max(1, by_kind(PREFIXES_AT_ONCE, self.x.device) // most)
        if len(codes) > at_once:
            parts = self._arange(len(codes)).split(at_once)
            return torch.cat([self._written(memory.rows(part), codes[part], most) for part in parts])
        order = self.tree.nodes[codes][..., -1].argsort(1)  # codes that begin alike follow each other
        nodes = self.tree.nodes[codes.gather(1, order)]  # [b, N, depth + 1]
        rows, count = order.shape
        opened = [_PrefixCache(rows * count * self.tree.depths) for _ in self.layers]
        row, slots = self._arange(rows)[:, None], codes.new_zeros(rows, count, 0)
        log_probs, used = self.x.new_zeros(rows, count, dtype=upcast_half(self.x).dtype), 0
        for level in range(self.tree.depths):
            at = nodes[..., level]
            place = F.pad(at[:, 1:] != at[:, :-1], (1, 0)).cumsum(1)  # place of its prefix
            width = int(place[:, -1].max()) + 1
            slots = torch.cat([slots, (used + row * width + place)[..., None]], dim=2)
            prefixes = at.new_zeros(rows, width).scatter_(1, place, at)
            path = slots.new_zeros(rows, width, level + 1)
            path.scatter_(1, place[..., None].expand_as(slots), slots)
            after = self._open(prefixes, memory, opened, used, path.flatten(0, 1))
            token = self.tree.token[nodes[..., level + 1]]
            log_probs = log_probs + after.flatten(1).gather(1, place * after.shape[2] + token)
            used += rows * width
        return torch.empty_like(log_probs).scatter_(1, order, log_probs)

    def _topk(self, memory: _Memory, k: int) -> tuple[Tensor, Tensor]:
        tree, rows = self.tree, len(memory.keys[0])
        log_prob = self.x.new_zeros(rows, 1, dtype=upcast_half(self.x).dtype)
        nodes, slots = torch.zeros(2, rows, 1, dtype=torch.int64, device=self.x.device)
        queue = _Queue(log_prob, nodes, slots)  # the empty prefix of each row
        codes, log_probs = nodes.new_empty(rows, k), log_prob.new_empty(rows, k)
        opened, used = [_PrefixCache(rows * 8 * OPENED_AT_ONCE) for _ in self.layers], 0
        paths = codes.new_zeros(0, tree.depths)  # slots on the way to each slot
        active = self._arange(rows)
        while True:
            is_open = queue.shorten(k, tree.inner)
            done = ~is_open.any(1)
            finished = int(done.sum())
            if 4 * finished >= len(active):
                codes[active[done]], log_probs[active[done]] = queue.rows(done).best_codes(k, tree)
                if finished == len(active):
                    return codes, log_probs
                active, is_open = active[~done], is_open[~done]
                memory, queue = memory.rows(~done), queue.rows(~done)
            log_prob, nodes, parents = queue.pop(is_open, OPENED_AT_ONCE)  # [b, P] each
            depth = tree.depth[nodes].flatten()
            slots = used + self._arange(nodes.numel())  # [b · P]
            reach = self._arange(int(depth.max()) + 1)  # [D]
            path = slots[:, None].repeat(1, tree.depths)
            if used:
                path = torch.where(self._arange(tree.depths) < depth[:, None], paths[parents.flatten()], path)
            after = self._open(nodes, memory, opened, used, path[:, : len(reach)], reach <= depth[:, None])
            paths, used = torch.cat([paths, path]), used + len(slots)
            queue.add(log_prob, nodes, slots.view_as(nodes), after, tree)
