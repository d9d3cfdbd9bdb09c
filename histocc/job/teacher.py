"""A student: a run that learns from a teacher's answers to its training texts and to unlabelled ones.

The answers are made once and kept beside the prepared data, `KEY.answers.npy`: a record for each row, whose
`prob` is −1 until it is answered. With the rows they become a prepared folder with one more file,
`train.teacher`. Batches depend on the texts alone, and a CPU computes with one thread: the answers are the
same on any number of processes. A teacher writes the codes that both of its decoders rank first together:
Kim, Rush, 2016, "Sequence-Level Knowledge Distillation" (arXiv 1606.07947).
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from histocc.data import prepare as preparing
from histocc.data.arrays import (
    ARRAYS,
    TEACHER,
    TEACHER_OUTPUTS,
    PreparedData,
    RowSet,
    fault,
    read_meta,
    teacher_record,
    text_keys,
    write_last,
)
from histocc.data.config import PrepareSettings
from histocc.data.dataset import TextRows
from histocc.data.report import report_lines
from histocc.data.rows import MAX_LANGUAGES
from histocc.formatter import BlockyFormatter
from histocc.job.config import JobConfig
from histocc.predict.coder import Coder
from histocc.published import formats, models
from histocc.runtime import checkpoint
from histocc.runtime.device import Precision, settings_of_torch
from histocc.runtime.errors import UserError
from histocc.runtime.files import atomic_write
from histocc.runtime.forked import Forked, usable_cores, why_not_forked
from histocc.runtime.log import Stage
from histocc.runtime.rng import chance, draw, streams
from histocc.runtime.world import World

FORMAT = 5  # version of the answers
PIECE = 2048  # texts that are shared out together
MAX_LOGIT = 6e4  # float16 holds it
# Files of the prepared labelled rows that the student takes as they are.
KEPT = ["key.csv", "words.csv", "rejected_rows.csv", "conflicts.csv", *(f"val.{name}" for name in ARRAYS)]


class Teacher:
    """A trained model that answers in a student's codes. Raises UserError for a model that cannot."""

    def __init__(self, coder: Coder, codes: list[str], formatter: BlockyFormatter):
        number = {code: i for i, code in enumerate(codes)}
        self.coder, self.room = coder, formatter.max_num_codes
        self.number_of = {code: number.get(formatter.repair(code)[0], -1) for code in coder.codes}
        self.unknown = sorted({*number.values()} - {*self.number_of.values()})  # student's codes it lacks
        self.lacking = sum(i < 0 for i in self.number_of.values())  # its codes that the student lacks
        if coder.kind != "mixer" or self.lacking == len(coder.codes):
            raise UserError(
                f"--teacher: a {formatter.kind} student needs one with both decoders and with some of its"
                f" {len(codes):,} codes, {', '.join(codes[:3])} …; this is {formats.KINDS[coder.kind]} for"
                f" {coder.formatter.kind}, {', '.join(coder.codes[:3])} …"
            )

    def answers(self, texts: list[str], languages: list[str]) -> np.ndarray:
        """Return `teacher_record`s [len(texts)], without codes for a text that its cleaning empties."""
        found = np.zeros(len(texts), dtype=teacher_record(self.room))
        found["codes"], found["logits"], found["written"] = -1, -MAX_LOGIT, -1
        numbers = np.array(list(self.number_of.values()))
        shared = np.flatnonzero(numbers >= 0)
        logits = torch.from_numpy(self.coder.probabilities(texts, languages, logits=True)[:, shared])
        top, at = logits.topk(min(len(shared), TEACHER_OUTPUTS))
        there, width = ~logits[:, 0].isnan().numpy(), top.shape[1]
        found["logits"][there, :width] = top.clamp(-MAX_LOGIT, MAX_LOGIT).numpy()[there]
        found["codes"][there, :width] = numbers[shared][at.numpy()][there]
        for row, answer in zip(found, self.coder.code(texts, languages, "both", self.room + 1)):
            kept = [self.number_of[code] for code in answer.codes if self.number_of[code] >= 0][: self.room]
            row["written"][: len(kept)] = kept
            # an answer that the student can give only in part has probability 0
            row["prob"] = answer.conf if kept and len(kept) == len(answer.codes) else 0.0
        return found


def teacher_file(args: JobConfig) -> str:
    """Return the file of --teacher. Raises UserError."""
    file = models.find_weights(args.teacher or "", f"--teacher {args.teacher}")
    if os.path.dirname(os.path.realpath(file)) == os.path.realpath(args.save_path):
        raise UserError(f"--teacher {args.teacher}: is in the folder of the run itself, which changes")
    return file


def unlabelled_settings(files: list[str], read: PrepareSettings) -> PrepareSettings:
    """Return the settings to read the files of --unlabelled: as the labelled ones, without codes."""
    same = ("formatter", "input_col", "language", "language_col", "max_len", "delimiter")
    values = {name: getattr(read, name) for name in (*same, "clean_text", "encoding", "ditto")}
    return PrepareSettings(files, target_cols=[], **values)


class Questions:
    """The rows for a teacher: training rows, and unlabelled texts that are new and not validated on."""

    def __init__(self, data: PreparedData, unlabelled: PreparedData | None):
        self.data, self.unlabelled, train = data, unlabelled, data.train
        more = [] if unlabelled is None else unlabelled.languages
        self.languages = list(dict.fromkeys([*data.languages, *more]))
        if len(self.languages) > MAX_LANGUAGES:
            raise UserError(f"--unlabelled: more than {MAX_LANGUAGES} languages, with the labelled rows")
        # row sets; each with the numbers of its rows, and the numbers in `languages` of its languages
        self.sets = [(train, np.arange(len(train)), np.arange(len(self.languages)))]
        self.left_out, keys = {}, text_keys(train.text_hash, train.language)  # left_out: rows by reason
        if unlabelled is not None:
            others, text_hash = unlabelled.train, np.asarray(unlabelled.train.text_hash)
            names = np.array([self.languages.index(name) for name in more], dtype=np.int64)
            other_keys = text_keys(text_hash, names[np.asarray(others.language)])
            _, first = np.unique(other_keys, return_index=True)
            aside = np.concatenate([data.val.text_hash, data.test_hashes])
            validated = np.isin(text_hash[first], aside)
            known = np.isin(other_keys[first], keys) & ~validated
            self.left_out = {
                "repeated": len(others) - len(first),
                "texts of labelled rows": int(known.sum()),
                "texts that are validated or tested on": int(validated.sum()),
            }
            added = np.sort(first[~validated & ~known])
            self.sets.append((others, added, names))
            keys = np.concatenate([keys, other_keys[added]])
        self.order = np.argsort(keys, kind="stable")  # rows with the same text follow each other

    def asked(self, index: np.ndarray) -> tuple[list[str], list[str]]:
        """Return (texts, languages) of rows, numbered through all sets."""
        texts, languages, begin = np.empty(len(index), object), np.empty(len(index), object), 0
        for rows, numbers, names in self.sets:
            here = (index >= begin) & (index < begin + len(numbers))
            some = numbers[index[here] - begin]
            texts[here] = rows.strings(some)
            languages[here] = [self.languages[i] for i in names[np.asarray(rows.language)[some]].tolist()]
            begin += len(numbers)
        return texts.tolist(), languages.tolist()


# ---- a run with a teacher


def with_teacher(
    args: JobConfig, read: PrepareSettings, world: World, data: PreparedData, load: Callable[[str], dict]
) -> PreparedData:
    """Return the rows of a run that has a teacher, with its answers, or `data` as it is if there is no
    teacher. The first node asks; a node that does not see its folder builds its own of these answers. All
    ranks. load: returns the content of a file of weights. Raises UserError.
    """
    if not args.teacher or args.eval_only:
        return data
    unlabelled, check = None, world.give_up_if_asked
    if args.unlabelled:
        wanted = unlabelled_settings(args.unlabelled, read)
        made = world.run_on_main(lambda: preparing.prepare(wanted, args.save_path, world.print, None, check))
        unlabelled = preparing.on_every_node(wanted, args.save_path, made, world, check)
        world.print("\n".join(f"  {line}" for line in report_lines(unlabelled.report)))
    questions = Questions(data, unlabelled)
    formatter, rows = BlockyFormatter.from_dict(read.formatter), len(questions.order)
    record = teacher_record(formatter.max_num_codes)
    file, key = world.run_on_main(lambda: _file_and_key(args, questions, record))
    folder = os.path.join(os.path.dirname(os.path.abspath(data.folder)), key)
    path, of_node = f"{folder}.answers.npy", world.gather(world.leader)

    def lacking() -> list[int]:
        """Return the first ranks of the nodes that do not see the folder."""
        leaders = sorted(set(of_node))
        faults = world.run_on(leaders, lambda: fault(folder))
        return [leader for leader, problem in zip(leaders, faults) if problem]

    def begin() -> None:
        if not os.path.exists(path):
            answers = np.zeros(rows, record)
            answers["prob"] = -1  # the teacher was not asked yet
            with atomic_write(path) as file:
                np.save(file, answers)

    if lacking():
        world.print(f"Teacher: {file}, asked for the texts of {rows:,} rows")
        world.run_on_main(begin)
        first_node = [rank for rank, leader in enumerate(of_node) if leader == 0]
        asking = first_node if world.device.type != "cpu" else [0]
        facts = world.run_on(asking, lambda: _ask(file, load(file), formatter, questions, path, world))[0]
        world.run_on_main(lambda: _build(folder, questions, np.load(path), facts))
        if others := lacking():
            answers = world.broadcast(np.load(path) if world.is_main else None, 0)
            world.run_on(others, lambda: _build(folder, questions, answers, facts))
    else:
        world.print(f"Teacher: its answers are in {folder}")
    found = PreparedData.open(folder)
    world.print("\n".join(found.report["teacher"]["notes"]))
    return found


def _file_and_key(args: JobConfig, questions: Questions, record: np.dtype) -> tuple[str, str]:
    """Return (file of the teacher; name of its answers, by the content of all rows, and of its files)."""
    file = teacher_file(args)
    other = questions.unlabelled.fingerprint if questions.unlabelled else ""
    parts = [FORMAT, record.itemsize, questions.data.fingerprint, other]
    for path in formats.files_of(file):
        with open(path, "rb") as opened:
            parts.append(hashlib.file_digest(opened, "sha256").hexdigest())
    return file, hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()


def _ask(
    file: str, content: dict, formatter: BlockyFormatter, questions: Questions, path: str, world: World
) -> dict:
    """Answer the rows left, on a node's GPUs or in processes forked by rank 0; return facts for a report."""
    model, own_formatter, state = models.model_of_content(file, content)
    coder = Coder(model.to(world.device), own_formatter, state)
    teacher = Teacher(coder, questions.data.codes, formatter)
    with checkpoint.reading(path):
        answers = np.load(path, mmap_mode="r+")
    pieces = [questions.order[i : i + PIECE] for i in range(0, len(questions.order), PIECE)]
    on_cpu, threads = world.device.type == "cpu", world.local_size * torch.get_num_threads()
    forks = on_cpu and not why_not_forked()
    cores = max(1, min(usable_cores(), threads, len(pieces))) if forks else 1
    forked, shares = Forked(cores, world.give_up_if_asked), cores if on_cpu else world.local_size

    def work(part: int) -> None:
        teacher.coder.check = forked.check
        own = pieces[part if on_cpu else world.local_rank :: shares]
        left = [piece for piece in own if (answers["prob"][piece] < 0).any()]
        stage = Stage("asking the teacher", len(left), f"pieces of {PIECE:,} texts")
        for piece in left:
            answers[piece] = teacher.answers(*questions.asked(piece))
            stage.add()

    with settings_of_torch():
        Precision("float32", world.device).use()
        if forks:
            torch.set_num_threads(1)  # results are the same to the last bit, whatever the number of processes
        forked.each(work)
    return {"unknown": teacher.unknown, "lacking": teacher.lacking, "languages": teacher.coder.languages}


def _notes(questions: Questions, answers: np.ndarray, facts: dict) -> list[str]:
    """Return lines on a teacher and its answers. facts: of `_ask`."""
    labelled, out = len(questions.data.train), questions.left_out
    unknown = [name for name in questions.languages if name not in facts["languages"]]
    notes = [
        f"Teacher: answers to {len(answers):,} rows, {labelled:,} of them labelled; it is sure of its codes"
        f" by {answers['prob'].mean(dtype=np.float64):.2f} on average"
    ]
    if out:
        why, added = ", ".join(f"{count:,} {why}" for why, count in out.items()), len(answers) - labelled
        notes.append(f"Unlabelled: {added:,} texts of {added + sum(out.values()):,} rows; left out: {why}")
    for count, what in (
        ((answers["written"][:, 0] < 0).sum(), "rows to which it gives no code that the student has"),
        ((answers["codes"][labelled:, 0] < 0).sum(), "unlabelled texts that its cleaning empties: left out"),
        (len(facts["unknown"]), "codes that it lacks: their rows learn from true codes alone"),
        (facts["lacking"], "of its codes are none of the student's: left out of its answers"),
        (len(unknown), f"languages that it does not know, asked as unk: {', '.join(unknown)}"),
    ):
        notes += [f"Note: {count:,} {what}"] * bool(count)
    return notes


# ---- its rows


def _build(folder: str, questions: Questions, answers: np.ndarray, facts: dict) -> None:
    """Build the prepared folder of the student's rows; unlabelled ones without an answer are left out."""
    data, room = questions.data, answers.dtype["written"].shape[0]

    def widened(codes: np.ndarray) -> np.ndarray:
        """Return codes int [N, K] with −1 behind, as int32 [N, room]."""
        return np.pad(codes, ((0, 0), (0, room - codes.shape[1])), constant_values=-1).astype(ARRAYS["codes"])

    def fill(new: str) -> None:
        for name in KEPT:
            shutil.copyfile(os.path.join(data.folder, name), os.path.join(new, name))
        val = widened(data.val.codes)
        val.tofile(os.path.join(new, "val.codes"))
        parts: list[dict[str, np.ndarray]] = []
        for (rows, numbers, names), teacher in zip(questions.sets, np.split(answers, [len(data.train)])):
            codes = widened(rows.codes[numbers])
            teacher["labelled"] = codes[:, 0] >= 0
            codes[~teacher["labelled"]] = teacher["written"][~teacher["labelled"]]
            kept = np.flatnonzero(teacher["labelled"] | (teacher["codes"][:, 0] >= 0))
            numbers = numbers[kept]
            part = {
                "chars": rows.texts(numbers)[0],
                "offsets": rows.lengths(numbers),
                "language": names[np.asarray(rows.language)[numbers]],
                "codes": codes[kept],
                "text_hash": rows.text_hash[numbers],
                TEACHER: teacher[kept],
            }
            parts.append(part)
        for name in parts[0]:
            values = np.concatenate([part[name] for part in parts])
            values = np.append(0, np.cumsum(values)) if name == "offsets" else values
            values.astype(ARRAYS.get(name, values.dtype)).tofile(os.path.join(new, f"train.{name}"))
        codes = np.concatenate([part["codes"] for part in parts])
        per_row = np.bincount((np.concatenate([codes, val]) >= 0).sum(1))
        counts = {str(n): int(count) for n, count in enumerate(per_row) if count}
        report = {"unknown_codes": facts["unknown"], "notes": _notes(questions, answers, facts)}
        whole = {**data.report, "codes_per_row": counts, "teacher": report, "train_rows": len(codes)}
        with open(os.path.join(new, "data_report.json"), "w", encoding="utf-8") as file:
            json.dump(whole, file, indent=1, ensure_ascii=False)
        alphabet = {*data.alphabet, *(questions.unlabelled.alphabet if questions.unlabelled else ())}
        changed = {"fingerprint": os.path.basename(folder), "languages": questions.languages}
        changed |= {"alphabet": sorted(alphabet), "max_codes": room, "report": whole}
        write_last(new, read_meta(data.folder) | changed)

    preparing.build_folder(*os.path.split(folder), fill)


class TaughtRows(TextRows):
    """`TextRows` of a student; batches also have the entries that `DistillationLoss` takes.

    The linear decoder's share of the teacher is `weight`, 0…1. The target of the other decoder is the
    teacher's answer in this share of the epochs, by a draw that is a pure function of (seed, epoch, row), and
    then counts as much as the teacher was sure of it; else the target is the true codes, which count 1. A row
    with a true code that the teacher lacks has its true codes alone, a row without labels the teacher's
    answer alone.
    """

    def __init__(self, rows: RowSet, data: PreparedData, *more: Any, weight: float, seed: int):
        super().__init__(rows, data, *more)
        self.weight, self.seed = weight, seed
        self.known = np.ones(len(data.codes) + 1, dtype=bool)  # codes of the teacher; the last is −1, none
        self.known[data.report["teacher"]["unknown_codes"]] = False

    def batch(self, numbers: np.ndarray, epoch: int) -> dict[str, Tensor]:
        found, teacher = super().batch(numbers, epoch), self.rows.teacher_of(numbers)
        assert teacher is not None
        written, labelled = teacher["written"].astype(np.int64), teacher["labelled"]
        # the teacher cannot teach a true code that it lacks, or an answer that is given only in part
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
