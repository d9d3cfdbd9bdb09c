"""The loss of a student: true codes where they are known, and what its teacher says.

Hinton, Vinyals, Dean, 2015, "Distilling the Knowledge in a Neural Network" (arXiv 1503.02531).
"""

import torch
from torch import Tensor

from histocc.model.loss import LossMixer


class DistillationLoss(LossMixer):
    """`LossMixer`, with soft targets for the rows that have a teacher; batches without are as there.

    The linear loss of a row is (1 − t) · loss(true codes) + t · loss(teacher), t its `teacher_weights`; all
    but the teacher's most probable outputs count as 0. The seq2seq loss has the factor `seq2seq_weights`.
    """

    # of a batch of rows with a teacher
    batch_entries = ("teacher_codes", "teacher_logits", "teacher_weights", "seq2seq_weights")

    def per_sample(
        self,
        out_seq2seq: Tensor,
        out_linear: Tensor,
        target_seq2seq: Tensor,
        target_linear: Tensor,
        teacher_codes: Tensor | None = None,
        teacher_logits: Tensor | None = None,
        teacher_weights: Tensor | None = None,
        seq2seq_weights: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """The parts of each row's loss, [B] each; the first four arguments as in `LossMixer`.

        Args:
            teacher_codes: int64 [B, M], outputs of the linear decoder, −1 for none; None: no teacher.
            teacher_logits: float [B, M], what the teacher's linear decoder gives for them.
            teacher_weights: float [B], 0…1, share of the teacher in the linear loss.
            seq2seq_weights: float [B], factor on the seq2seq loss.
        """
        found = super().per_sample(out_seq2seq, out_linear, target_seq2seq, target_linear)
        if teacher_codes is None or seq2seq_weights is None:
            return found
        linear = self._mixed(found["loss_linear"], out_linear, teacher_codes, teacher_logits, teacher_weights)
        seq2seq, w = found["loss_seq2seq"], self.seq2seq_weight
        seq2seq = seq2seq * seq2seq_weights.to(seq2seq.dtype)
        return {"loss": w * seq2seq + (1 - w) * linear, "loss_linear": linear, "loss_seq2seq": seq2seq}

    def linear(self, out_linear: Tensor, target_linear: Tensor, **of_teacher: Tensor) -> Tensor:
        """Loss of the linear decoder alone, [B]; arguments as in `per_sample`."""
        hard = super().linear(out_linear, target_linear)
        given = [of_teacher.get(name) for name in self.batch_entries[:3]]
        return hard if given[0] is None else self._mixed(hard, out_linear, *given)

    def _mixed(self, hard: Tensor, out_linear: Tensor, codes, logits, weights) -> Tensor:
        """Loss towards the true codes [B] and towards the teacher, mixed by the weights of the rows: [B]."""
        number = torch.promote_types(out_linear.dtype, torch.float32)
        logits, weights, outputs = logits.to(number), weights.to(number), out_linear.shape[1]
        probs, shares = (spread(codes, values, outputs) for values in (logits.sigmoid(), logits.softmax(1)))
        return (1 - weights) * hard + weights * self.loss_fn_linear(out_linear.to(number), probs, shares)


def spread(codes: Tensor, values: Tensor, number: int) -> Tensor:
    """Float [B, number] with `values` [B, M] at the outputs `codes` int64 [B, M] (−1: none), else 0."""
    found = values.new_zeros(len(codes), number + 1)
    return found.scatter_(1, codes.masked_fill(codes < 0, number), values)[:, :number]
