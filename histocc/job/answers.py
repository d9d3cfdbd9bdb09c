"""What a trained model answers to texts, for a student to learn from.

Kim, Rush, 2016, "Sequence-Level Knowledge Distillation" (arXiv 1606.07947).
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from histocc.formatter import PAD_IDX, BlockyFormatter
from histocc.model.confidence import Confidence, Thresholds, Writing
from histocc.model.decoding import greedy_from_memory, of_sets, set_probs, sets_of, upcast_half
from histocc.published import models
from histocc.runtime.errors import UserError
from histocc.runtime.parallel import evaluating
from histocc.text import UNKNOWN_LANGUAGE, cleaner, encode

BATCH = 128  # texts at once
MAX_LOGIT = 6e4  # that float16 holds
MIN_PROB = 1e-300  # whose logarithm is finite


class Teacher:
    """A trained model whose answers are in terms of a student's codes. Texts are cleaned by its own rule, and
    a language that it does not know is `unk` to it.

    What it writes is what its decoder writes. Where that is one code, and its checkpoint says how much either
    decoder counts (`linear_share`), it may be the linear decoder's most probable one instead, see `_by_both`:
    that decoder often knows better. No row that it was trained on had more codes than its checkpoint says
    (`at_most`), so where it writes more it is wrong: these do not count.

    Args:
        name: of the model, for messages.
        loaded: model, formatter and checkpoint as `models.load_model` gives them.
        codes: of the student, in the order of its outputs.
        formatter: of the student.
        record: dtype of an answer, with the fields codes [M], logits [M], written [room] and prob.

    Raises:
        UserError: for a model without one of the decoders, and where no code is the same.
    """

    def __init__(
        self,
        name: str,
        loaded: models.Loaded,
        codes: list[str],
        formatter: BlockyFormatter,
        record: np.dtype,
    ):
        self.model, self.formatter, self.state = loaded
        kind = self.state.get("kind", "mixer")
        if kind != "mixer":
            lacks = "linear decoder" if kind == "seq2seq" else "decoder that writes codes"
            raise UserError(f"--teacher {name}: has no {lacks}; a teacher needs both decoders")
        self.name, self.record, self.languages = name, record, list(self.state["languages"])
        self.clean = cleaner(self.state["config"]["text"])
        number = {code: i for i, code in enumerate(codes)}
        self.number_of = {
            code: number.get(formatter.repair(code)[0], -1) for code in self.state["key"]
        }  # in the order of its outputs
        numbers = np.array(list(self.number_of.values()))
        known = set(self.number_of.values())
        self.unknown = [i for i in range(len(codes)) if i not in known]  # codes that it lacks
        self.lacking = [code for code, i in self.number_of.items() if i < 0]
        if len(self.lacking) == len(numbers):
            raise UserError(
                f"--teacher {name}: has none of the {len(codes):,} codes of the student (it has"
                f" {', '.join(list(self.number_of)[:3])} …, the student {', '.join(codes[:3])} …): it is of"
                f" another system (formatter {self.formatter.kind}, here {formatter.kind})"
            )
        self.shared = torch.from_numpy(np.flatnonzero(numbers >= 0)).to(next(self.model.parameters()).device)
        self.numbers = numbers[numbers >= 0]  # of the student, of each shared output
        self._of_block: dict[tuple[int, ...], int] = {}
        self.share: float = self.state.get("linear_share") or 0.0
        thresholds = Thresholds.of(self.state)
        self.most = thresholds.at_most or self.formatter.max_num_codes
        self.one_code = thresholds.at_least_one and self.most == 1  # so had every row that it was trained on
        self.blocks = self._blocks_of_key() if self.share else None

    def _blocks_of_key(self) -> Tensor | None:
        """The tokens of its codes, int64 [outputs, block size]; None where they do not fit its formatter."""
        try:
            blocks = np.stack([self.formatter.encode_code(code) for code in self.number_of])
        except ValueError:
            return None
        return torch.from_numpy(blocks.astype(np.int64)).to(self.shared.device)

    def notes(self, formatter: BlockyFormatter) -> list[str]:
        """What is said of it before it is asked, a line each. formatter: of the student."""
        lines = []
        if self.lacking:
            lines.append(
                f"  codes of the teacher that the student lacks: {len(self.lacking):,} of"
                f" {len(self.number_of):,} ({', '.join(self.lacking[:5])}{' …' * (len(self.lacking) > 5)}),"
                " which are left out of its answers"
            )
        if self.blocks is None:
            why = (
                "its codes do not fit its formatter"
                if self.share
                else "it does not say how both of its decoders rank codes together"
            )
            lines.append(f"  it answers with the codes that it writes: {why}")
        if self.formatter.kind != formatter.kind:
            lines.append(
                f"  it writes codes of formatter {self.formatter.kind}, the student of {formatter.kind}: they"
                " are matched as they are written out"
            )
        return lines

    def answers(
        self, texts: list[str], languages: list[str], check: Callable[[], None] = lambda: None
    ) -> np.ndarray:
        """`record`s [len(texts)], in order; without codes for a text of which the cleaning leaves nothing.
        check: called between batches, may raise to stop.
        """
        found = np.zeros(len(texts), dtype=self.record)
        found["codes"], found["logits"], found["written"] = -1, -MAX_LOGIT, -1
        texts = [self.clean(text) for text in texts]
        known = [name if name in self.languages else UNKNOWN_LANGUAGE for name in languages]
        asked = [i for i in sorted(range(len(texts)), key=lambda i: len(texts[i])) if texts[i].strip()]
        width = None if self.model.memory_mask else self.state["config"]["max_len"]
        for start in range(0, len(asked), BATCH):
            check()
            some = asked[start : start + BATCH]
            ids, mask = encode(
                [texts[i] for i in some], [known[i] for i in some], self.state["config"]["max_len"], width
            )
            self._answer(torch.from_numpy(ids), torch.from_numpy(mask), found, np.array(some))
        return found

    def _answer(self, ids: Tensor, mask: Tensor, found: np.ndarray, rows: np.ndarray) -> None:
        """Fills `rows` int64 [B] of `found` with the answers to ids int64 [B, S], mask bool [B, S]."""
        model, formatter, device = self.model, self.formatter, self.shared.device
        ids, mask = ids.to(device), mask.to(device)
        writing = Confidence.of(self.state).written
        sizes = {"max_codes": formatter.max_num_codes, "block_size": formatter.block_size}
        with evaluating(model):
            memory, pooled = model.encode(ids, mask)
            padding = model.memory_padding_mask(mask)
            every = upcast_half(model.classify(pooled))
            logits = every[:, self.shared]
            written = greedy_from_memory(model, memory, padding, **sizes, writing=writing)
            blocks, probs = sets_of(model, memory, padding, written, formatter, writing)
            if self.blocks is not None:
                blocks, probs = self._by_both(memory, padding, blocks, probs, every.log_softmax(1), writing)
        most = min(logits.shape[1], found.dtype["codes"].shape[0])
        top, at = logits.topk(most)
        found["logits"][rows[:, None], np.arange(most)] = top.clamp(-MAX_LOGIT, MAX_LOGIT).cpu().numpy()
        found["codes"][rows[:, None], np.arange(most)] = self.numbers[at.cpu().numpy()]
        found["prob"][rows] = probs.float().cpu().numpy()
        room = found.dtype["written"].shape[0]
        for row, each in zip(rows.tolist(), blocks.tolist()):
            codes = [self._number(tuple(block)) for block in each if any(t != PAD_IDX for t in block)]
            kept = list(dict.fromkeys(code for code in codes if code >= 0))[:room]
            if len(codes) > self.most:
                kept = []
            found["written"][row, : len(kept)] = kept
            if len(kept) < len(codes):  # part of what it means cannot be said
                found["prob"][row] = 0.0

    def _by_both(
        self,
        memory: Tensor,
        padding: Tensor | None,
        blocks: Tensor,
        probs: Tensor,
        linear: Tensor,
        writing: Writing | None,
    ) -> tuple[Tensor, Tensor]:
        """What is written, `blocks` int64 [B, M, block size], and its probability, `probs` [B], where one
        code is: that code, or the most probable one of the linear decoder, log-probabilities `linear` [B,
        outputs], whichever both decoders together give more, and the geometric mean of their probabilities
        (weighted by `linear_share`). Others stay as they are; but where rows have one code (`one_code`),
        that of the linear decoder takes the place of none or several.
        """
        assert self.blocks is not None
        single = (blocks != PAD_IDX).any(-1).sum(1) == 1
        rows = (single | self.one_code).nonzero()[:, 0]
        if not len(rows):
            return blocks, probs
        single, only = single[rows], blocks[rows].amax(1)  # what is PAD is less than any token of a code
        own = (only[:, None] == self.blocks).all(2) & single[:, None]  # [R, outputs]
        of_own = linear[rows].masked_fill(~own, -torch.inf).amax(1)  # −inf: a code that is none of its own
        best, place = linear[rows].max(1)
        others = blocks[rows].clone()
        others[:, 0], others[:, 1:] = self.blocks[place], PAD_IDX
        score = self._score(probs[rows], of_own)
        found, differs = score.clone(), ((others[:, 0] != only).any(1) | ~single).nonzero()[:, 0]
        if len(differs):
            at = rows[differs]
            seen = None if padding is None else padding[at]
            likely = set_probs(self.model, memory[at], seen, others[differs], writing)
            found[differs] = self._score(of_sets(likely, writing), best[differs])
        better = found > score
        blocks, probs = blocks.clone(), probs.clone()
        blocks[rows] = torch.where(better[:, None, None], others, blocks[rows])
        probs[rows] = torch.where(better, found, score).exp().to(probs)
        return blocks, probs

    def _score(self, written: Tensor, linear: Tensor) -> Tensor:
        """Log-probability by both decoders, of a probability and a log-probability [R]."""
        return (1 - self.share) * written.double().clamp(min=MIN_PROB).log() + self.share * linear.double()

    def _number(self, block: tuple[int, ...]) -> int:
        """The student's number of a written code, −1 where it lacks it or it is none of the teacher's."""
        if block not in self._of_block:
            self._of_block[block] = self.number_of.get(self.formatter.decode_block(block) or "", -1)
        return self._of_block[block]
