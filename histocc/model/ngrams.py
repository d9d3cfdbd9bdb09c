"""Hashed character n-grams and words of a description, computed from its character ids on any device.

Most of a description's meaning is in its words and their parts, and an encoder must first learn to spell
them. Here each word of the training texts, and each window of 2 to 4 characters within one, has a row in a
table, found by a polynomial hash. (Compare CANINE's own optional n-grams, Clark et al., 2021, arXiv
2103.06874, and the Byte Latent Transformer, Pagnoni et al., 2024, arXiv 2412.09871.) A window of 4 is also
counted with an inner character left open, so that a changed letter costs less. The language counts as the
first word. A row is weighted by its inverse document frequency, and a text's weights have the length 1. In
the square of that length each further column adds half as much as the first one. With several columns, the
whole first one is also counted, and each of its words together with each further cell, for codes that
depend on both.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from histocc.model.layers import Linear, product_of_groups
from histocc.runtime.rng import MULTIPLIERS
from histocc.text import COLUMN_SEPARATOR, LANGUAGE_SEPARATOR, SEP_ID, letters, small_letters

# The patterns to count: # is a character, _ any character. A window has blanks only at its ends.
PATTERNS = ("##", "###", "####", "#_##", "##_#", "word")
# With further columns: each word of the first one together with the whole cell of column 1, 2, … For column
# 0 it is only the first word, so that a text counts once as a whole.
WITH_CELL = "word with cell "
WHOLE_TEXT = f"{WITH_CELL}0"
# N-grams of a model in closed form (histocc/model/ridge.py): the first and the last word of the first column,
# and all its words in any order. Together they have WORDS_SHARE of the others' sum of squares.
WORDS = ("first word", "last word", "all words")
WORDS_SHARE = 0.2
# Which capitals count as small letters: those of `histocc.text.small_letters`, or only ASCII in models that
# name no rule.
ALL_CASES, ASCII_CASE = "all", "ascii"
FIRST_PATTERNS = ("##", "###", "####", "#####", "######", "word", "two words")  # for models without a list
MIN_BITS, MAX_BITS = 4, 24
LONGEST = 1 << 14  # positions of a text from which n-grams are taken
POSITIONS_AT_ONCE = 1 << 18  # positions of the texts whose vectors are computed at once
NONE = "none"  # a value of --ngrams, besides auto and a number of bits
_BLANK = 32
_COLUMN = 1_000_003
_RADIX = 6364136223846793005  # odd, so it has an inverse modulo 2^64
_INVERSE, *_MIX = np.array([pow(_RADIX, -1, 1 << 64), *MULTIPLIERS], dtype=np.uint64).view(np.int64).tolist()


class TextVectors(NamedTuple):
    """The vectors of a text, from which `classify` computes the logits of codes."""

    encoded: Tensor  # [B, H], from the encoder
    ngrams: Tensor | None = None  # [B, width]
    logits: Tensor | None = None  # [B, classes], from a model in closed form, without a linear decoder

    def joined(self) -> Tensor:
        """Return the concatenated vectors of the encoder and of n-grams, [B, H (+ width)]."""
        return self.encoded if self.ngrams is None else torch.cat([self.encoded, self.ngrams], dim=1)


def _powers(base: int, count: int, device: torch.device) -> Tensor:
    """Return base^0 … base^(count − 1) modulo 2^64, int64 [count]."""
    factors = torch.full((count,), base, dtype=torch.int64, device=device)
    factors[:1] = 1
    return factors.cumprod(0)


def _mixed(values: Tensor) -> Tensor:
    """Return hashes whose high bits depend on all bits of `values`, int64."""
    values = values * _MIX[0]
    values = values ^ ((values >> 31) & ((1 << 33) - 1))
    return values * _MIX[1]


def _is_text(input_ids: Tensor) -> Tensor:
    """Mark language and description in int64 [B, S]: bool [B, S]. The first `[SEP]` that is spelled out
    separates them. Without it both are empty. CANINE's own follows them.
    """
    width, length = len(LANGUAGE_SEPARATOR), input_ids.shape[1]
    count, position = max(0, length - width + 1), torch.arange(length, device=input_ids.device)
    is_separator = torch.ones_like(input_ids[:, :count], dtype=torch.bool)
    for i, letter in enumerate(LANGUAGE_SEPARATOR):
        is_separator &= input_ids[:, i : i + count] == ord(letter)
    start = torch.where(is_separator.any(1), is_separator.int().argmax(1), length)[:, None]
    is_end = input_ids == SEP_ID
    end = torch.where(is_end.any(1) & is_separator.any(1), is_end.int().argmax(1), 0)[:, None]
    return (position > 0) & (position < end) & ~((position >= start) & (position < start + width))


def _fold(ids: Tensor, rule: str) -> Tensor:
    """Map character ids to code points that count as equal, according to a rule of CASES."""
    if rule == ALL_CASES:
        table = torch.from_numpy(small_letters()).to(ids.device)
        return torch.where(ids < len(table), table[ids.clamp(max=len(table) - 1)].to(ids.dtype), ids)
    return torch.where((ids >= ord("A")) & (ids <= ord("Z")), ids + 32, ids)


def hash_ngrams(
    input_ids: Tensor, patterns: Sequence[str] = PATTERNS, case: str = ALL_CASES
) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for character ids int64 [B, S], (hashes int64 [B, S, F] of the n-grams of F patterns that begin
    at each position, which of them exist bool [B, S, F], word of each position int64 [B, S]). Capitals count
    as small letters according to the rule `case`. Blanks, and the separators after language and columns,
    belong to the word after them.
    """
    length = input_ids.shape[1]
    ids = _fold(torch.where(_is_text(input_ids), input_ids, _BLANK), case)
    ends_column = ids == ord(COLUMN_SEPARATOR)
    ids = torch.where(ends_column, _BLANK, ids)
    place = ends_column.long().cumsum(1)
    column = place * _COLUMN  # n-grams of different columns differ
    blank = ids == _BLANK
    # [B, S + 1], modulo 2^64
    sums = F.pad(((ids + 1) * _powers(_RADIX, length, ids.device)).cumsum(1), (1, 0))
    blanks = F.pad(blank.long().cumsum(1), (1, 0))
    inverse = _powers(_INVERSE, length, ids.device)
    begins = ~blank & F.pad(blank, (1, 0), value=True)[:, :length]
    # position of the first blank at or after each position: the end of its word
    end = torch.where(blank, torch.arange(length, device=ids.device), length).flip(1).cummin(1).values.flip(1)
    next_word = (end + 1).clamp(max=length - 1)
    has_next = begins & (end + 1 < length) & ~blank.gather(1, next_word)  # a word follows directly
    words = {"word": (1, end, begins), "two words": (2, end.gather(1, next_word), has_next)}
    word = (blank & F.pad(~blank, (1, 0))[:, :length]).long().cumsum(1)
    in_text = begins & (place == 0) & (word > 0)  # word 0 is the language
    ends = {"first word": word == 1, "last word": word == (word * in_text).amax(1, keepdim=True)}
    hashes, exists = [], []
    for pattern in patterns:
        if pattern.startswith(WITH_CELL):
            number, of_words = int(pattern.removeprefix(WITH_CELL)), hashes[patterns.index("word")]
            cell = (of_words * (begins & (place == number))).sum(1, keepdim=True)  # in any order of its words
            hashed = _mixed(of_words * _RADIX + cell)
            exist = (in_text if number else in_text & ends["first word"]) & (cell != 0)
        elif pattern in WORDS:
            of_words = hashes[patterns.index("word")]
            if pattern in ends:
                exist = in_text & ends[pattern]
            else:
                of_words, exist = (of_words * in_text).sum(1, keepdim=True), in_text & ends["first word"]
            hashed = _mixed(of_words.expand_as(ids) * _RADIX + 1 + WORDS.index(pattern))
        elif pattern in words:
            number, last, exist = words[pattern]
            hashed = _mixed((sums.gather(1, last) - sums[:, :length]) * inverse + 100 * number + column)
        else:
            size = len(pattern)
            count = max(0, length - size + 1)
            hashed = (sums[:, size:] - sums[:, :count]) * inverse[:count] + size
            for i in (i for i, character in enumerate(pattern) if character == "_"):
                left_open = (ids[:, i : i + count] + 1) * _powers(_RADIX, size, ids.device)[i]
                hashed = hashed - left_open + 1000 * i
            within = blanks[:, size - 1 : length] == blanks[:, 1 : count + 1]  # blanks only at the ends
            has_letters = blanks[:, size:] - blanks[:, :count] < size
            hashed = F.pad(_mixed(hashed + column[:, :count]), (0, length - count))
            exist = F.pad(within & has_letters, (0, length - count))
        hashes.append(hashed)
        exists.append(exist)
    return torch.stack(hashes, 2), torch.stack(exists, 2), word


class Ngrams(nn.Module):
    """N-grams that complement an encoder: a vector of the text for the linear decoder, and vectors of its
    words for the memory.

    `hashes` int64 [rows], increasing, identify the n-gram of each row, and `idf` float [rows] weighs them.
    Other n-grams are ignored.

    Args:
        rows, width: size of the table, which has a row for each n-gram of the training texts.
        hidden_size, classes: H of the memory, outputs of the linear decoder.
        dropout: share of the n-grams to leave out in training, 0…1.
        patterns, case: as in `hash_ngrams`.
    """

    hashes: Tensor
    idf: Tensor

    def __init__(
        self,
        rows: int,
        width: int,
        hidden_size: int,
        classes: int,
        dropout: float = 0.0,
        patterns: Sequence[str] = PATTERNS,
        case: str = ALL_CASES,
    ):
        super().__init__()
        if not 1 <= rows <= 1 << MAX_BITS:
            raise ValueError(f"rows of n-grams: found {rows}, expected 1 … {1 << MAX_BITS:,}")
        self.width, self.dropout, self.patterns, self.case = width, dropout, patterns, case
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

    def zero_output(self) -> None:
        """Make the n-grams leave the model's output unchanged until they are trained."""
        for layer in (self.linear, self.word_to_memory, self.text_to_memory):
            nn.init.zeros_(layer.weight)

    def forward(self, input_ids: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return (vectors of the texts [rows of all, width], additions to the memory of each group [B, S, H])
        for groups of rows, int64 [B, S] each.
        """
        texts, words = zip(*(self.vectors(ids, with_words=True) for ids in input_ids))
        text = torch.cat(texts)
        of_text = self.text_to_memory(text)[:, None].split(list(map(len, texts)))
        # each position has its word, [CLS] also has the whole text
        memory = product_of_groups(words, self.word_to_memory.weight)
        memory = [torch.cat([x[:, :1] + whole, x[:, 1:]], dim=1) for x, whole in zip(memory, of_text)]
        return text, memory

    def vectors(self, input_ids: Tensor, with_words: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return (vectors of texts [B, width] and, with_words, vectors of the word at each position [B, S,
        width]) for int64 [B, S].
        """
        if not with_words and len(input_ids) > 1 and input_ids.numel() > POSITIONS_AT_ONCE:
            parts = input_ids.split(max(1, POSITIONS_AT_ONCE // input_ids.shape[1]))
            return torch.cat([self.vectors(part)[0] for part in parts]), None
        rows, weight, word = self.weighted(input_ids)
        flat = rows.flatten(0, 1), self.table.weight
        of_positions = F.embedding_bag(*flat, mode="sum", per_sample_weights=weight.flatten(0, 1))
        of_positions = of_positions.unflatten(0, rows.shape[:2])  # [B, S, width]
        squares = weight.square().sum(2, keepdim=True)  # [B, S, 1]
        words = None
        if with_words:
            same = (word[:, :, None] == word[:, None]).to(of_positions.dtype)  # [B, S, S]
            # sums of squares can exceed float16
            with torch.autocast(same.device.type, enabled=False):
                words = _normalized(same @ of_positions, same @ squares)
        return _normalized(of_positions.sum(1), squares.sum(1)), words

    def weighted(self, input_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (rows of the table int64 [B, S, F], their weights, 0 for none, words int64 [B, S])."""
        rows, known, _, word = self._rows(input_ids, self.patterns)
        weight, share = self.idf[rows] * known, 1.0
        is_of_words = torch.tensor([pattern in WORDS for pattern in self.patterns], device=weight.device)
        of_words, weight = weight * is_of_words, weight * ~is_of_words
        if WHOLE_TEXT in self.patterns:  # otherwise further cells outvote a known text
            weight[:, :, self.patterns.index(WHOLE_TEXT)] *= 2
            share = 0.5
        # further columns, however short, have this share of the first one's squares, which stay the same
        column = (input_ids == ord(COLUMN_SEPARATOR)).long().cumsum(1)  # [B, S]
        squares = torch.zeros_like(column, dtype=weight.dtype).scatter_add(1, column, weight.square().sum(2))
        first = torch.where(squares[:, :1] > 0, squares[:, :1], 1)
        wanted = torch.where(column > 0, share * first, first)
        weight = weight * (wanted / squares.gather(1, column).clamp(min=1e-12)).sqrt()[:, :, None]
        if of_words.any():
            total, own = (each.square().sum((1, 2), keepdim=True) for each in (weight, of_words))
            weight = weight + of_words * (WORDS_SHARE * total / own.clamp(min=1e-12)).sqrt()
        if self.training and self.dropout:
            weight = weight * (torch.rand_like(weight) >= self.dropout)
        return rows, weight, word

    def _rows(self, input_ids: Tensor, patterns: Sequence[str]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (rows of the table, which n-grams are known, which exist, [B, S, F] each, words [B, S])."""
        hashed, exist, word = hash_ngrams(input_ids, patterns, self.case)
        at = exist.flatten().nonzero()[:, 0]  # half of them, as the search below costs more than the rest
        found = torch.searchsorted(self.hashes, hashed.flatten()[at]).clamp(max=len(self.hashes) - 1)
        rows = torch.zeros_like(hashed).flatten().index_copy(0, at, found).view_as(hashed)
        return rows, exist & (self.hashes[rows] == hashed), exist, word

    def know(self, input_ids: Tensor) -> Tensor:
        """Return whether each description has a known n-gram with a letter, bool [B], for int64 [B, S]."""
        known = self._rows(input_ids, self.patterns[:1])[1][:, :, 0]  # all others contain the shortest
        table, is_text = torch.from_numpy(letters()).to(input_ids.device), _is_text(input_ids)
        is_letter = is_text & table[input_ids.clamp(max=len(table) - 1)]
        is_letter &= (~is_text).cumsum(1) > len(LANGUAGE_SEPARATOR)  # not of the language
        return (known & (is_letter | is_letter.roll(-1, 1))).any(1)

    def known_share(self, input_ids: Tensor) -> Tensor:
        """Return the share of each text's n-grams that are known, float [B], for int64 [B, S], weighted by
        their inverse document frequency. Unknown ones have the highest value of the table.
        """
        rows, known, exist, _ = self._rows(input_ids, self.patterns)
        seen, others = (self.idf[rows] * known).sum((1, 2)), (exist & ~known).sum((1, 2))
        return seen / (seen + self.idf.max() * others)

    def text_of(self, rows: Tensor, weight: Tensor, text: Tensor, count: int) -> Tensor:
        """Return vectors of `count` texts [B, width] from the rows of their n-grams int64 [E], their weights
        [E] and the text of each int64 [E], in increasing order.
        """
        return _normalized(*self._bags(rows, weight, text, count))

    def by_word(
        self, rows: Tensor, weight: Tensor, text: Tensor, word: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute `forward` without other memory, where all positions of a word are equal: each word once,
        after [CLS].

        Args:
            rows: int64 [E], of the n-grams of all texts, in the order of their words.
            weight: [E], 0 for none.
            text, word: int64 [E], the text of each, and its word in that text.
            positions: [B, W], number of positions of each word.

        Returns:
            Vector of each text [B, width], memory [B, 1 + W, H], and the logarithm of the number of positions
            [B, 1 + W], to be added to the scores of attention.
        """
        texts, words = positions.shape
        vectors, squares = self._bags(rows, weight, text * words + word, texts * words)
        vectors, squares = vectors.view(texts, words, -1), squares.view(texts, words, 1)
        whole = _normalized(vectors.sum(1), squares.sum(1))
        memory = self.word_to_memory(_normalized(vectors, squares))
        memory = torch.cat([memory[:, :1] + self.text_to_memory(whole)[:, None], memory], dim=1)
        return whole, memory, F.pad(positions.log(), (1, 0))

    def _bags(self, rows: Tensor, weight: Tensor, bag: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return weighted sums of rows of the table [count, width] for each `bag` [E], in increasing order,
        and sums of the squares of their weights [count, 1].
        """
        at = weight.nonzero(as_tuple=True)
        bag, used = bag[at], weight[at]
        # only rows of the table that occur, so that a sparse gradient has each once
        distinct, row = rows[at].unique(return_inverse=True)
        offsets = begins_of(bag, count)
        vectors = F.embedding_bag(row, self.table(distinct), offsets, mode="sum", per_sample_weights=used)
        return vectors, used.new_zeros(count, 1).index_add(0, bag, used.square()[:, None])


def _normalized(vectors: Tensor, squares: Tensor) -> Tensor:
    """Divide weighted sums [..., width] by the lengths of their weights. squares: these lengths squared."""
    return vectors / squares.sqrt().clamp(min=1e-6)


def begins_of(bag: Tensor, count: int) -> Tensor:
    """Return the start of each of `count` bags in int64 [E], in increasing order: int64 [count]."""
    return F.pad(torch.bincount(bag, minlength=count).cumsum(0)[:-1], (1, 0))


class NoEncoder(nn.Module):
    """The encoder of a model that has only n-grams: vectors of zeros [B, S, width], without weights."""

    zero: Tensor

    def __init__(self, width: int):
        super().__init__()
        self.width = width
        self.register_buffer("zero", torch.tensor([0.0]), persistent=False)  # has the dtype and the device

    def zero_output(self) -> None:
        """Do nothing."""

    def forward_groups(
        self, input_ids: Sequence[Tensor], attention_mask: Sequence[Tensor], padding_follows: Sequence[bool]
    ) -> tuple[list[Tensor], Tensor]:
        """Return (zeros [B, S, H] of each group, zeros [rows of all, H]), as the encoder does."""
        memory = [self.zero.expand(*ids.shape, self.width) for ids in input_ids]
        return memory, self.zero.expand(sum(map(len, input_ids)), self.width)

    def pooled(self, input_ids: Tensor, attention_mask: Tensor, padding_follows: bool = False) -> Tensor:
        return self.zero.expand(len(input_ids), self.width)
