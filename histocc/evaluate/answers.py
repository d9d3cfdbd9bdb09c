"""What both decoders answer to each row of an evaluation: collected batch by batch, brought together on rank
0.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from histocc.evaluate.measures import threshold_counts
from histocc.formatter import BlockyFormatter
from histocc.model.confidence import Outputs, features
from histocc.model.decoding import upcast_half
from histocc.model.thresholds import Thresholds, places
from histocc.runtime.world import World

GRID = np.arange(1, 50) / 50  # thresholds that are compared: 0.02, 0.04 … 0.98
RANKED = 5  # codes of a row that are searched for, for the top-k accuracy
MOST_FLAT_CODES = 50  # of one row, the most probable ones; a row with more is wrong in any case
CANDIDATES = 20  # codes of a row that each decoder proposes for the ranking by both


class Both(NamedTuple):
    """written: log-probability of writing each code, float [B, C]; best int64 [B]: the best code by both
    decoders with the share that the model holds; confidence float [B]: its probability.
    """

    written: Tensor
    best: Tensor
    confidence: Tensor


class Collected(NamedTuple):
    """parts: what there is of each row, batch by batch; counts: of each language, see `threshold_counts`."""

    parts: dict[str, list[np.ndarray]]
    counts: dict[int, np.ndarray]


class Outcomes:
    """One rank's share. language: number of each row's language, by which thresholds are counted, int [rows
    of all ranks]; languages: their names; thresholds: which codes of the linear decoder count; outputs: how
    its confidence is fitted.
    """

    def __init__(
        self,
        formatter: BlockyFormatter,
        language: np.ndarray,
        languages: list[str],
        thresholds: Thresholds,
        outputs: Outputs | None = None,
    ):
        self.formatter, self.language, self.thresholds, self.outputs = (
            formatter,
            language,
            thresholds,
            outputs,
        )
        self.least = np.array([thresholds.least(each) for each in languages], dtype=np.float64)
        self.collected = Collected({}, {})

    def add(
        self,
        batch: dict,
        blocks: Tensor,
        set_probs: Tensor,
        ranking: Tensor,
        linear_logits: Tensor,
        both: "Both | None" = None,
    ) -> None:
        """A batch of the engine's evaluation; rows that only fill it up are left out.

        blocks [B, M, block_size] and set_probs [B] as `decoding.sets_of` gives them: the confidence of the
        seq2seq decoder is the probability of its set of codes, in any order. ranking: numbers of the RANKED
        most probable codes by the search, int64 [B, RANKED]. Confidence of the linear decoder: the
        probability that exactly its codes, those above the threshold, are right and no other is: as it is
        fitted, or with its outputs taken as independent. both: for the ranking by both decoders; None where
        that is not asked for.
        """
        kept = batch["weights"] > 0
        logits, codes = upcast_half(linear_logits)[kept], batch["targets_linear"][kept]  # [B, C], [B, K]
        has = codes >= 0
        place = places(logits)  # [B, C]
        of_true = place.gather(1, codes.clamp(min=0))
        least = self.least[self.language[batch["rows"][kept].cpu().numpy()]]  # [B]
        least = torch.from_numpy(least).logit().to(logits)
        on = self.thresholds.answered(logits, place, least)  # [B, C]
        alone = -torch.nn.functional.softplus(torch.where(on, -logits, logits).double()).sum(1)
        row, code = (on & (place < MOST_FLAT_CODES)).nonzero(as_tuple=True)
        hit = ranking[kept][:, None] == codes[..., None]  # [B, K, RANKED]
        ranked = torch.where(hit.any(-1), hit.int().argmax(-1), hit.shape[-1])  # [B, K]
        self._keep(
            rows=batch["rows"][kept],
            seq_blocks=blocks[kept].short(),
            seq_confidence=set_probs[kept].double(),
            seq_best=ranked.masked_fill(~has, hit.shape[-1]).amin(1),
            seq_worst=ranked.masked_fill(~has, -1).amax(1),
            flat_confidence=alone.exp() if self.outputs is None else self.outputs.conf(features(logits, on)),
            best=of_true.masked_fill(~has, logits.shape[1]).amin(1),
            worst=of_true.masked_fill(~has, -1).amax(1),
            flat_rows=batch["rows"][kept][row],
            flat_codes=code,
        )
        self._count_thresholds(logits.sigmoid(), codes, batch["rows"][kept], place)
        if both is not None:
            self._keep(
                both_best_right=(both.best[kept][:, None] == codes).any(1),
                both_confidence=both.confidence[kept].double(),
            )
            self._keep_candidates(both.written[kept], logits.log_softmax(1), on.sum(1))

    def _keep_candidates(self, written: Tensor, linear: Tensor, number: Tensor) -> None:
        """written, linear: log-probabilities [B, C] by either decoder; number: codes of the linear decoder's
        set, int64 [B].
        """
        most = min(CANDIDATES, written.shape[1])
        # [B, 2 · most]
        codes = torch.cat([written.topk(most).indices, linear.topk(most).indices], dim=1).sort(1).values
        again = torch.nn.functional.pad(codes[:, 1:] == codes[:, :-1], (1, 0))
        self._keep(
            both_codes=codes.masked_fill(again, -1).int(),
            both_written=written.gather(1, codes),
            both_linear=linear.gather(1, codes),
            both_number=number,
        )

    def _keep(self, **values: Tensor) -> None:
        for name, value in values.items():
            self.collected.parts.setdefault(name, []).append(value.cpu().numpy())

    def _count_thresholds(self, probs: Tensor, codes: Tensor, rows: Tensor, place: Tensor) -> None:
        """probs [B, C], codes [B, K], rows [B]; place: of each code in its row, 0 for the most probable one,
        [B, C].
        """
        grid = torch.from_numpy(GRID).to(probs)
        above = torch.bucketize(probs, grid)  # [B, C], how many thresholds
        counts = torch.zeros(len(probs), len(grid) + 1, dtype=torch.long, device=probs.device)
        counts.scatter_add_(1, above, torch.ones_like(above))
        predicted = self.thresholds.number(counts.flip(1).cumsum(1).flip(1)[:, 1:])  # [B, T]
        has = codes >= 0
        true = place.gather(1, codes.clamp(min=0)).masked_fill(~has, probs.shape[1])  # [B, K]
        hits = (true[..., None] < predicted[:, None]).sum(1)  # [B, T]
        predicted, hits, number = (values.cpu().numpy() for values in (predicted, hits, has.sum(1)))
        language = self.language[rows.cpu().numpy()]
        for each in np.unique(language).tolist():
            chosen = language == each
            self._count(each, threshold_counts(predicted[chosen], hits[chosen], number[chosen]))

    def take(self, others: Collected) -> None:
        """What was collected of other rows."""
        for name, values in others.parts.items():
            self.collected.parts.setdefault(name, []).extend(values)
        for language, counts in others.counts.items():
            self._count(language, counts)

    def _count(self, language: int, counts: np.ndarray) -> None:
        self.collected.counts[language] = self.collected.counts.get(language, 0) + counts

    def gathered(self, world: World) -> dict | None:
        """Everything of all ranks, on rank 0; None on the others. All ranks.

        Arrays in order of the rows: seq_blocks int16 [N, M, bs], seq_confidence and flat_confidence float64
        [N], best and worst int64 [N] (how many codes are more probable than the most and the least probable
        true one), seq_best and seq_worst the same by the search, at most RANKED; flat_rows, flat_codes int64
        [P], the codes with a probability above the threshold; thresholds: {language: threshold_counts}. Where
        `add` was given `both`, also for each row: both_best_right bool [N] and both_confidence float64 [N],
        whether the best code is a true one, and its probability; both_codes int32 [N, M], the CANDIDATES most
        probable codes of either decoder in their order, -1 instead of a second time; both_written,
        both_linear float [N, M], their log-probabilities by either decoder; both_number int64 [N], codes of
        the linear decoder's set.
        """
        own = {name: np.concatenate(values) for name, values in self.collected.parts.items()}
        shares = world.gather_on_main((own, self.collected.counts))
        if shares is None:
            return None
        found: dict[str, Any] = {
            name: np.concatenate([part[name] for part, _ in shares if part])
            for name in next(part for part, _ in shares if part)
        }
        order = np.argsort(found.pop("rows"), kind="stable")
        for name in found.keys() - {"flat_rows", "flat_codes"}:
            found[name] = found[name][order]
        languages = sorted({language for _, thresholds in shares for language in thresholds})
        found["thresholds"] = {
            each: sum(thresholds[each] for _, thresholds in shares if each in thresholds)
            for each in languages
        }
        return found
