"""Ridge regression on few texts in closed form, added to the answers of another model, the prior.

With the kernel G = Φ Φᵀ + β B Bᵀ of the training texts (`histocc.model.ridge` describes them), their codes Y,
the prior's answers P, and H = G + λ diag(1 / w), the coefficients are A = H⁻¹ (Y − δ P). A new text scores
(φ Φᵀ + β b Bᵀ) A + δ p. The score of a training text from a fit without it needs no second fit: it is
Y − A / diag H⁻¹. For several texts left out together it is Y − (their block of H⁻¹)⁻¹ A (Rifkin and
Lippert, 2007, "Notes on regularized least squares").
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from histocc.data.arrays import thinned
from histocc.model.ridge import prior_columns

PENALTIES = (0.08, 0.25, 0.8)
SOME_TEXTS = 1_000  # with fewer, the default penalty is the highest, otherwise the second highest
# the default β and δ of a prior that has these codes, both 0 with other codes
SIMILARITY, PRIOR_SHARE = 0.4, 0.5
SHARES = {SIMILARITY: (PRIOR_SHARE, 1.0), 0.8: (PRIOR_SHARE,), 0.0: (0.0,)}  # β → δ to choose from
MAX_CHOOSING = 1_000  # texts on which the settings are chosen
MAX_LEFT_OUT = 2_000  # texts left out in turn, for figures and confidence
LEAST_SHARE = 0.3  # a code that only the prior has gets coefficients if it is expected this often
LinAlgError = torch.linalg.LinAlgError  # pyright: ignore[reportPrivateImportUsage]
CHECKED, MAX_ERROR = 128, 0.005  # number of equations checked in a fit, and their largest error
KERNEL_ROWS = 512  # rows of a kernel to compute at once


class Settings(NamedTuple):
    """The settings of a fit."""

    penalty: float  # λ
    similarity: float  # β
    share: float  # δ


class Texts(NamedTuple):
    """Training texts, each once."""

    ngrams: Tensor  # sparse CSR [n, R], φ of each
    target: Tensor  # [n, C], share of a text's rows with each code
    weight: Tensor  # [n]
    answers: Tensor | None = None  # [n, codes of the prior], its probabilities
    places: Tensor | None = None  # int64 [codes of the prior], the number of each code here, −1 for none

    def take(self, index: Tensor) -> "Texts":
        """Return some of the texts, int64 [m]."""
        answers = None if self.answers is None else self.answers[index]
        return Texts(take(self.ngrams, index), self.target[index], self.weight[index], answers, self.places)

    def double(self) -> "Texts":
        """Return a copy in double precision."""
        answers = None if self.answers is None else self.answers.double()
        return Texts(self.ngrams.double(), self.target.double(), self.weight.double(), answers, self.places)

    def prior(self) -> Tensor | None:
        """Return P, the prior's probabilities of the codes [n, C], or None if it has none of these codes."""
        if self.answers is None or self.places is None or not (self.places >= 0).any():
            return None
        probs = torch.zeros_like(self.target)
        probs[:, self.places[self.places >= 0]] = self.answers[:, self.places >= 0]
        return probs

    def outputs(self, prior: Tensor | None) -> Tensor:
        """Return the codes with coefficients, int64 [K]. prior: P."""
        has_text = self.target.any(0)
        return (has_text if prior is None else has_text | (prior.sum(0) > LEAST_SHARE)).nonzero()[:, 0]


class Solved(NamedTuple):
    """The result of a fit."""

    coefficients: Tensor  # [n, K]
    outputs: Tensor  # int64 [K], their codes
    left_out: Tensor  # [m, C], scores of the left-out texts


def take(rows: Tensor, index: Tensor) -> Tensor:
    """Return some rows of a sparse CSR matrix, int64 [m]."""
    sizes = rows.crow_indices().diff()[index]
    begins = F.pad(sizes.cumsum(0), (1, 0))
    at = torch.arange(int(begins[-1])) + torch.repeat_interleave(
        rows.crow_indices()[index] - begins[:-1], sizes
    )
    parts = begins, rows.col_indices()[at], rows.values()[at]
    return torch.sparse_csr_tensor(*parts, (len(index), rows.shape[1]), check_invariants=False)


def kernel(rows: Tensor) -> Tensor:
    """Return the products of all pairs of sparse CSR rows [n, R] as [n, n]. Only half are computed."""
    begins, columns, values = rows.crow_indices(), rows.col_indices(), rows.values()
    count, width = rows.shape
    row = torch.repeat_interleave(torch.arange(count), begins.diff())
    products = torch.empty(count, count, dtype=values.dtype)
    for first in range(0, count, KERNEL_ROWS):
        last = min(first + KERNEL_ROWS, count)
        own, rest = slice(int(begins[first]), int(begins[last])), slice(int(begins[first]), None)
        block = torch.zeros(width, last - first, dtype=values.dtype)
        block[columns[own], row[own] - first] = values[own]
        parts = begins[first:] - begins[first], columns[rest], values[rest]
        others = torch.sparse_csr_tensor(*parts, (count - first, width), check_invariants=False)
        products[first:, first:last] = others @ block
        products[first:last, last:] = products[last:, first:last].t()
    return products


def choose(texts: Texts) -> Settings:
    """Return the settings with which most texts, each left out in turn, get one of their codes. Others
    replace the default settings only if they lead by more than the standard error of the difference.
    """
    texts = texts.take(torch.from_numpy(thinned(np.arange(len(texts.target)), MAX_CHOOSING)))
    alone, prior = kernel(texts.ngrams), texts.prior()
    similar = None if texts.answers is None else prior_columns(texts.answers)
    usual = Settings(
        PENALTIES[-1 if len(texts.target) < SOME_TEXTS else -2],
        *((0.0, 0.0) if prior is None else (SIMILARITY, PRIOR_SHARE)),
    )
    if not len(texts.target):
        return usual
    outputs = texts.outputs(prior)
    target = texts.target[:, outputs]
    probs = torch.zeros(()) if prior is None else prior[:, outputs]
    right: dict[Settings, Tensor] = {}
    for similarity, shares in SHARES.items() if similar is not None else [(0.0, (0.0,))]:
        matrix = alone if similar is None else alone + similarity * similar @ similar.t()
        for penalty in PENALTIES:
            ridge = matrix + torch.diag(penalty / texts.weight)
            inverse = torch.cholesky_inverse(torch.linalg.cholesky(ridge))
            for share in shares if prior is not None else (0.0,):
                scores = target - inverse @ (target - share * probs) / inverse.diagonal()[:, None]
                hits = target.gather(1, scores.argmax(1, keepdim=True))[:, 0].double()
                right[Settings(penalty, similarity, share)] = hits
    best = max(right, key=lambda each: float(right[each].sum()))
    ahead = right[best] - right[usual]
    return best if ahead.sum() > ahead.square().sum().sqrt() else usual


def joined_features(texts: Texts, settings: Settings) -> Tensor:
    """Return [φ √β b], sparse CSR [n, R (+ codes of the prior)]."""
    if texts.answers is None or not settings.similarity:
        return texts.ngrams
    similar = settings.similarity**0.5 * prior_columns(texts.answers)
    return torch.cat([texts.ngrams.to_sparse_coo(), similar.to_sparse_coo()], dim=1).to_sparse_csr()


def solve(texts: Texts, settings: Settings, groups: list[Tensor]) -> Solved:
    """Fit, and leave out each of `groups` (int64, texts to leave out together). Raises LinAlgError if the
    precision of the texts is too low: similar texts need large weights to be distinguished.
    """
    prior = texts.prior()
    outputs = texts.outputs(prior)
    wanted = texts.target if prior is None else texts.target - settings.share * prior
    matrix = kernel(joined_features(texts, settings))
    matrix.diagonal().add_(settings.penalty / texts.weight)
    factor, some = torch.linalg.cholesky(matrix), slice(None, None, max(1, len(matrix) // CHECKED))
    rows = matrix[some].clone()
    del matrix
    coefficients = torch.cholesky_solve(wanted[:, outputs], factor)
    if ((rows @ coefficients - wanted[some][:, outputs]).abs() > MAX_ERROR).any():
        raise LinAlgError("the solution is not precise")
    members = torch.cat([*groups, torch.zeros(0, dtype=torch.int64)])
    units = torch.zeros(len(factor), len(members), dtype=factor.dtype)
    units[members, torch.arange(len(members))] = 1
    halves = torch.linalg.solve_triangular(factor, units, upper=False)  # H⁻¹ = halvesᵀ halves, of members
    scores = texts.target[members] if prior is None else settings.share * prior[members]
    scores[:, outputs] = texts.target[members][:, outputs]
    start = 0
    for group in groups:
        own = slice(start, start := start + len(group))
        inverse = halves[:, own].t() @ halves[:, own]
        scores[own, outputs] -= torch.linalg.solve(inverse, coefficients[group])
    return Solved(coefficients, outputs, scores)


def nested(texts: Texts, settings: Settings, sizes: list[int]) -> Iterator[tuple[int, Tensor]]:
    """Yield (k, scores [n, C] of all texts) for fits to the first k texts, for ascending `sizes`. A fitted
    text is scored without itself. The factor of k texts is a part of the factor of all, so each size adds its
    texts to the sums of the previous size. Raises LinAlgError.
    """
    prior = texts.prior()
    outputs = texts.outputs(prior)
    base = torch.zeros_like(texts.target) if prior is None else settings.share * prior
    target, new = texts.target[:, outputs], base[:, outputs]
    matrix = kernel(joined_features(texts, settings))
    factor = torch.linalg.cholesky(matrix + torch.diag(settings.penalty / texts.weight))
    inverse = torch.linalg.solve_triangular(factor, torch.eye(len(factor)).to(factor), upper=False)
    solved, start = inverse @ (target - new), 0
    coefficients, diagonal = torch.zeros_like(solved), torch.zeros_like(solved[:, :1])
    for size in sizes:
        part = slice(start, start := size)
        coefficients[:size] += inverse[part, :size].t() @ solved[part]
        diagonal[:size, 0] += inverse[part, :size].square().sum(0)
        new[size:] += factor[size:, part] @ solved[part]
        scores = base.clone()
        scores[:, outputs] = torch.cat([target[:size] - coefficients[:size] / diagonal[:size], new[size:]])
        yield size, scores
