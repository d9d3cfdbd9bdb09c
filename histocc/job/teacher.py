"""A teacher's answers to the training texts of a run and to unlabelled ones: made once, by all processes
together, and kept beside the prepared data.

They are keyed by the content of both and of the teacher's file. Texts are asked in pieces, of which each is a
file, so that work that was interrupted is resumed; what is asked with what is a function of the texts alone,
and a CPU computes it with one thread, so that the answers do not depend on the number of processes.
"""

import contextlib
import gc
import hashlib
import json
import os
import secrets
from dataclasses import replace

import numpy as np
import torch

from histocc.data import prepare as preparing
from histocc.data import taught
from histocc.data.arrays import TEACHER_OUTPUTS, PreparedData, fault, teacher_record
from histocc.data.report import report_lines
from histocc.data.settings import Columns, PrepareSettings, StartsFrom, file_problems
from histocc.formatter import BlockyFormatter
from histocc.job.config import JobConfig
from histocc.model import model_io, published
from histocc.model.teaching import Teacher
from histocc.runtime import checkpoint
from histocc.runtime.device import Precision
from histocc.runtime.errors import UserError
from histocc.runtime.files import TEMPORARY, read_sealed, remove_files, write_sealed
from histocc.runtime.forked import Forked, usable_cores
from histocc.runtime.log import Stage
from histocc.runtime.world import World

FORMAT = 3  # of the answers
PIECE = 2048  # texts
_PIECES = rf"\d{{7}}({TEMPORARY})?|\.seen-[0-9a-f]{{16}}"  # names of files in the folder of answers


def teacher_file(args: JobConfig) -> str:
    """The file of --teacher. Raises UserError."""
    return model_io.find_weights(args.teacher or "", f"--teacher {args.teacher}")


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


def unlabelled_settings(settings: PrepareSettings, files: list[str]) -> PrepareSettings:
    """How the files of --unlabelled are read: as those of the labelled rows, without codes."""
    return replace(
        settings,
        train_files=files,
        val_files=[],
        target_cols=[],
        share_val=None,
        missing_code=None,
        drop_bad_labels=False,
        fixed_codes=None,
        numbered=False,
        number_codes=None,
        first_codes=None,
    )


def starts_from(args: JobConfig) -> StartsFrom:
    """What the data of a student must know of its teacher: its codes are the first of its key. Raises
    UserError.
    """
    _, formatter, state = model_io.load_model(teacher_file(args))
    chars = formatter.to_dict().get("chars")
    return StartsFrom(state["config"]["text"], list(state["key"]), formatter.kind, chars)


def with_teacher(args: JobConfig, read: PrepareSettings, world: World, data: PreparedData) -> PreparedData:
    """The rows of a run that has a teacher: the labelled ones and those of --unlabelled, with its answers;
    `data` as it is where none is asked for. All ranks. Raises UserError.
    """
    if not args.teacher or args.eval_only:
        return data
    unlabelled = _unlabelled(args, read, world)
    questions = taught.Questions(data, unlabelled)
    formatter = BlockyFormatter.from_dict(read.formatter)
    key, digest = world.run_on_main("teacher", lambda: _key(args, formatter, questions))
    folder = os.path.join(_root(data), key)
    leaders = world.node_leaders()
    there = world.run_on(
        "look for answers",
        leaders,
        lambda: fault(folder, check=world.give_up_if_asked) is None,
    )
    if all(there):
        world.print(f"Teacher: its answers are in {folder}")
    else:
        _ask(args, formatter, world, questions, folder, digest)
    found = PreparedData.open(folder)
    for line in _lines(found.report["teacher"]):
        world.print(line)
    return found


def _root(data: PreparedData) -> str:
    return os.path.dirname(os.path.abspath(data.folder))


def _unlabelled(args: JobConfig, read: PrepareSettings, world: World) -> PreparedData | None:
    """The prepared rows of --unlabelled; None where there are none. All ranks. Raises UserError."""
    files = args.unlabelled
    if not files:
        return None
    wanted, save_path = unlabelled_settings(read, files), args.save_path
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
    for path in (file, *(os.path.join(os.path.dirname(file), name) for name in published.BESIDE)):
        if os.path.isfile(path):
            with open(path, "rb") as opened:
                found.update(hashlib.file_digest(opened, "sha256").digest())
        found.update(b"|")
    return found.hexdigest()


def _key(args: JobConfig, formatter: BlockyFormatter, questions: taught.Questions) -> tuple[str, str]:
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


def _ask(
    args: JobConfig,
    formatter: BlockyFormatter,
    world: World,
    questions: taught.Questions,
    folder: str,
    digest: str,
) -> None:
    """Makes the answers and the prepared folder with them. digest: of the teacher that rank 0 has. All
    ranks.
    """
    pieces = folder + ".answers"
    leaders = world.node_leaders()
    askers = leaders if world.device.type == "cpu" else list(range(world.size))
    index, number = _share(world, pieces, askers)
    record, data = teacher_record(formatter.max_num_codes), questions.data

    def ask() -> dict | None:
        file = teacher_file(args)
        loaded = model_io.load_model(file, world.device)
        if _digest(file) != digest:
            raise UserError(
                f"--teacher {args.teacher}: on rank {world.rank} it is not what rank 0 has read,"
                " or it has changed since: give every node the same file, of a run that has ended"
            )
        teacher = Teacher(file, loaded, data.codes, formatter, record)
        if world.is_main:
            size = model_io.size_name(teacher.state["config"])
            world.print(f"Teacher: {teacher.name} ({size}), asked for {len(questions):,} distinct texts")
            for line in teacher.notes(formatter):
                world.print(line)
        _answer_pieces(teacher, questions, pieces, range(index, _number_of(questions), number), world)
        lists = {name: getattr(teacher, name) for name in ("languages", "unknown", "lacking")}
        del loaded, teacher
        gc.collect()
        torch.cuda.empty_cache()
        return lists if world.is_main else None

    lists = world.run_on("ask the teacher", askers, ask)[0]  # of rank 0

    def finish() -> None:
        if fault(folder, contents=False) is None:  # another node, or job, has made it
            return
        answers = read_answers(pieces, _number_of(questions), len(questions), record)
        said = _said(args, questions, answers, lists)
        taught.build(
            os.path.dirname(folder),
            os.path.basename(folder),
            questions,
            answers,
            said,
            world.give_up_if_asked,
        )

    for leader in leaders:  # one after the other: the report is that of the first where they share a folder
        world.run_on(f"rows with the teacher's answers, rank {leader}", [leader], finish)
    if world.rank in leaders:
        with contextlib.suppress(OSError):  # another node has done it, or something else is in the folder
            remove_files(pieces, _PIECES)
            os.rmdir(pieces)


def _number_of(questions: taught.Questions) -> int:
    """Pieces of all questions."""
    return -(-len(questions) // PIECE)


def _share(world: World, pieces: str, askers: list[int]) -> tuple[int, int]:
    """(which part of the pieces this rank answers, of how many): those who see rank 0's folder share the
    work, a node that has a separate one does all of it. All ranks.
    """

    def make() -> str:
        os.makedirs(pieces, exist_ok=True)
        token = f".seen-{secrets.token_hex(8)}"
        with open(os.path.join(pieces, token), "wb"):
            return token

    marker = os.path.join(pieces, world.run_on_main("folder of answers", make))
    node = world.rank - world.local_rank
    where = world.gather(-1 if os.path.exists(marker) else node)
    world.barrier()
    if world.is_main:
        with contextlib.suppress(OSError):
            os.unlink(marker)
    together = [rank for rank in askers if where[rank] == where[world.rank]]
    return (together.index(world.rank) if world.rank in together else 0), max(1, len(together))


def _answer_pieces(
    teacher: Teacher, questions: taught.Questions, folder: str, own: range, world: World
) -> None:
    """Answers the pieces `own` that are not there yet, on a CPU with a process for each core."""
    os.makedirs(folder, exist_ok=True)
    left = [i for i in own if read_piece(folder, i, len(questions), teacher.record) is None]
    if not left:
        return
    on_cpu = world.device.type == "cpu"
    cores = min(usable_cores(), world.local_size * torch.get_num_threads())
    forked = Forked(max(1, min(cores, len(left))) if on_cpu else 1, world.give_up_if_asked)
    mine, threads = forked.pieces(), torch.get_num_threads()
    Precision("float32", world.device).use()
    done = Stage("asking the teacher", len(left), f"pieces of {PIECE:,} texts")

    def work(part: int) -> None:
        # a forked process has the connection to the store in common with its parent, who ends it
        check = forked.check if part == 0 else preparing.nothing
        for i, number in enumerate(left):
            if forked.number > 1 and not mine.is_mine(i):
                continue
            check()
            texts, languages = questions.asked(number * PIECE, (number + 1) * PIECE)
            answers = teacher.answers(texts, languages, check)
            write_sealed(_path(folder, number), answers.tobytes())
            if part == 0:
                done.at(i + 1)

    try:
        if on_cpu:
            torch.set_num_threads(1)  # the same to the last bit, whatever the number of processes
        with done:
            forked.each(work)
    finally:
        torch.set_num_threads(threads)


def _path(folder: str, number: int) -> str:
    return os.path.join(folder, f"{number:07}")


def read_piece(folder: str, number: int, texts: int, record: np.dtype) -> np.ndarray | None:
    """The answers of a piece; None where they are not there as they were written. texts: of all pieces."""
    answers = read_sealed(_path(folder, number))
    rows = min(PIECE, texts - number * PIECE)
    if answers is None or len(answers) != rows * record.itemsize:
        return None
    return np.frombuffer(answers, dtype=record)


def read_answers(folder: str, pieces: int, rows: int, record: np.dtype) -> np.ndarray:
    """All answers, in order of the questions. Raises UserError where a piece is not as it was written."""
    found = np.empty(rows, dtype=record)
    for number in range(pieces):
        piece = read_piece(folder, number, rows, record)
        if piece is None:
            raise UserError(
                f"{_path(folder, number)}: is not as it was written; the same command, given again, asks the"
                " teacher for it again"
            )
        found[number * PIECE : number * PIECE + len(piece)] = piece
    return found


def _said(args: JobConfig, questions: taught.Questions, answers: np.ndarray, lists: dict[str, list]) -> dict:
    """What the report keeps of a teacher and its answers, plain types. lists: languages, unknown and lacking
    of the `Teacher`.
    """
    added, left_out = questions.added
    unlabelled = questions.unlabelled
    unknown = {
        name: count for name, count in questions.languages_asked().items() if name not in lists["languages"]
    }
    return {
        "path": args.teacher,
        "texts": len(questions),
        "labelled_texts": len(questions) - len(added),
        "unlabelled_rows": 0 if unlabelled is None else len(unlabelled.train),
        "unlabelled_texts": len(added),
        "left_out": left_out,
        "unknown_codes": lists["unknown"],
        "unanswered": int((answers["codes"][len(questions) - len(added) :, 0] < 0).sum()),
        "without_code": int((answers["written"][:, 0] < 0).sum()),
        "unknown_languages": unknown,
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
