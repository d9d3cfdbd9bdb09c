"""Rows that a student learns from a teacher: the labelled training rows, and texts without labels, each
with what the teacher answers to it.

They are a prepared folder like any other, with one more file: `train.teacher`, a record for each training
row. Which texts are asked, and in which order, is a function of the data alone, so that answers can be made
in pieces, by any number of processes, and are the same.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from histocc.data.arrays import ARRAYS, TEACHER, PreparedData, RowSet, read_meta, text_keys, write_last
from histocc.data.dataset import NO_CHANGES, RowEncoding, TextChanges, TextRows, TextRowSet
from histocc.data.prepare import build_folder
from histocc.data.rows import MAX_LANGUAGES
from histocc.runtime.errors import UserError
from histocc.runtime.rng import chance, draw, streams

_CHUNK = 1 << 16  # rows
# Files of a prepared folder that are as they are in that of the labelled rows.
_SAME = ("key.csv", "words.csv", "rejected_rows.csv", "conflicts.csv")


@dataclass(frozen=True)
class Questions:
    """The texts that a teacher is asked: each distinct text and language of the training rows, then those of
    the unlabelled rows that are not among these, nor among the texts that are validated on. Texts that differ
    only in case and blanks are one.

    Args:
        data: the labelled rows.
        unlabelled: rows without codes; None for none.
    """

    data: PreparedData
    unlabelled: PreparedData | None = None

    @cached_property
    def languages(self) -> list[str]:
        """Of all rows: those of the labelled ones, then new ones of the others."""
        more = [] if self.unlabelled is None else self.unlabelled.languages
        found = list(dict.fromkeys([*self.data.languages, *more]))
        if len(found) > MAX_LANGUAGES:
            raise UserError(
                f"the labelled rows and those of --unlabelled have {len(found)} languages together, and"
                f" {MAX_LANGUAGES} are the most: does --language-col name the right column?"
            )
        return found

    @cached_property
    def _of_unlabelled(self) -> np.ndarray:
        """Numbers in `languages` of the unlabelled rows' languages, int64."""
        assert self.unlabelled is not None
        return np.array([self.languages.index(name) for name in self.unlabelled.languages], dtype=np.int64)

    @cached_property
    def _labelled(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(keys of the distinct training texts, sorted; number of the row that has each first; which of
        these each training row has), int64 but for the keys.
        """
        train = self.data.train
        return np.unique(text_keys(train.text_hash, train.language), return_index=True, return_inverse=True)

    @cached_property
    def added(self) -> tuple[np.ndarray, dict[str, int]]:
        """(numbers of the unlabelled rows that are taken, int64, increasing; how many are not, by why)."""
        if self.unlabelled is None:
            return np.zeros(0, dtype=np.int64), {}
        rows = self.unlabelled.train
        keys = text_keys(rows.text_hash, self._of_unlabelled[np.asarray(rows.language)])
        _, first = np.unique(keys, return_index=True)
        validated = np.isin(np.asarray(rows.text_hash)[first], np.asarray(self.data.val.text_hash))
        known = np.isin(keys[first], self._labelled[0]) & ~validated
        left_out = {
            "repeated": len(rows) - len(first),
            "texts of labelled rows": int(known.sum()),
            "texts that are validated on": int(validated.sum()),
        }
        return np.sort(first[~validated & ~known]), left_out

    def __len__(self) -> int:
        return len(self._labelled[0]) + len(self.added[0])

    def asked(self, start: int, end: int) -> tuple[list[str], list[str]]:
        """(texts, languages) of the questions from `start` to before `end`."""
        labelled = self._labelled[1]
        numbers = np.arange(start, min(end, len(self)))
        own = labelled[numbers[numbers < len(labelled)]]
        others = self.added[0][numbers[numbers >= len(labelled)] - len(labelled)]
        texts = self.data.train.strings(own)
        languages = np.asarray(self.data.train.language)[own].tolist()
        if len(others) and self.unlabelled is not None:
            rows = self.unlabelled.train
            texts += rows.strings(others)
            languages += self._of_unlabelled[np.asarray(rows.language)[others]].tolist()
        return texts, [self.languages[number] for number in languages]

    def languages_asked(self) -> dict[str, int]:
        """How many texts of each language are asked."""
        counts = np.bincount(self.data.train.language[self._labelled[1]], minlength=len(self.languages))
        if self.unlabelled is not None:
            more = self._of_unlabelled[np.asarray(self.unlabelled.train.language)[self.added[0]]]
            counts = counts + np.bincount(more, minlength=len(self.languages))
        return {name: int(count) for name, count in zip(self.languages, counts) if count}

    def pieces_of_rows(self) -> Iterator[tuple[RowSet, np.ndarray, np.ndarray, np.ndarray]]:
        """All training rows of a student, in order and some at a time: (row set, numbers of rows in it,
        their languages, number of each one's question), int64 [n] each.
        """
        train = self.data.train
        for start in range(0, len(train), _CHUNK):
            numbers = np.arange(start, min(start + _CHUNK, len(train)))
            yield train, numbers, train.language[numbers].astype(np.int64), self._labelled[2][numbers]
        first, added = len(self._labelled[0]), self.added[0]
        for start in range(0, len(added), _CHUNK):
            numbers = added[start : start + _CHUNK]
            assert self.unlabelled is not None
            rows = self.unlabelled.train
            language = self._of_unlabelled[np.asarray(rows.language[numbers])]
            yield rows, numbers, language, first + np.arange(start, start + len(numbers))


def build(
    root: str,
    key: str,
    questions: Questions,
    answers: np.ndarray,
    said: dict,
    check: Callable[[], None],
) -> str:
    """The prepared folder `root`/`key` of the student's rows, if it is not there; returns its path.

    Args:
        answers: of all questions, `teacher_record`s.
        said: is kept in the report as `teacher`.
        check: called now and then; an exception of it ends the work.
    """

    def fill(new: str) -> None:
        data, meta = questions.data, read_meta(questions.data.folder)
        for name in _SAME:
            shutil.copyfile(os.path.join(data.folder, name), os.path.join(new, name))
        per_row = _write_train(new, questions, answers, check)
        for name in ARRAYS:
            if name != "codes":
                shutil.copyfile(os.path.join(data.folder, f"val.{name}"), os.path.join(new, f"val.{name}"))
        val = _widened(data.val.codes, _room(answers))
        val.tofile(os.path.join(new, "val.codes"))
        per_row += np.bincount((val >= 0).sum(1), minlength=len(per_row))
        numbers = {str(n): int(count) for n, count in enumerate(per_row) if count}
        report = {**data.report, "codes_per_row": numbers, "teacher": said}
        report["train_rows"] = int(per_row.sum()) - len(val)
        with open(os.path.join(new, "data_report.json"), "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1, ensure_ascii=False)
        alphabet = set(data.alphabet)
        if questions.unlabelled is not None:
            alphabet |= set(questions.unlabelled.alphabet)
        of_files = ("sizes", "checksums", "checksum")
        content = {name: value for name, value in meta.items() if name not in of_files}
        content |= {
            "fingerprint": key,
            "languages": questions.languages,
            "alphabet": sorted(alphabet),
            "max_codes": _room(answers),
            "report": report,
        }
        write_last(new, content)

    return build_folder(root, key, fill, check)


def _room(answers: np.ndarray) -> int:
    """Codes that a row has room for."""
    return answers.dtype["written"].shape[0]


def _widened(codes: np.ndarray, room: int) -> np.ndarray:
    """codes int [N, K] with −1 behind, int32 [N, room]."""
    found = np.full((len(codes), room), -1, dtype=ARRAYS["codes"])
    found[:, : codes.shape[1]] = codes
    return found


def _write_train(
    folder: str, questions: Questions, answers: np.ndarray, check: Callable[[], None]
) -> np.ndarray:
    """Writes the arrays of the training rows, but for unlabelled ones without an answer. Returns how many of
    them have so many codes, int64.
    """
    names = [*ARRAYS, TEACHER]
    files = {name: open(os.path.join(folder, f"train.{name}"), "wb") for name in names}
    room, end = _room(answers), 0
    per_row = np.zeros(room + 1, dtype=np.int64)
    try:
        files["offsets"].write(np.zeros(1, ARRAYS["offsets"]).tobytes())
        for rows, numbers, language, number in questions.pieces_of_rows():
            check()
            kept = (rows.codes[numbers][:, 0] >= 0) | (answers["codes"][number][:, 0] >= 0)
            numbers, language, number = numbers[kept], language[kept], number[kept]
            flat, offsets = rows.texts(numbers)
            teacher = answers[number]
            codes = _widened(rows.codes[numbers], room)
            unlabelled = codes[:, 0] < 0
            codes[unlabelled] = teacher["written"][unlabelled]
            teacher["labelled"] = ~unlabelled
            per_row += np.bincount((codes >= 0).sum(1), minlength=room + 1)
            for name, values in {
                "chars": flat,
                "offsets": offsets[1:] + end,
                "language": language,
                "codes": codes,
                "text_hash": rows.text_hash[numbers],
                TEACHER: teacher,
            }.items():
                files[name].write(values.astype(ARRAYS.get(name, values.dtype)).tobytes())
            end += int(offsets[-1])
    finally:
        for file in files.values():
            file.close()
    return per_row


class TaughtRows(TextRows):
    """`TextRows` of a student. Beside their entries a batch has those that
    `histocc.model.distillation.DistillationLoss` takes: teacher_codes int64 [B, M], teacher_logits float32
    [B, M], teacher_weights and seq2seq_weights float32 [B].

    Of a labelled row, the linear decoder's share of the teacher is `weight`. The target of the other decoder
    is what the teacher wrote in as many of the epochs, by a draw that is a pure function of (seed, epoch,
    row), and then counts as much as the teacher was sure of it; else the true codes, which count 1. A row
    with a true code that the teacher lacks has its true codes alone, one without labels the teacher alone.

    Args:
        rows: with a teacher's answers.
        weight: 0…1, of the teacher.
        seed: of the draws.
    """

    def __init__(
        self,
        rows: TextRowSet,
        data: PreparedData,
        encoding: RowEncoding,
        changes: TextChanges = NO_CHANGES,
        weight: float = 0.5,
        seed: int = 0,
    ):
        super().__init__(rows, data, encoding, changes)
        self.weight, self.seed = weight, seed
        self.known = np.ones(len(data.codes) + 1, dtype=bool)  # codes of the teacher; −1, none, is the last
        self.known[data.report["teacher"]["unknown_codes"]] = False

    def batch(self, numbers: np.ndarray, epoch: int) -> dict[str, torch.Tensor]:
        found, teacher = super().batch(numbers, epoch), self.rows.teacher_of(numbers)
        assert teacher is not None
        written, labelled = teacher["written"].astype(np.int64), teacher["labelled"]
        # what it lacks it cannot teach: true codes, or part of what it writes
        all_known = self.known[self.rows.codes[numbers]].all(1)
        share = np.where(labelled, self.weight * all_known, 1)
        drawn = chance(draw(streams(self.seed, epoch, numbers), 0), self.weight)
        drawn = drawn & all_known & (teacher["prob"] > 0) | ~labelled
        targets = np.where(drawn[:, None], self._targets(written), found["targets_seq2seq"].numpy())
        return {
            **found,
            "targets_seq2seq": torch.from_numpy(targets),
            "teacher_codes": torch.from_numpy(teacher["codes"].astype(np.int64)),
            "teacher_logits": torch.from_numpy(teacher["logits"].astype(np.float32)),
            "teacher_weights": torch.from_numpy(share.astype(np.float32)),
            "seq2seq_weights": torch.from_numpy(np.where(drawn, teacher["prob"], 1).astype(np.float32)),
        }
