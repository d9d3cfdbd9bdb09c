"""A model in closed form: ridge regression on the n-grams of a text and on the answers of another model, its
prior. It is solved in `histocc.learn.closed_form`.

A text x is described by its n-grams φ(x), a vector of length 1, and by b(x), the square roots of the prior's
PRIOR_CODES largest probabilities p(x), also of length 1. The score of a code is linear in both and adds the
prior's own answer: s(x) = (φ(x) Φᵀ + β b(x) Bᵀ) A + δ p(x). Φ and B describe the training texts, and A holds
the coefficients. The file of a model holds Φ, B and A, which are smaller than the weights of n-grams computed
from them.
"""

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from histocc.model.ngrams import WORDS, WORDS_SHARE, Ngrams, begins_of

warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state")
SHARPNESS, MIDDLE = 20.0, 0.4  # a code with the score s, about 0 to 1, has the logit 20 × (s − 0.4)
PRIOR_CODES = 40  # codes of a text's prior answer that describe the text


def ngram_features(ngrams: Ngrams, input_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the n-grams φ of texts int64 [B, S]: (rows of the table int64 [E], their values [E], the entry
    at which each text begins int64 [B]).
    """
    rows, weight, _ = ngrams.weighted(input_ids)
    length = ((1 + WORDS_SHARE) * weight[:, :, : -len(WORDS)].square().sum((1, 2))).sqrt()
    rows, weight = rows.flatten(1), (weight / length.clamp(min=1e-6)[:, None, None]).flatten(1)
    at = weight.nonzero(as_tuple=True)
    return rows[at], weight[at], begins_of(at[0], len(rows))


def best_codes(probs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes in b of texts and their values, from the prior's probabilities: [B, PRIOR_CODES]."""
    best, codes = probs.topk(min(PRIOR_CODES, probs.shape[1]), dim=1, sorted=False)
    return codes, F.normalize(best.sqrt(), dim=1)


def prior_columns(probs: Tensor) -> Tensor:
    """Return b of texts from the probabilities of the prior's codes: [B, codes] each."""
    return torch.zeros_like(probs).scatter(1, *best_codes(probs))


class Ridge(nn.Module):
    """The scores of codes from the coefficients of the training texts.

    Args:
        rows, classes: number of n-grams, number of codes.
        texts, entries: N, the number of training texts, and the total of their non-zero entries.
        outputs: K, number of codes with coefficients. Other codes are scored only by the prior.
        prior: number of the prior's codes, 0 for no prior.
        similarity, share: β and δ, weights of similar answers of the prior and of its own answer.
    """

    offsets: Tensor  # int64 [N + 1], start of each training text's entries
    columns: Tensor  # int32 [entries]: an n-gram, or, from `rows` on, a code of the prior
    values: Tensor  # [entries]
    coefficients: Tensor  # [N, K]
    outputs: Tensor  # int64 [K], the codes of the coefficients
    places: Tensor  # int64 [prior], the number of each of the prior's codes among all codes, −1 for none

    def __init__(
        self,
        rows: int,
        classes: int,
        texts: int,
        entries: int,
        outputs: int,
        prior: int,
        similarity: float,
        share: float,
    ):
        super().__init__()
        self.rows, self.classes, self.prior = rows, classes, prior
        self.similarity, self.share = float(similarity), float(share)
        self.register_buffer("offsets", torch.zeros(texts + 1, dtype=torch.int64))
        self.register_buffer("columns", torch.zeros(entries, dtype=torch.int32))
        self.register_buffer("values", torch.zeros(entries))
        self.register_buffer("coefficients", torch.zeros(texts, outputs))
        self.register_buffer("outputs", torch.zeros(outputs, dtype=torch.int64))
        self.register_buffer("places", torch.zeros(prior, dtype=torch.int64))
        self._weights: Tensor | None = None  # [rows + prior, K], made at first use
        self._signs: Tensor | None = None  # [rows, width]

    def texts(self) -> Tensor:
        """Return [Φ B] as sparse CSR [N, rows + prior]. Raises RuntimeError for bad numbers."""
        size, parts = (len(self.coefficients), self.rows + self.prior), (self.offsets, self.columns.long())
        return torch.sparse_csr_tensor(*parts, self.values, size, check_invariants=True)

    def weights(self) -> Tensor:
        """Return the weights of n-grams and of the prior's answers, [rows + prior, K]."""
        if self._weights is None:
            self._weights = self.texts().t().to_sparse_csr() @ self.coefficients
        assert self._weights is not None
        return self._weights

    def forward(self, ngrams: Ngrams, input_ids: Tensor, answers: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (vectors of texts [B, width], logits of codes [B, classes]) for texts int64 [B, S] and the
        prior's probabilities of its codes [B, prior], or None without a prior.
        """
        with torch.autocast(input_ids.device.type, enabled=False):
            rows, values, begins = ngram_features(ngrams, input_ids)
            weights = self.weights()
            found = F.embedding_bag(
                rows, weights[: self.rows], begins, mode="sum", per_sample_weights=values.to(weights)
            )
            scores = found.new_zeros(len(found), self.classes + 1)  # the last one is not a code
            if answers is not None:
                answers = answers.to(found)
                codes, shares = best_codes(answers)
                similar = {"mode": "sum", "per_sample_weights": self.similarity**0.5 * shares}
                found = found + F.embedding_bag(codes, weights[self.rows :], **similar)
                scores.index_copy_(1, self.places % (self.classes + 1), self.share * answers)
            scores = scores.index_add_(1, self.outputs, found)[:, :-1]
            return self._vectors(ngrams, rows, values, begins), SHARPNESS * (scores - MIDDLE)

    def _vectors(self, ngrams: Ngrams, rows: Tensor, values: Tensor, begins: Tensor) -> Tensor:
        """Return vectors of texts [B, width] with about the cosines of their n-grams: a random projection
        (Achlioptas, 2003), with the signs of each n-gram from its hash.
        """
        if self._signs is None:
            words = [ngrams.hashes * (2 * i + 1) for i in range(-(-ngrams.width // 64))]
            bits = torch.stack(words, 1)[:, :, None] >> torch.arange(64, device=values.device) & 1
            signs = 2 * bits.flatten(1)[:, : ngrams.width].to(values.dtype) - 1
            self._signs = signs / ngrams.width**0.5
        assert self._signs is not None
        return F.embedding_bag(rows, self._signs, begins, mode="sum", per_sample_weights=values)
