"""A student: a run that learns from a teacher's answers to its training texts and to unlabelled ones.

The answers are made once, beside the prepared data, and become part of a prepared folder like any other, with
one more file: `train.teacher`, a record for each training row. It is keyed by the content of all rows and of
the teacher's file. Which texts are asked, in which order and with which others in a batch, is a function of
the texts alone, and a CPU computes with one thread, so that the answers do not depend on the number of
processes. They stand in one file until all are there; work that was interrupted is resumed from it.

What a teacher writes is what both of its decoders rank first together (`predict --decoder both`): Kim, Rush,
2016, "Sequence-Level Knowledge Distillation" (arXiv 1606.07947), with as many codes as its linear decoder
gives.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from histocc.data import prepare as preparing
from histocc.data.arrays import (
    ARRAYS,
    TEACHER,
    TEACHER_OUTPUTS,
    PreparedData,
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
from histocc.job.config import JobConfig
from histocc.predict.coder import Coder
from histocc.published import formats, models
from histocc.runtime import checkpoint
from histocc.runtime.device import Precision
from histocc.runtime.errors import UserError
from histocc.runtime.files import atomic_write
from histocc.runtime.forked import Forked, usable_cores
from histocc.runtime.log import Stage
from histocc.runtime.rng import chance, draw, streams
from histocc.runtime.world import World

FORMAT = 4  # of the answers
PIECE = 2048  # texts that are shared out together
CHUNK = 1 << 16  # rows that are written at once
MAX_LOGIT = 6e4  # that float16 holds
# What of the prepared labelled rows is the student's as it is.
KEPT = ["key.csv", "words.csv", "rejected_rows.csv", "conflicts.csv", *(f"val.{name}" for name in ARRAYS)]


class Teacher:
    """A trained model, `name`, whose answers are in terms of a student's codes and formatter. Raises
    UserError for a model without one of the decoders, and if no code is the same.
    """

    def __init__(self, name: str, coder: Coder, codes: list[str], formatter: BlockyFormatter):
        if coder.kind != "mixer":
            raise UserError(
                f"--teacher {name}: is {formats.KINDS[coder.kind]}; a teacher needs both decoders"
            )
        self.coder, self.room = coder, formatter.max_num_codes
        number = {code: i for i, code in enumerate(codes)}
        self.number_of = {code: number.get(formatter.repair(code)[0], -1) for code in coder.codes}
        self.unknown = sorted({*number.values()} - {*self.number_of.values()})  # codes that it lacks
        self.lacking = [code for code, i in self.number_of.items() if i < 0]  # codes that the student lacks
        if len(self.lacking) == len(coder.codes):
            raise UserError(
                f"--teacher {name}: has none of the {len(codes):,} codes of the student (it has"
                f" {', '.join(coder.codes[:3])} …, the student {', '.join(codes[:3])} …): it is of another"
                f" system (formatter {coder.formatter.kind}, here {formatter.kind})"
            )

    def answers(self, texts: list[str], languages: list[str]) -> np.ndarray:
        """`teacher_record`s [len(texts)], in order; without codes for a text of which its cleaning leaves
        nothing.
        """
        found = np.zeros(len(texts), dtype=teacher_record(self.room))
        found["codes"], found["logits"], found["written"] = -1, -MAX_LOGIT, -1
        numbers = np.array(list(self.number_of.values()))
        shared = np.flatnonzero(numbers >= 0)
        logits = torch.from_numpy(self.coder.probabilities(texts, languages, logits=True)[:, shared])
        top, at = logits.topk(min(len(shared), TEACHER_OUTPUTS))
        there = np.flatnonzero(~logits[:, 0].isnan().numpy())[:, None]
        first = np.arange(top.shape[1])
        found["logits"][there, first] = top.clamp(-MAX_LOGIT, MAX_LOGIT).numpy()[there[:, 0]]
        found["codes"][there, first] = numbers[shared][at.numpy()][there[:, 0]]
        for row, answer in zip(found, self.coder.code(texts, languages, "both", self.room + 1)):
            kept = [self.number_of[code] for code in answer.codes if self.number_of[code] >= 0][: self.room]
            row["written"][: len(kept)] = kept
            # of what the student can say only a part of, nothing is sure
            row["prob"] = answer.conf if kept and len(kept) == len(answer.codes) else 0.0
        return found


def teacher_file(args: JobConfig) -> str:
    """The file of --teacher. Raises UserError."""
    return models.find_weights(args.teacher or "", f"--teacher {args.teacher}")


def problems(args: JobConfig, columns: Columns) -> list[str]:
    """What is wrong with the files that --teacher and --unlabelled name, a line each. columns: of the
    labelled rows.
    """
    found = []
    try:
        inside = os.path.dirname(os.path.realpath(teacher_file(args))) if args.teacher else None
        if inside == os.path.realpath(args.save_path):
            found.append(
                f"--teacher {args.teacher} lies in the folder of the run itself ({args.save_path}), whose"
                " checkpoints change: choose another folder for the run"
            )
    except UserError as error:
        found.append(str(error))
    read = {"input_col": args.input_col, "language_col": columns.language_col, "delimiter": args.delimiter}
    return found + file_problems(PrepareSettings(args.unlabelled or [], {}, [], **read))


def starts_from(args: JobConfig) -> StartsFrom:
    """What the data of a student must know of its teacher: its codes are the first of its key. Raises
    UserError.
    """
    _, formatter, state = models.load_model(teacher_file(args))
    chars = formatter.to_dict().get("chars")
    return StartsFrom(state["config"]["text"], list(state["key"]), formatter.kind, chars)


class Questions:
    """What a teacher is asked: the training rows, and the unlabelled ones whose texts are new, each once; not
    those of texts that are validated on. Texts that differ only in case and blanks are one.

    Attributes:
        languages: of all rows, those of the labelled ones first.
        left_out: how many unlabelled rows are not asked, by why.
        sets: row sets, for each the numbers of its rows, and those in `languages` of its own languages.
        order: of all these rows, so that those with the same text follow each other.
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
        self.sets = [(train, np.arange(len(train)), np.arange(len(self.languages)))]
        self.left_out, keys = {}, text_keys(train.text_hash, train.language)
        if unlabelled is not None:
            others, text_hash = unlabelled.train, np.asarray(unlabelled.train.text_hash)
            names = np.array([self.languages.index(name) for name in more], dtype=np.int64)
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
            self.sets.append((others, added, names))
            keys = np.concatenate([keys, other_keys[added]])
        self.order = np.argsort(keys, kind="stable")

    def __len__(self) -> int:
        return len(self.order)

    def asked(self, index: np.ndarray) -> tuple[list[str], list[str]]:
        """(texts, languages) of rows, numbered through all sets."""
        texts, languages, begin = np.empty(len(index), object), np.empty(len(index), object), 0
        for rows, numbers, names in self.sets:
            here = (index >= begin) & (index < begin + len(numbers))
            some = numbers[index[here] - begin]
            texts[here] = rows.strings(some)
            languages[here] = [self.languages[i] for i in names[np.asarray(rows.language)[some]].tolist()]
            begin += len(numbers)
        return texts.tolist(), languages.tolist()


# ---- a run with a teacher


def with_teacher(args: JobConfig, read: PrepareSettings, world: World, data: PreparedData) -> PreparedData:
    """The rows of a run that has a teacher: the labelled ones and those of --unlabelled, with its answers;
    `data` as it is if none is asked for. All ranks. Raises UserError.
    """
    if not args.teacher or args.eval_only:
        return data
    questions = Questions(data, _unlabelled(args, read, world))
    formatter, file = BlockyFormatter.from_dict(read.formatter), teacher_file(args)
    key, digest = world.run_on_main("teacher", lambda: _key(args, formatter, questions, file))
    folder = os.path.join(os.path.dirname(os.path.abspath(data.folder)), key)
    path, record = f"{folder}.answers.npy", teacher_record(formatter.max_num_codes)
    leaders, of_node = world.node_leaders(), world.gather(world.rank - world.local_rank)

    def is_there() -> bool:
        return fault(folder, check=world.give_up_if_asked) is None

    def ask() -> dict[str, list]:
        if _digest(file) != digest:
            raise UserError(
                f"--teacher {args.teacher}: on rank {world.rank} it is not what rank 0 has read, or it has"
                " changed since: give every node the same file, of a run that has ended"
            )
        teacher = Teacher(file, Coder.load(file, world), data.codes, formatter)
        _ask(teacher, questions, path, world)
        return {
            "unknown_codes": teacher.unknown,
            "lacking_codes": teacher.lacking,
            "languages": teacher.coder.languages,
        }

    # the first node, and then those that do not see its folder
    for group in filter(None, (leaders[:1], leaders[1:])):
        there = world.run_on("look for answers", group, is_there)
        lacking = [leader for leader, found in zip(group, there) if not found]
        if not lacking:
            if group == leaders[:1]:
                world.print(f"Teacher: its answers are in {folder}")
            continue
        world.print(f"Teacher: {file}, asked for the texts of {len(questions):,} rows")
        world.run_on("begin answers", lacking, lambda: _begin(path, len(questions), record))
        asking = [  # on a CPU the first process of a node, with a process for each core
            rank
            for rank, leader in enumerate(of_node)
            if leader in lacking and (rank == leader or world.device.type != "cpu")
        ]
        lists = world.run_on("ask the teacher", asking, ask)[0]

        def finish(lists: dict[str, list] = lists) -> None:
            if not is_there():  # or another node has made it
                answers = np.load(path)["answer"]
                report = _report(args, questions, answers, lists)
                build(folder, questions, answers, report, world.give_up_if_asked)
                with contextlib.suppress(OSError):
                    os.remove(path)

        for leader in lacking:
            world.run_on(f"rows with the teacher's answers, rank {leader}", [leader], finish)
    found = PreparedData.open(folder)
    for line in found.report["teacher"]["notes"]:
        world.print(line)
    return found


def _unlabelled(args: JobConfig, read: PrepareSettings, world: World) -> PreparedData | None:
    """The prepared rows of --unlabelled, read as the labelled ones, without codes; None if there are none.
    All ranks. Raises UserError.
    """
    if not args.unlabelled:
        return None
    as_labelled = ("formatter", "input_col", "language", "language_col", "max_len", "delimiter")
    as_labelled += ("clean_text", "encoding", "ditto")
    values = {name: getattr(read, name) for name in as_labelled}
    wanted = PrepareSettings(args.unlabelled, target_cols=[], **values)
    check = world.give_up_if_asked
    folder = world.run_on_main(
        "prepare unlabelled texts",
        lambda: preparing.prepare(wanted, args.save_path, world.print, None, check),
    )
    found = preparing.on_every_node(wanted, args.save_path, folder, world, check, "prepare unlabelled")
    listed = os.path.join(found.folder, "rejected_rows.csv")
    for line in report_lines(found.report):
        world.print(f"  {line.replace('listed in rejected_rows.csv', f'listed in {listed}')}")
    return found


def _digest(file: str) -> str:
    """Of the content of a file of weights, and of what lies beside it and says what they mean."""
    found = hashlib.sha256()
    for path in filter(os.path.isfile, formats.files_of(file)):
        with open(path, "rb") as opened:
            found.update(hashlib.file_digest(opened, "sha256").digest())
    return found.hexdigest()


def _key(args: JobConfig, formatter: BlockyFormatter, questions: Questions, file: str) -> tuple[str, str]:
    """(what names the answers, by the content of all rows and of the teacher's file: hexadecimal, 16 digits;
    digest of the latter). Raises UserError if a run that is resumed had others.
    """
    digest, save_path = _digest(file), args.save_path
    other = questions.unlabelled.fingerprint if questions.unlabelled else ""
    parts = [FORMAT, TEACHER_OUTPUTS, formatter.max_num_codes, questions.data.fingerprint, other, digest]
    key = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()
    if checkpoint.exists_in(save_path) and not args.prepare_only and not args.overwrite:
        position = checkpoint.newest_good(save_path)[1]["position"]
        if position.get("fingerprint", key) != key:
            raise UserError(
                f"{save_path}: holds a run that was started with another --teacher or --unlabelled, with"
                " other data, or by another version of histocc: give it the same files again, choose another"
                " folder, or pass --overwrite"
            )
    return key, digest


def _begin(path: str, number: int, record: np.dtype) -> None:
    """The file of answers, if none of so many is there: `done`, whether those of a place in the order are
    there, and `answer` of each row.
    """
    dtype = np.dtype([("done", "?"), ("answer", record)])
    with contextlib.suppress(OSError, ValueError, EOFError):
        found = np.load(path, mmap_mode="r")
        if found.dtype == dtype and found.shape == (number,):
            return
    with atomic_write(path) as file:
        np.save(file, np.zeros(number, dtype))


def _ask(teacher: Teacher, questions: Questions, path: str, world: World) -> None:
    """Answers what is not answered yet. Those ranks of a node that ask share the work, a CPU's with a process
    for each core.
    """
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
        teacher.coder.check = forked.check if part == 0 else preparing.nothing
        for i, start in enumerate(left):
            if forked.number == 1 or pieces.is_mine(i):
                piece = questions.order[start : start + PIECE]
                answers["answer"][piece] = teacher.answers(*questions.asked(piece))
                answers["done"][start : start + PIECE] = True
                if part == 0:
                    done.at(i + 1)

    try:
        if on_cpu:
            torch.set_num_threads(1)  # the same to the last bit, whatever the number of processes
        with done:
            forked.each(work)
    finally:
        torch.set_num_threads(threads)


def _report(args: JobConfig, questions: Questions, answers: np.ndarray, teacher: dict) -> dict:
    """What the report keeps of a teacher and its answers, plain types; `notes` for people. teacher: of the
    `Teacher`, unknown_codes, lacking_codes and languages.
    """
    labelled, out = len(questions.data.train), questions.left_out
    added = len(questions) - labelled
    unknown = [name for name in questions.languages if name not in teacher["languages"]]
    notes = [
        f"Teacher: answers to {len(questions):,} rows, {labelled:,} of them labelled; it is sure of its codes"
        f" by {answers['prob'].mean(dtype=np.float64):.2f} on average"
    ]
    if out:
        why = ", ".join(f"{count:,} {why}" for why, count in out.items())
        notes.append(f"Unlabelled: {added:,} texts of {added + sum(out.values()):,} rows; left out: {why}")
    for count, what in (
        ((answers["written"][:, 0] < 0).sum(), "rows to which it gives no code that the student has"),
        ((answers["codes"][labelled:, 0] < 0).sum(), "unlabelled texts that its cleaning empties: left out"),
        (len(teacher["unknown_codes"]), "codes that it lacks: their rows learn from true codes alone"),
        (len(teacher["lacking_codes"]), "of its codes are none of the student's: left out of its answers"),
        (len(unknown), f"languages that it does not know, asked as unk: {', '.join(unknown)}"),
    ):
        notes += [f"Note: {count:,} {what}"] * bool(count)
    return {"path": args.teacher, "unknown_codes": teacher["unknown_codes"], "notes": notes}


# ---- its rows


def build(
    folder: str, questions: Questions, answers: np.ndarray, report: dict, check: Callable[[], None]
) -> None:
    """The prepared folder of the student's rows; unlabelled ones without an answer are left out. answers: to
    all rows; report: is kept in the folder's as `teacher`; check: called now and then, may raise to stop.
    """
    data, room = questions.data, answers.dtype["written"].shape[0]

    def widened(codes: np.ndarray) -> np.ndarray:
        """codes int [N, K] with −1 behind, int32 [N, room]."""
        return np.pad(codes, ((0, 0), (0, room - codes.shape[1])), constant_values=-1).astype(ARRAYS["codes"])

    def fill(new: str) -> None:
        for name in KEPT:
            shutil.copyfile(os.path.join(data.folder, name), os.path.join(new, name))
        val, end, begin = widened(data.val.codes), 0, 0
        val.tofile(os.path.join(new, "val.codes"))
        per_row = np.bincount((val >= 0).sum(1), minlength=room + 1)
        with contextlib.ExitStack() as opened:
            files = {
                name: opened.enter_context(open(os.path.join(new, f"train.{name}"), "wb"))
                for name in (*ARRAYS, TEACHER)
            }
            files["offsets"].write(np.zeros(1, ARRAYS["offsets"]).tobytes())
            for rows, all_numbers, names in questions.sets:
                for start in range(0, len(all_numbers), CHUNK):
                    check()
                    numbers = all_numbers[start : start + CHUNK]
                    teacher = answers[begin + start :][: len(numbers)]
                    kept = (rows.codes[numbers][:, 0] >= 0) | (teacher["codes"][:, 0] >= 0)
                    numbers, teacher = numbers[kept], teacher[kept]
                    flat, offsets = rows.texts(numbers)
                    codes = widened(rows.codes[numbers])
                    teacher["labelled"] = codes[:, 0] >= 0
                    codes[~teacher["labelled"]] = teacher["written"][~teacher["labelled"]]
                    per_row += np.bincount((codes >= 0).sum(1), minlength=room + 1)
                    for name, values in {
                        "chars": flat,
                        "offsets": offsets[1:] + end,
                        "language": names[np.asarray(rows.language)[numbers]],
                        "codes": codes,
                        "text_hash": rows.text_hash[numbers],
                        TEACHER: teacher,
                    }.items():
                        files[name].write(values.astype(ARRAYS.get(name, values.dtype)).tobytes())
                    end += int(offsets[-1])
                begin += len(all_numbers)
        counts = {str(n): int(count) for n, count in enumerate(per_row) if count}
        whole = {**data.report, "codes_per_row": counts, "teacher": report}
        whole["train_rows"] = int(per_row.sum()) - len(val)
        with open(os.path.join(new, "data_report.json"), "w", encoding="utf-8") as file:
            json.dump(whole, file, indent=1, ensure_ascii=False)
        alphabet = {*data.alphabet, *(questions.unlabelled.alphabet if questions.unlabelled else ())}
        meta = read_meta(data.folder)
        content = {name: meta[name] for name in meta if name not in ("sizes", "checksums", "checksum")}
        content |= {
            "fingerprint": os.path.basename(folder),
            "languages": questions.languages,
            "alphabet": sorted(alphabet),
            "max_codes": room,
            "report": whole,
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
