"""A student: a run that learns from a teacher's answers to its training texts and to unlabelled ones.

The answers are made once, beside the prepared data, and become part of a prepared folder like any other, with
one more file: `train.teacher`, a record for each training row. It is keyed by the content of all rows and of
the teacher's file. Which texts are asked, in which order and with which others in a batch, is a function of
the texts alone, and a CPU computes with one thread, so that the answers do not depend on the number of
processes. They stand in one file until all are there; work that was interrupted is resumed from it.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace

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
from histocc.data.config import Columns, PrepareSettings, StartsFrom, file_problems
from histocc.data.dataset import NO_CHANGES, RowEncoding, TextChanges, TextRows, TextRowSet
from histocc.data.prepare import build_folder
from histocc.data.report import report_lines
from histocc.data.rows import MAX_LANGUAGES
from histocc.formatter import BlockyFormatter
from histocc.job.answers import Teacher
from histocc.job.config import JobConfig
from histocc.published import formats, models
from histocc.runtime import checkpoint
from histocc.runtime.device import Precision
from histocc.runtime.errors import UserError
from histocc.runtime.files import atomic_write
from histocc.runtime.forked import Forked, usable_cores
from histocc.runtime.log import Stage
from histocc.runtime.rng import chance, draw, streams
from histocc.runtime.world import World

FORMAT = 3  # of the answers
PIECE = 2048  # texts that are shared out together
CHUNK = 1 << 16  # rows that are written at once


def teacher_file(args: JobConfig) -> str:
    """The file of --teacher. Raises UserError."""
    return models.find_weights(args.teacher or "", f"--teacher {args.teacher}")


def problems(args: JobConfig, columns: Columns) -> list[str]:
    """What is wrong with the files that --teacher and --unlabelled name, a line each. columns: of the
    labelled rows.
    """
    found = []
    try:
        if args.teacher:
            teacher_file(args)
    except UserError as error:
        found.append(str(error))
    if args.teacher and not found and os.path.isdir(args.save_path):
        inside = os.path.dirname(os.path.realpath(teacher_file(args)))
        if inside == os.path.realpath(args.save_path):
            found.append(
                f"--teacher {args.teacher} lies in the folder of the run itself ({args.save_path}), whose"
                " checkpoints change: choose another folder for the run"
            )
    texts = PrepareSettings(
        args.unlabelled or [],
        {},
        [],
        input_col=args.input_col,
        language_col=columns.language_col,
        delimiter=args.delimiter,
    )
    found += file_problems(texts)
    return found


def starts_from(args: JobConfig) -> StartsFrom:
    """What the data of a student must know of its teacher: its codes are the first of its key. Raises
    UserError.
    """
    _, formatter, state = models.load_model(teacher_file(args))
    chars = formatter.to_dict().get("chars")
    return StartsFrom(state["config"]["text"], list(state["key"]), formatter.kind, chars)


class Questions:
    """The texts that a teacher is asked: each distinct text and language of the training rows, then those of
    the unlabelled rows that are not among these, nor among the texts that are validated on. Texts that differ
    only in case and blanks are one.

    Attributes:
        languages: of all rows, those of the labelled ones first.
        left_out: how many unlabelled rows are not asked, by why.
        rows: the row sets, and for each the numbers of its rows that are trained on and of their questions.
        parts: the row sets, and for each the numbers of its rows that are asked, and those in `languages` of
            its own languages.
    """

    def __init__(self, data: PreparedData, unlabelled: PreparedData | None):
        self.data, self.unlabelled, train = data, unlabelled, data.train
        more = [] if unlabelled is None else unlabelled.languages
        self.languages = list(dict.fromkeys([*data.languages, *more]))
        if len(self.languages) > MAX_LANGUAGES:
            raise UserError(
                f"the labelled rows and those of --unlabelled have {len(self.languages)} languages together,"
                f" and {MAX_LANGUAGES} are the most: does --language-col name the right column?"
            )
        keys, first, question = np.unique(
            text_keys(train.text_hash, train.language), return_index=True, return_inverse=True
        )
        self.rows: list[tuple[RowSet, np.ndarray, np.ndarray]] = [(train, np.arange(len(train)), question)]
        self.labelled, self.left_out = len(keys), {}
        self.parts = [(train, first, np.arange(len(self.languages)))]
        if unlabelled is not None:
            others, text_hash = unlabelled.train, np.asarray(unlabelled.train.text_hash)
            names = np.array([self.languages.index(name) for name in unlabelled.languages], dtype=np.int64)
            other_keys = text_keys(text_hash, names[np.asarray(others.language)])
            _, first = np.unique(other_keys, return_index=True)
            validated = np.isin(text_hash[first], np.asarray(data.val.text_hash))
            known = np.isin(other_keys[first], keys) & ~validated
            self.left_out = {
                "repeated": len(others) - len(first),
                "texts of labelled rows": int(known.sum()),
                "texts that are validated on": int(validated.sum()),
            }
            added = np.sort(first[~validated & ~known])
            self.rows.append((others, added, self.labelled + np.arange(len(added))))
            self.parts.append((others, added, names))

    def __len__(self) -> int:
        return sum(len(numbers) for _, numbers, _ in self.parts)

    def language(self, part: int, numbers: np.ndarray) -> np.ndarray:
        """Numbers in `languages` of the languages of rows of a row set, int64."""
        rows, _, names = self.parts[part]
        return names[np.asarray(rows.language)[numbers]]

    def asked(self, start: int, end: int) -> tuple[list[str], list[str]]:
        """(texts, languages) of the questions from `start` to before `end`."""
        texts, languages = [], []
        for part, (rows, numbers, _) in enumerate(self.parts):
            some = numbers[max(start, 0) : max(end, 0)]
            texts += rows.strings(some)
            languages += [self.languages[number] for number in self.language(part, some).tolist()]
            start, end = start - len(numbers), end - len(numbers)
        return texts, languages


# ---- a run with a teacher


def with_teacher(args: JobConfig, read: PrepareSettings, world: World, data: PreparedData) -> PreparedData:
    """The rows of a run that has a teacher: the labelled ones and those of --unlabelled, with its answers;
    `data` as it is where none is asked for. All ranks. Raises UserError.
    """
    if not args.teacher or args.eval_only:
        return data
    questions = Questions(data, _unlabelled(args, read, world))
    formatter = BlockyFormatter.from_dict(read.formatter)
    key, digest = world.run_on_main("teacher", lambda: _key(args, formatter, questions))
    folder = os.path.join(os.path.dirname(os.path.abspath(data.folder)), key)
    path, record = f"{folder}.answers.npy", teacher_record(formatter.max_num_codes)
    leaders, of_node = world.node_leaders(), world.gather(world.rank - world.local_rank)

    def is_there() -> bool:
        return fault(folder, check=world.give_up_if_asked) is None

    # the first node, and then those that do not see its folder
    for group in filter(None, (leaders[:1], leaders[1:])):
        there = world.run_on("look for answers", group, is_there)
        lacking = [leader for leader, found in zip(group, there) if not found]
        if not lacking:
            if group == leaders[:1]:
                world.print(f"Teacher: its answers are in {folder}")
            continue
        world.run_on("begin answers", lacking, lambda: _begin(path, len(questions), record))
        asking = [  # on a CPU the first process of a node, with a process for each core
            rank
            for rank, leader in enumerate(of_node)
            if leader in lacking and (rank == leader or world.device.type != "cpu")
        ]
        lists = world.run_on(
            "ask the teacher", asking, lambda: _ask(args, formatter, world, questions, path, digest)
        )[0]

        def finish(lists: dict[str, list] = lists) -> None:
            if is_there():  # another node has made it
                return
            answers = np.load(path)["answer"]
            build(
                folder, questions, answers, _report(args, questions, answers, lists), world.give_up_if_asked
            )
            with contextlib.suppress(OSError):
                os.remove(path)

        for leader in lacking:
            world.run_on(f"rows with the teacher's answers, rank {leader}", [leader], finish)
    found = PreparedData.open(folder)
    for line in _lines(found.report["teacher"]):
        world.print(line)
    return found


def _unlabelled(args: JobConfig, read: PrepareSettings, world: World) -> PreparedData | None:
    """The prepared rows of --unlabelled; None where there are none. All ranks. Raises UserError."""
    files = args.unlabelled
    if not files:
        return None
    save_path = args.save_path
    wanted = replace(  # as the labelled rows, without codes
        read,
        train_files=files,
        val_files=[],
        target_cols=[],
        share_val=None,
        missing_code=None,
        drop_bad_labels=False,
        fixed_codes=None,
        number_codes=None,
        first_codes=None,
        code_separator=None,
        recode={},
        empty_text=None,
    )
    folder = world.run_on_main(
        "prepare unlabelled texts",
        lambda: preparing.prepare(wanted, save_path, world.print, None, world.give_up_if_asked),
    )
    found = preparing.on_every_node(
        wanted, save_path, folder, world, world.give_up_if_asked, "prepare unlabelled on each node"
    )
    for line in report_lines(found.report):
        listed = os.path.join(found.folder, "rejected_rows.csv")
        world.print(f"  {line.replace('listed in rejected_rows.csv', f'listed in {listed}')}")
    return found


def _digest(file: str) -> str:
    """Of the content of a file of weights, and of what lies beside it and says what they mean."""
    found = hashlib.sha256()
    for path in (file, *(os.path.join(os.path.dirname(file), name) for name in formats.BESIDE)):
        if os.path.isfile(path):
            with open(path, "rb") as opened:
                found.update(hashlib.file_digest(opened, "sha256").digest())
        found.update(b"|")
    return found.hexdigest()


def _key(args: JobConfig, formatter: BlockyFormatter, questions: Questions) -> tuple[str, str]:
    """(what names the answers, by the content of all rows and of the teacher's file: hexadecimal, 16 digits;
    digest of the latter). Raises UserError where a run that is resumed had others.
    """
    digest, save_path = _digest(teacher_file(args)), args.save_path
    other = questions.unlabelled.fingerprint if questions.unlabelled else ""
    room = formatter.max_num_codes
    parts = [FORMAT, TEACHER_OUTPUTS, room, questions.data.fingerprint, other, digest]
    key = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()
    resumes = checkpoint.exists_in(save_path) and not args.prepare_only
    if resumes and not args.overwrite:
        position = checkpoint.newest_good(save_path)[1]["position"]
        if position.get("fingerprint", key) != key:
            raise UserError(
                f"{save_path}: holds a run that was started with another --teacher or --unlabelled, with"
                " other data, or by another version of histocc: give it the same files again, choose another"
                " folder, or pass --overwrite"
            )
    return key, digest


def _begin(path: str, number: int, record: np.dtype) -> None:
    """The file of answers, where none of so many is there: whether each is done, and the answer."""
    dtype = np.dtype([("done", "?"), ("answer", record)])
    with contextlib.suppress(OSError, ValueError, EOFError):
        found = np.load(path, mmap_mode="r")
        if found.dtype == dtype and found.shape == (number,):
            return
    with atomic_write(path) as file:
        np.save(file, np.zeros(number, dtype))


def _ask(
    args: JobConfig, formatter: BlockyFormatter, world: World, questions: Questions, path: str, digest: str
) -> dict[str, list]:
    """Answers what is not answered yet; returns what the report says of the teacher. digest: of the one that
    rank 0 has. Those ranks of a node that ask share the work, a CPU's with a process for each core.
    """
    file = teacher_file(args)
    loaded = models.load_model(file, world.device)
    if _digest(file) != digest:
        raise UserError(
            f"--teacher {args.teacher}: on rank {world.rank} it is not what rank 0 has read,"
            " or it has changed since: give every node the same file, of a run that has ended"
        )
    teacher = Teacher(file, loaded, questions.data.codes, formatter, teacher_record(formatter.max_num_codes))
    if world.is_main:
        size = models.size_name(teacher.state["config"])
        world.print(f"Teacher: {teacher.name} ({size}), asked for {len(questions):,} distinct texts")
        for line in teacher.notes(formatter):
            world.print(line)
    answers = np.load(path, mmap_mode="r+")
    threads, on_cpu = torch.get_num_threads(), world.device.type == "cpu"
    own = slice(None) if on_cpu else slice(world.local_rank, None, world.local_size)
    left = [i for i in range(0, len(questions), PIECE)[own] if not answers["done"][i : i + PIECE].all()]
    cores = min(usable_cores(), world.local_size * threads, len(left)) if on_cpu else 1
    forked = Forked(max(1, cores), world.give_up_if_asked)
    pieces, done = forked.pieces(), Stage("asking the teacher", len(left), f"pieces of {PIECE:,} texts")
    Precision("float32", world.device).use()

    def work(part: int) -> None:
        # a forked process has the connection to the store in common with its parent, who ends it
        check = forked.check if part == 0 else preparing.nothing
        for i, start in enumerate(left):
            if forked.number > 1 and not pieces.is_mine(i):
                continue
            check()
            piece = slice(start, start + PIECE)
            answers["answer"][piece] = teacher.answers(*questions.asked(piece.start, piece.stop), check)
            answers["done"][piece] = True
            if part == 0:
                done.at(i + 1)

    try:
        if on_cpu:
            torch.set_num_threads(1)  # the same to the last bit, whatever the number of processes
        with done:
            forked.each(work)
    finally:
        torch.set_num_threads(threads)
    return {name: getattr(teacher, name) for name in ("languages", "unknown", "lacking")}


def _report(args: JobConfig, questions: Questions, answers: np.ndarray, lists: dict[str, list]) -> dict:
    """What the report keeps of a teacher and its answers, plain types. lists: languages, unknown and lacking
    of the `Teacher`.
    """
    counts = np.zeros(len(questions.languages), dtype=np.int64)
    for part, (_, numbers, _) in enumerate(questions.parts):
        counts += np.bincount(questions.language(part, numbers), minlength=len(counts))
    unlabelled = questions.unlabelled
    return {
        "path": args.teacher,
        "texts": len(questions),
        "labelled_texts": questions.labelled,
        "unlabelled_rows": 0 if unlabelled is None else len(unlabelled.train),
        "unlabelled_texts": len(questions) - questions.labelled,
        "left_out": questions.left_out,
        "unknown_codes": lists["unknown"],
        "unanswered": int((answers["codes"][questions.labelled :, 0] < 0).sum()),
        "without_code": int((answers["written"][:, 0] < 0).sum()),
        "unknown_languages": {
            name: int(count)
            for name, count in zip(questions.languages, counts)
            if count and name not in lists["languages"]
        },
        "lacking_codes": lists["lacking"],
        "mean_prob": float(answers["prob"].mean(dtype=np.float64)),
    }


def _lines(said: dict) -> list[str]:
    """The same for people."""
    lines = [
        f"Teacher: answers to {said['texts']:,} distinct texts, {said['labelled_texts']:,} of them labelled;"
        f" it is sure of its codes by {said['mean_prob']:.2f} on average"
    ]
    if said["unlabelled_rows"]:
        out = ", ".join(f"{count:,} {why}" for why, count in said["left_out"].items() if count)
        lines.append(
            f"Unlabelled: {said['unlabelled_texts']:,} texts of {said['unlabelled_rows']:,} rows"
            + (f"; left out: {out}" if out else "")
        )
    if said["without_code"]:
        lines.append(
            f"Note: to {said['without_code']:,} texts the teacher writes no code that the student has, or"
            " more codes than its own rows had"
        )
    if said["unanswered"]:
        lines.append(
            f"Note: of {said['unanswered']:,} unlabelled texts the teacher's cleaning leaves nothing: left"
            " out"
        )
    if said["unknown_codes"]:
        lines.append(
            f"Note: {len(said['unknown_codes']):,} codes of the student are none of the teacher's; rows that"
            " have them learn from their true codes alone"
        )
    if said["lacking_codes"]:
        lines.append(
            f"Note: {len(said['lacking_codes']):,} codes of the teacher are none of the student's, and left"
            " out of its answers"
        )
    if said["unknown_languages"]:
        names = ", ".join(f"{name} {count:,}" for name, count in said["unknown_languages"].items())
        lines.append(f"Note: languages that the teacher does not know, asked as unk: {names} texts")
    return lines


# ---- its rows


def build(
    folder: str, questions: Questions, answers: np.ndarray, report: dict, check: Callable[[], None]
) -> None:
    """The prepared folder of the student's rows; unlabelled ones without an answer are left out.

    Args:
        answers: of all questions, `teacher_record`s.
        report: is kept in the folder's as `teacher`.
        check: called now and then; an exception of it ends the work.
    """
    data, room = questions.data, answers.dtype["written"].shape[0]

    def widened(codes: np.ndarray) -> np.ndarray:
        """codes int [N, K] with −1 behind, int32 [N, room]."""
        found = np.full((len(codes), room), -1, dtype=ARRAYS["codes"])
        found[:, : codes.shape[1]] = codes
        return found

    def fill(new: str) -> None:
        for name in (
            "key.csv",
            "words.csv",
            "rejected_rows.csv",
            "conflicts.csv",
            *(f"val.{name}" for name in ARRAYS),
        ):
            shutil.copyfile(os.path.join(data.folder, name), os.path.join(new, name))
        val, end = widened(data.val.codes), 0
        val.tofile(os.path.join(new, "val.codes"))
        per_row = np.bincount((val >= 0).sum(1), minlength=room + 1)
        with contextlib.ExitStack() as opened:
            files = {
                name: opened.enter_context(open(os.path.join(new, f"train.{name}"), "wb"))
                for name in (*ARRAYS, TEACHER)
            }
            files["offsets"].write(np.zeros(1, ARRAYS["offsets"]).tobytes())
            for part, (rows, all_numbers, all_questions) in enumerate(questions.rows):
                for start in range(0, len(all_numbers), CHUNK):
                    check()
                    numbers, asked = (each[start : start + CHUNK] for each in (all_numbers, all_questions))
                    kept = (rows.codes[numbers][:, 0] >= 0) | (answers["codes"][asked][:, 0] >= 0)
                    numbers, teacher = numbers[kept], answers[asked[kept]]
                    flat, offsets = rows.texts(numbers)
                    codes = widened(rows.codes[numbers])
                    unlabelled = codes[:, 0] < 0
                    codes[unlabelled] = teacher["written"][unlabelled]
                    teacher["labelled"] = ~unlabelled
                    per_row += np.bincount((codes >= 0).sum(1), minlength=room + 1)
                    for name, values in {
                        "chars": flat,
                        "offsets": offsets[1:] + end,
                        "language": questions.language(part, numbers),
                        "codes": codes,
                        "text_hash": rows.text_hash[numbers],
                        TEACHER: teacher,
                    }.items():
                        files[name].write(values.astype(ARRAYS.get(name, values.dtype)).tobytes())
                    end += int(offsets[-1])
        numbers = {str(n): int(count) for n, count in enumerate(per_row) if count}
        all_of_it = {**data.report, "codes_per_row": numbers, "teacher": report}
        all_of_it["train_rows"] = int(per_row.sum()) - len(val)
        with open(os.path.join(new, "data_report.json"), "w", encoding="utf-8") as file:
            json.dump(all_of_it, file, indent=1, ensure_ascii=False)
        meta, alphabet = read_meta(data.folder), set(data.alphabet)
        if questions.unlabelled is not None:
            alphabet |= set(questions.unlabelled.alphabet)
        content = {
            name: value for name, value in meta.items() if name not in ("sizes", "checksums", "checksum")
        }
        content |= {
            "fingerprint": os.path.basename(folder),
            "languages": questions.languages,
            "alphabet": sorted(alphabet),
            "max_codes": room,
            "report": all_of_it,
        }
        write_last(new, content)

    build_folder(*os.path.split(folder), fill, check)


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

    def batch(self, numbers: np.ndarray, epoch: int) -> dict[str, Tensor]:
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
