"""Hashed character n-grams and words of a description, computed from its character ids on any device.

A description says most through its words and their parts, and an encoder must first learn to spell them.
Here each window of 2 to 6 characters within a word, each word and each pair of neighbouring words that
the training texts hold has a row in a table, found by a polynomial hash (compare CANINE's own optional
n-grams, Clark et al., 2021, arXiv 2103.06874, and those of the Byte Latent Transformer, Pagnoni et al.,
2024, arXiv 2412.09871). The language counts as the first word. A row counts by its inverse document
frequency, and the weights of a text have the length 1.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from histocc.model.layers import Linear
from histocc.model.width_groups import product_of_groups
from histocc.text import LANGUAGE_SEPARATOR, SEP_ID

WINDOWS = (2, 3, 4, 5, 6)  # characters; blanks stand at their ends alone
LEAST_BITS, MOST_BITS = 4, 24
AUTO, NONE = "auto", "none"  # of --ngrams, beside a number of bits
_BLANK = 32
_RADIX = 6364136223846793005  # odd, so it has an inverse modulo 2^64
_INVERSE = pow(_RADIX, -1, 1 << 64)
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of splitmix64


def _signed(value: int) -> int:
    """The int64 with the bits of `value` modulo 2^64."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _powers(base: int, count: int, device: torch.device) -> Tensor:
    """base^0 … base^(count − 1) modulo 2^64, int64 [count]."""
    factors = torch.full((count,), _signed(base), dtype=torch.int64, device=device)
    factors[:1] = 1
    return factors.cumprod(0)


def _mixed(values: Tensor) -> Tensor:
    """Hashes whose high bits depend on all bits of `values`, int64."""
    values = values * _signed(_MIX[0])
    values = values ^ ((values >> 31) & ((1 << 33) - 1))
    return values * _signed(_MIX[1])


def _next_blank(blank: Tensor) -> Tensor:
    """Position of the first blank at or behind each position, int64 [B, S]; S where there is none."""
    length = blank.shape[1]
    at = torch.where(blank, torch.arange(length, device=blank.device), length)
    return at.flip(1).cummin(1).values.flip(1)


class NgramHasher(nn.Module):
    """Finds the n-grams of texts. `features`: how many begin at each position at most."""

    features = len(WINDOWS) + 2
    marker: Tensor

    def __init__(self):
        super().__init__()
        marker = [ord(letter) for letter in LANGUAGE_SEPARATOR]
        self.register_buffer("marker", torch.tensor(marker), persistent=False)

    def inside(self, input_ids: Tensor) -> Tensor:
        """Where language and description stand in int64 [B, S]: bool [B, S]. Between them stands the first
        `[SEP]` that is written out, without which there is neither; behind them CANINE's own."""
        width, length = len(self.marker), input_ids.shape[1]
        position = torch.arange(length, device=input_ids.device)
        found = (input_ids.unfold(1, width, 1) == self.marker).all(2)  # [B, S − 4]
        start = torch.where(found.any(1), found.int().argmax(1), length)[:, None]
        ended = input_ids == SEP_ID
        end = torch.where(ended.any(1) & found.any(1), ended.int().argmax(1), 0)[:, None]
        between = (position >= start) & (position < start + width)
        return (position > 0) & (position < end) & ~between

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(hashes int64 [B, S, features], which are there bool [B, S, features], word of each position
        int64 [B, S]) for character ids int64 [B, S]; blanks, and the [SEP] behind the language, belong to
        the word behind them. Letters A–Z count as a–z."""
        rows, length = input_ids.shape
        ids = torch.where(self.inside(input_ids), input_ids, _BLANK)
        ids = torch.where((ids >= ord("A")) & (ids <= ord("Z")), ids + 32, ids)
        blank = ids == _BLANK
        # [B, S + 1], modulo 2^64
        sums = F.pad(((ids + 1) * _powers(_RADIX, length, ids.device)).cumsum(1), (1, 0))
        blanks = F.pad(blank.long().cumsum(1), (1, 0))
        inverse = _powers(_INVERSE, length, ids.device)
        hashes, there = [], []
        for size in WINDOWS:
            count = max(0, length - size + 1)
            hashed = (sums[:, size:] - sums[:, :count]) * inverse[:count]
            within = blanks[:, size - 1 : length] == blanks[:, 1 : count + 1]  # no blank but at the ends
            some = blanks[:, size:] - blanks[:, :count] < size
            hashes.append(F.pad(_mixed(hashed + size), (0, length - count)))
            there.append(F.pad(within & some, (0, length - count)))
        begins = ~blank & F.pad(blank, (1, 0), value=True)[:, :length]
        end = _next_blank(blank)  # of the word
        more = end + 1 < length
        behind = (end + 1).clamp(max=length - 1)
        second = begins & more & ~blank.gather(1, behind)  # a word that follows at once
        for number, (last, exists) in enumerate(((end, begins), (end.gather(1, behind), second)), start=1):
            hashes.append(_mixed((sums.gather(1, last) - sums[:, :length]) * inverse + 100 * number))
            there.append(exists)
        word = (blank & F.pad(~blank, (1, 0))[:, :length]).long().cumsum(1)
        return torch.stack(hashes, 2), torch.stack(there, 2), word


class Ngrams(nn.Module):
    """What n-grams add to a model: a vector of the text for the linear decoder, and vectors of its words
    for the memory.

    rows: of the table, one for each n-gram that the training texts hold; width: numbers in a row;
    hidden_size: H of the memory; classes: outputs of the linear decoder; dropout: share of the n-grams
    that are left out in training, 0…1.

    `hashes` int64 [rows], increasing, says whose row each is, and `idf` float [rows] weighs them; other
    n-grams count for nothing. `sparse`: the table's gradient holds the rows of the batch alone.
    """

    hashes: Tensor
    idf: Tensor

    def __init__(self, rows: int, width: int, hidden_size: int, classes: int, dropout: float = 0.0):
        super().__init__()
        if not 1 <= rows <= 1 << MOST_BITS:
            raise ValueError(f"rows of n-grams: found {rows}, expected 1 … {1 << MOST_BITS:,}")
        self.width, self.dropout, self.sparse = width, dropout, False
        self.hasher = NgramHasher()
        self.table = nn.Embedding(rows, width)
        self.linear = Linear(width, classes, bias=False)
        self.word_to_memory = Linear(width, hidden_size, bias=False)
        self.text_to_memory = Linear(width, hidden_size, bias=False)
        self.register_buffer("hashes", torch.arange(rows))
        self.register_buffer("idf", torch.zeros(rows))
        nn.init.normal_(self.table.weight, std=1 / math.sqrt(width))
        nn.init.zeros_(self.linear.weight)
        for layer in (self.word_to_memory, self.text_to_memory):
            nn.init.normal_(layer.weight, std=0.1)

    def add_nothing(self) -> None:
        """From now on, until they are trained, the n-grams change nothing in what the model puts out."""
        for layer in (self.linear, self.word_to_memory, self.text_to_memory):
            nn.init.zeros_(layer.weight)

    def rows(self, input_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(rows of the table int64 [B, S, F], which are there bool [B, S, F], words int64 [B, S])."""
        hashed, there, word = self.hasher(input_ids)
        rows = torch.searchsorted(self.hashes, hashed).clamp(max=len(self.hashes) - 1)
        return rows, there & (self.hashes[rows] == hashed), word

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(vector of each text [B, width], what is added to the memory [B, S, H]) for character ids int64
        [B, S]."""
        text, memory = self.of_groups([input_ids])
        return text, memory[0]

    def of_groups(self, input_ids: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """`forward` of groups of rows, int64 [B, S] each: (vectors of all texts, memory of each group)."""
        texts, words = zip(*map(self.by_position, input_ids))
        text = torch.cat(texts)
        of_text = self.text_to_memory(text)[:, None].split([len(each) for each in texts])
        # each position has its word, that of [CLS] the whole text too
        memory = product_of_groups(words, self.word_to_memory.weight)
        return text, [
            torch.cat([each[:, :1] + whole, each[:, 1:]], dim=1) for each, whole in zip(memory, of_text)
        ]

    def by_position(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(vectors of texts [B, width], of the word at each position [B, S, width]) for int64 [B, S]."""
        rows, weight, word = self.weighted(input_ids)
        vectors = self.bags(rows, weight)  # [B, S, width]
        squares = weight.square().sum(2, keepdim=True)  # [B, S, 1]
        same = (word[:, :, None] == word[:, None]).to(vectors.dtype)  # [B, S, S]
        # sums of squares can be more than float16 holds
        with torch.autocast(same.device.type, enabled=False):
            words = (same @ vectors) / (same @ squares).sqrt().clamp(min=1e-6)
        return self.text_of(vectors, squares), words

    def bags(self, rows: Tensor, weight: Tensor) -> Tensor:
        """The sum of a position's rows, by their weights: int64 and float [B, S, F] → [B, S, width]."""
        bags = F.embedding_bag(
            rows.flatten(0, 1),
            self.table.weight,
            mode="sum",
            sparse=self.sparse,
            per_sample_weights=weight.flatten(0, 1),
        )
        return bags.unflatten(0, rows.shape[:2])

    def text_of(self, vectors: Tensor, squares: Tensor) -> Tensor:
        """Vectors of texts [B, width], from those of positions [B, S, width] and the squares of the weights
        that are in each [B, S, 1].
        """
        return vectors.sum(1) / squares.sum(1).sqrt().clamp(min=1e-6)

    def text(self, input_ids: Tensor) -> Tensor:
        """The vector of each text alone, [B, width], as in `forward`."""
        rows, weight, _ = self.weighted(input_ids)
        return self.text_of(self.bags(rows, weight), weight.square().sum(2, keepdim=True))

    def weighted(self, input_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(rows of the table int64 [B, S, F], their weights, 0 for none [B, S, F], words int64 [B, S])."""
        rows, there, word = self.rows(input_ids)
        weight = self.idf[rows] * there
        if self.training and self.dropout:
            weight = weight * (torch.rand_like(weight) >= self.dropout)
        return rows, weight, word

    def by_word(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What `forward` gives where there is no other memory, each word once: all its positions are the
        same then. [CLS] stands for itself in front of the words.

        Returns (vector of each text [B, width], memory [B, 1 + W, H], what is added to the scores of
        attention [B, 1 + W], which is the logarithm of the number of positions).
        """
        rows, weight, word = self.weighted(input_ids)
        texts, count = len(rows), int(word.max()) + 1
        at = weight.nonzero(as_tuple=True)  # in the order of the positions, so of the words
        place, used = at[0] * count + word[at[:2]], weight[at]
        offsets = F.pad(torch.bincount(place, minlength=texts * count).cumsum(0)[:-1], (1, 0))
        vectors = F.embedding_bag(
            rows[at],
            self.table.weight,
            offsets,
            mode="sum",
            sparse=self.sparse,
            per_sample_weights=used,
        ).unflatten(0, (texts, count))  # [B, W, width]
        squares = used.new_zeros(texts * count).index_add(0, place, used.square()).view(texts, count, 1)
        text = vectors.sum(1) / squares.sum(1).sqrt().clamp(min=1e-6)
        words = self.word_to_memory(vectors / squares.sqrt().clamp(min=1e-6))
        memory = torch.cat([words[:, :1] + self.text_to_memory(text)[:, None], words], dim=1)
        positions = used.new_zeros(texts, count).scatter_add(1, word[:, 1:], attention_mask[:, 1:].to(used))
        return text, memory, F.pad(positions.log(), (1, 0))
