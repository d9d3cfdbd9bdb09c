"""The n-grams of distinct texts."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from histocc.data.arrays import PreparedData, RowSet, text_keys, thinned
from histocc.data.prepare import nothing
from histocc.model.ngrams import Ngrams, hash_ngrams
from histocc.model.ridge import ngram_features
from histocc.text import encode_batch, language_table

MAX_PREFIX = 32  # positions before and after a text, about
COUNTED_TEXTS = 3 << 16  # distinct texts in which n-grams are counted
MAX_PENDING = 1 << 24  # hashes to count at once
HASHED_AT_ONCE = 1 << 18  # positions of texts to hash at once, with their padding


def distinct(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (first place and number of occurrences of the different keys, in order of first occurrence,
    int64 [n] each, and the number of every key among these, int64 [N]).
    """
    _, first, number, count = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
    order = np.argsort(first)
    return first[order], count[order], order.argsort()[number.ravel()]


def pieces(lengths: np.ndarray) -> Iterator[slice]:
    """Yield parts of the texts in order, each with at most HASHED_AT_ONCE positions or one text."""
    start = longest = 0
    for i, length in enumerate(lengths.tolist()):
        longest = max(longest, length + MAX_PREFIX)
        if i > start and (i + 1 - start) * longest > HASHED_AT_ONCE:
            yield slice(start, i)
            start, longest = i, length + MAX_PREFIX
    yield slice(start, len(lengths))


def encoded_rows(
    data: PreparedData, rows: RowSet, texts: np.ndarray, max_len: int, check: Callable[[], None] = nothing
) -> Iterator[Tensor]:
    """Yield the character ids of the texts of some rows, int64 [B, S] each. check: as in `count_ngrams`."""
    table = language_table(data.languages)
    for piece in pieces(rows.lengths(texts)):
        check()
        part = texts[piece]
        language = np.asarray(rows.language)[part].astype(np.int64)
        yield torch.from_numpy(encode_batch(*rows.texts(part), language, table, max_len)[0])


def _counted(
    counted: tuple[np.ndarray, np.ndarray], found: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Merge `found` into `counted`: (different hashes in increasing order, their counts), int64 each."""
    new, times = np.unique(np.concatenate([counted[0][:0], *found]), return_counts=True)
    hashes, place = np.unique(np.concatenate([counted[0], new]), return_inverse=True)
    total = np.zeros(len(hashes), dtype=np.int64)
    np.add.at(total, place, np.concatenate([counted[1], times]))
    return hashes, total


def count_ngrams(
    data: PreparedData, max_len: int, most: int, patterns: Sequence[str], check: Callable[[], None] = nothing
) -> tuple[np.ndarray, np.ndarray]:
    """Return `most_frequent` of the distinct training texts. check: may raise."""
    first = distinct(text_keys(data.train.text_hash, data.train.language))[0]
    texts = encoded_rows(data, data.train, thinned(first, COUNTED_TEXTS), max_len, check)
    return most_frequent(texts, most, patterns)


def most_frequent(
    batches: Iterable[Tensor], most: int, patterns: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Return (hashes of the `most` n-grams that most texts have, increasing, int64 [R], their inverse
    document frequency, ln((1 + texts) / (1 + texts with it)) + 1, float32 [R]) of character ids, int64 [B, S]
    each. patterns: as in `hash_ngrams`.
    """
    texts, largest = 0, torch.iinfo(torch.int64).max
    found: list[np.ndarray] = []  # hashes, each once per text
    counted = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    for ids in batches:
        hashed, exist, _ = hash_ngrams(ids, patterns)
        hashed = hashed.masked_fill(~exist, largest).flatten(1).sort(1).values
        is_new = (hashed != largest) & (hashed != hashed.roll(1, 1))
        is_new[:, 0] = hashed[:, 0] != largest
        found.append(hashed[is_new].numpy())
        texts += len(ids)
        if sum(map(len, found)) > MAX_PENDING:
            counted, found = _counted(counted, found), []
    hashes, frequency = _counted(counted, found)
    kept = np.sort(np.argsort(-frequency, kind="stable")[:most])
    return hashes[kept], (np.log((1 + texts) / (1 + frequency[kept])) + 1).astype(np.float32)


def describe(batches: Iterable[Tensor], hashes: Tensor, idf: Tensor, patterns: Sequence[str]) -> Tensor:
    """Return `histocc.model.ridge.ngram_features` of texts (ids int64 [B, S] each) as sparse CSR."""
    ngrams = Ngrams(1, 1, 1, 1, patterns=patterns).eval()
    ngrams.hashes, ngrams.idf = hashes, idf
    none = torch.zeros(0, dtype=torch.int64)
    sizes, found = [torch.zeros(1, dtype=torch.int64)], [(none, idf[none])]
    for ids in batches:
        columns, values, begins = ngram_features(ngrams, ids)
        row = torch.repeat_interleave(torch.diff(begins, append=torch.tensor([len(columns)])))
        size = len(ids), len(hashes)
        parts = torch.sparse_coo_tensor(torch.stack([row, columns]), values, size, check_invariants=False)
        rows = parts.coalesce().to_sparse_csr()  # an n-gram that occurs twice in a text is one entry
        sizes.append(rows.crow_indices().diff())
        found.append((rows.col_indices(), rows.values()))
    columns, values = (torch.cat(each) for each in zip(*found))
    begins = torch.cat(sizes).cumsum(0)
    size = len(begins) - 1, len(hashes)
    return torch.sparse_csr_tensor(begins, columns, values, size, check_invariants=False)
