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

    What `per_sample`, `seq2seq` and `linear` take beside outputs and targets:
        teacher_codes: int64 [B, M], outputs of the linear decoder, −1 for none.
        teacher_logits: float [B, M], what the teacher's linear decoder gives for them.
        teacher_weights: float [B], 0…1, share of the teacher in the linear loss.
        seq2seq_weights: float [B], factor on the seq2seq loss.
    """

    # of a batch of rows with a teacher
    batch_entries = ("teacher_codes", "teacher_logits", "teacher_weights", "seq2seq_weights")

    def seq2seq(self, out_seq2seq: Tensor, target_seq2seq: Tensor, **of_teacher: Tensor) -> Tensor:
        losses, weights = super().seq2seq(out_seq2seq, target_seq2seq), of_teacher.get("seq2seq_weights")
        return losses if weights is None else losses * weights.to(losses.dtype)

    def linear(self, out_linear: Tensor, target_linear: Tensor, **of_teacher: Tensor) -> Tensor:
        hard = super().linear(out_linear, target_linear)
        if not of_teacher:
            return hard
        codes, logits, weights = (of_teacher[name] for name in self.batch_entries[:3])
        number = torch.promote_types(out_linear.dtype, torch.float32)
        logits, weights, outputs = logits.to(number), weights.to(number), out_linear.shape[1]
        probs, shares = (spread(codes, values, outputs) for values in (logits.sigmoid(), logits.softmax(1)))
        return (1 - weights) * hard + weights * self.loss_fn_linear(out_linear.to(number), probs, shares)


def spread(codes: Tensor, values: Tensor, number: int) -> Tensor:
    """Float [B, number] with `values` [B, M] at the outputs `codes` int64 [B, M] (−1: none), else 0."""
    found = values.new_zeros(len(codes), number + 1)
    return found.scatter_(1, codes.masked_fill(codes < 0, number), values)[:, :number]
