"""Codes a file of descriptions with a trained model:

    python -m histocc.predict --model ./output --input new.csv --column occ1 --language-column lang \\
        --output coded.csv
    torchrun --nproc_per_node=4 -m histocc.predict --model ./output --input new.csv --column occ1 \\
        --language en --output coded.csv

The columns of the input stay, in order; behind them come up to --k codes with their probabilities, how sure
the model is of them together, and whether somebody should look. The same command,
given again, continues where it was interrupted.
"""

from histocc.runtime import signals

if __name__ == "__main__":
    signals.start_listening()  # from here on a signal is heard, though importing torch takes seconds

import contextlib
import os
import time
from collections import Counter
from functools import partial

from histocc.data.dataset import read_descriptions
from histocc.data.rows import key_reader
from histocc.data.tables import Chunk, column_problems, read_header
from histocc.model import model_io
from histocc.model.published import Given
from histocc.predict.coder import Coded, Coder
from histocc.predict.config import PredictConfig, get_args_parser
from histocc.predict.output import INPUT, CodedFile, Progress, Scan, file_hash, fingerprint, save_pipe
from histocc.runtime import entrypoint
from histocc.runtime.config import deciding
from histocc.runtime.device import Precision
from histocc.runtime.errors import TrainingError, UserError, in_words, is_out_of_memory, raise_if_any
from histocc.runtime.files import kind_of, run_lock
from histocc.runtime.forked import Forked, choose_processes
from histocc.runtime.world import World
from histocc.text import UNKNOWN_LANGUAGE
from histocc.text_rules import AS_IS


class Job:
    """One input on its way to one output. header: of the input; descriptions: code → description, None
    without.
    """

    def __init__(self, args: PredictConfig, world: World):
        self.args, self.world = args, world
        self.header = read_header(args.input, args.delimiter)[0]
        self.progress: Progress | None = None
        self.forked: Forked | None = None  # the processes that share the work
        self.share = (0, 1)  # batches done of the part at hand, and how many there are at most
        name = args.precision or ("int8" if args.int8 else None)
        precision = Precision(name, world.device) if name else Precision.of(args, world.device)
        precision.use()
        key = key_reader(args.key)
        given = Given(args.formatter, key, args.target_cols, args.use_within_block_sep, args.system)
        self.coder = Coder.load(
            args.model,
            world,
            given=given,
            batch_size=args.batch_size,
            precision=precision,
            check=self.between_batches,
            raw_confidence=args.raw_confidence,
            back_off=args.back_off,
        )
        self.weights = model_io.find_weights(args.model, args.model)
        self.step = f", step {self.coder.step:,}" if self.coder.step is not None else ""
        self.key = set(self.coder.codes)
        self.coder.need(args.decoder)
        if args.back_off is not None:
            self.coder.need("full")
        if args.decoder in ("topk", "full") or args.back_off is not None:
            self.coder.search()
        self.least, self.reach = args.min_prob, 1.0
        if args.target_accuracy is not None:
            self.least, self.reach = self.coder.confidence.limit(args.decoder, args.target_accuracy)
        self.system = args.system or self.coder.system
        self.thresholds = self.coder.thresholds.with_given(dict(args.threshold) if args.threshold else None)
        self.descriptions = (
            read_descriptions(args.descriptions, self.coder.codes, self.coder.formatter)
            if args.descriptions
            else None
        )

    def new_columns(self) -> list[str]:
        """Names of what comes behind the columns of the input."""
        names = [
            name
            for i in range(1, self.most + 1)
            for name in (
                f"{self.system}_{i}",
                f"prob_{i}",
                *([f"desc_{i}"] if self.descriptions is not None else []),
            )
        ]
        prefix = [] if self.args.back_off is None else [f"{self.system}_prefix", "prob_prefix"]
        return [*names, *prefix, "conf", "needs_review"]

    @property
    def most(self) -> int:
        """Codes of a row at most."""
        return min(
            self.args.k,
            self.coder.formatter.max_num_codes if self.args.decoder == "greedy" else len(self.coder.codes),
        )

    @property
    def read_columns(self) -> list[str]:
        return [self.args.column, *([self.args.language_column] if self.args.language_column else [])]

    def problems(self) -> list[str]:
        args = self.args
        problems = column_problems(args.asked.input, self.header, self.read_columns)
        there = [name for name in self.new_columns() if name in self.header]
        if there:
            problems.append(
                f"{args.asked.input}: has columns {', '.join(map(repr, there))} already; --system NAME names"
                " those of codes, rename the others"
            )
        if len(set(self.new_columns())) < len(self.new_columns()):
            problems.append(
                f"--system {self.system}: its columns would have the names of others; choose another"
            )
        strange = [
            language
            for language, _ in args.threshold or []
            if language is not None and language not in self.coder.languages
        ]
        if strange:
            problems.append(
                f"--threshold: the model does not know the language {', '.join(strange)}; it knows"
                f" {self.coder.known_for(strange)}"
            )
        if args.language and args.language not in self.coder.languages:
            problems.append(
                f"--language: the model does not know {args.language!r}; it knows"
                f" {self.coder.known_for([args.language])}"
            )
        return problems

    def settings(self) -> dict:
        args = self.args
        return {
            "input": fingerprint(args.input, args.input != args.asked.input),
            "model": file_hash(self.weights),
            "system": self.system,
            **{name: getattr(args, name) for name in deciding(type(args))},
            "threshold": list(map(list, args.threshold)) if args.threshold else None,
            "thresholds": str(self.thresholds),
            **{
                name: file_hash(path) if path and os.path.isfile(path) else path
                for name, path in (("descriptions", args.descriptions), ("key", args.key))
            },
        }

    def languages_of(self, columns: list[list[str]]) -> list[str]:
        if self.args.language_column:
            return columns[self.header.index(self.args.language_column)]
        return [self.args.language or UNKNOWN_LANGUAGE] * len(columns[0])

    def code(self, cleaned: list[str], languages: list[str]) -> list[Coded]:
        self.share = (0, -(-len(cleaned) // self.args.batch_size))
        return self.coder.code(
            cleaned,
            languages,
            self.args.decoder,
            self.args.k,
            self.thresholds.by_language,
            not self.args.no_deduplicate,
            cleaned=True,
        )

    def between_batches(self) -> None:
        self.forked.check() if self.forked is not None else self.world.give_up_if_asked()
        if self.progress is not None:
            self.progress.show(self.share[0] / self.share[1])
            self.share = (min(self.share[0] + 1, self.share[1]), self.share[1])

    def code_frequent(self, file: CodedFile, scan: Scan) -> None:
        """What occurs often, as far as it falls to this rank."""
        assert self.forked is not None
        language, pieces = self.args.language or UNKNOWN_LANGUAGE, self.forked.pieces()

        def code(texts: list[str], languages: list[str]) -> list[Coded]:
            return self.code(texts, languages if self.args.language_column else [language] * len(texts))

        def share(process: int) -> None:
            self.progress = None if process else self.progress  # the first shows what all have done
            file.code_frequent(scan, pieces.is_mine, code)

        self.forked.each(share)

    def code_parts(self, file: CodedFile, scan: Scan) -> None:
        """The parts that fall to this rank."""
        forked = self.forked
        assert forked is not None
        frequent, pieces = file.frequent(scan), forked.pieces()

        def share(process: int) -> None:
            self.progress = None if process else self.progress
            for number, chunks in file.rows(self.args.input, self.args.delimiter, scan):
                forked.check()
                if pieces.is_mine(number) and not file.is_done(number):
                    self.code_part(file, number, chunks, frequent)

        forked.each(share)

    def code_part(self, file: CodedFile, number: int, chunks: list[Chunk], frequent: dict) -> None:
        columns = [[cell for chunk in chunks for cell in chunk.columns[i]] for i in range(len(self.header))]
        texts, languages = columns[self.header.index(self.args.column)], self.languages_of(columns)
        keys = [
            (self.coder.clean(text), self.coder.known(language) if self.args.language_column else "")
            for text, language in zip(texts, languages)
        ]
        rare = [i for i, key in enumerate(keys) if key not in frequent]
        of_rare = iter(self.code([keys[i][0] for i in rare], [languages[i] for i in rare]))
        coded = [frequent[key] if key in frequent else next(of_rare) for key in keys]
        new = [self.cells(found) for found in coded]
        unknown = Counter(
            language.strip() for language in languages if self.coder.known(language) != language.strip()
        )
        noted = {
            "rows": len(texts),
            "empty": sum(not text.strip() for text, _ in keys),
            "no_code": sum(not found.codes for found in coded),
            "outside": sum(not self.key.issuperset(found.codes) for found in coded),
            "review": sum(cells[-1] for cells in new),
            "unknown": unknown.total(),
            "unknown_languages": dict(unknown.most_common(1000)),
            "faults": [list(fault) for chunk in chunks for fault in chunk.faults],
        }
        file.write_part(number, [[*row, *cells] for row, cells in zip(zip(*columns), new)], noted)

    def cells(self, coded: Coded) -> list:
        found = []
        for code, prob in zip(coded.codes[: self.most], coded.probs):
            found += [code, f"{prob:.6g}"] + (
                [self.descriptions.get(code, "")] if self.descriptions is not None else []
            )
        found += [""] * (self.most * (3 if self.descriptions is not None else 2) - len(found))
        if self.args.back_off is not None:
            prefix, prob = coded.prefix or ("", 0.0)
            found += [prefix, f"{prob:.6g}" if prefix else ""]
        sure = coded.codes and coded.conf is not None and coded.conf >= self.least  # NaN is no confidence
        review = int(not sure or not self.key.issuperset(coded.codes))  # written digit by digit
        return [*found, "" if coded.conf is None else f"{coded.conf:.6g}", review]


def run(args: PredictConfig, world: World) -> None:
    """All ranks."""
    with contextlib.ExitStack() as held:
        try:
            code_file(args, world, held)
        except (OSError, RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                raise TrainingError(
                    f"out of memory with --batch-size {args.batch_size}: take a smaller one, for example "
                    f"{max(1, args.batch_size // 4)}",
                    said_by_all=True,
                ) from None
            if not isinstance(error, OSError):
                raise
            raise TrainingError(
                f"{in_words(error, error.filename or args.output)}. The same command continues",
                said_by_all=True,
            ) from None


def code_file(args: PredictConfig, world: World, held: contextlib.ExitStack) -> None:
    """All ranks. Who waits polls the store, so that no time limit is met."""
    here: dict[str, Job] = {}
    started, everyone = time.monotonic(), list(range(world.size))

    args = args.decide()  # its `asked` keeps the name of an input that comes through a pipe
    look = partial(first_look, args, world, held, here)
    settings, before, path = world.run_on_main("first look", look)
    args = args.decide(input=path)
    file = CodedFile(args.output, settings)
    found: dict[str, Scan] = {}

    def ready() -> None:
        if "job" not in here:
            here["job"] = Job(args, world)
        found["scan"] = file.open_scan()

    world.run_on("ready", everyone, ready)
    job, scan = here["job"], found["scan"]
    number = choose_processes(args.processes, world, max(scan.parts, scan.pieces))
    job.forked = Forked(number, world.give_up_if_asked, world.rank, world.size)
    if not args.non_verbose:
        world.print(*start_lines(args, world, scan.rows, job, bool(before)), sep="\n")
    job.progress = progress = Progress(file, world.is_main and not args.non_verbose)
    often = ("coding what occurs often", "texts", len(scan.frequent), scan.pieces)
    progress.begin(*often, lambda name: name.startswith("frequent"))
    world.run_on("frequent texts", everyone, lambda: job.code_frequent(file, scan))
    progress.begin("coding", "rows", scan.rows, scan.parts, lambda name: name.endswith(".csv"))
    world.run_on("parts", everyone, lambda: job.code_parts(file, scan))

    def join() -> dict:
        progress.close()
        if fingerprint(args.input, args.input != args.asked.input) != settings["input"]:
            raise UserError(f"{args.asked.input} was changed while it was coded; start over with --overwrite")
        return file.join(job.header + job.new_columns(), scan.parts, scan.rows, args.overwrite)

    counts = world.run_on_main("join", join)
    if world.is_main:
        remove_parts(file, held)
    say_end(args, world, scan.rows, counts, time.monotonic() - started, job)


def first_look(args: PredictConfig, world: World, held: contextlib.ExitStack, here: dict[str, Job]) -> list:
    """What rank 0 finds before all start: [settings of the output, whether it resumes, the file to read].
    Raises UserError.
    """
    raise_if_any(list(args.problems()))
    CodedFile(args.output, {}).refuse_others()
    with contextlib.ExitStack() as otherwise:
        path = take_input(args, world, held, otherwise)
        locked, args = path != args.input, args.decide(input=path)
        job = here["job"] = Job(args, world)
        raise_if_any(job.problems())
        file = CodedFile(args.output, job.settings())
        os.makedirs(file.folder, exist_ok=True)
        if not locked:
            held.enter_context(run_lock(file.folder))
        before = file.begin(args.overwrite)
        otherwise.pop_all()
    try:
        file.scan(
            args.input,
            args.delimiter,
            job.read_columns,
            job.coder.clean,
            job.coder.known,
            not args.no_deduplicate,
            world.give_up_if_asked,
        )
    except UserError:
        remove_parts(file, held)
        raise
    return [file.settings, before, args.input]


def take_input(
    args: PredictConfig, world: World, held: contextlib.ExitStack, otherwise: contextlib.ExitStack
) -> str:
    """The file to read: what comes through a pipe is saved beside the parts first, since it is read more than
    once, and then their folder is locked. otherwise: removes it where nothing comes of it.
    """
    if kind_of(args.input) != "a pipe":
        return args.input
    folder = CodedFile(args.output, {}).folder
    os.makedirs(folder, exist_ok=True)
    held.enter_context(run_lock(folder))
    path = os.path.join(folder, INPUT)

    def remove() -> None:
        with contextlib.suppress(OSError):
            os.remove(path)
        held.close()
        with contextlib.suppress(OSError):  # the parts of an earlier start
            os.rmdir(folder)

    otherwise.callback(remove)
    save_pipe(args.input, path, world.give_up_if_asked, 60 * args.timeout_minutes)
    return path


def start_lines(args: PredictConfig, world: World, rows: int, job: Job, resumed: bool) -> list[str]:
    """What is about to be done."""
    texts = f"texts {job.coder.text_rule}, " if job.coder.text_rule != AS_IS else ""
    number = world.size * (job.forked.number if job.forked is not None else 1)
    where = f"{number} {'process' if number == 1 else 'processes'} on {world.device.type}"
    lines = [
        f"Coding {rows:,} rows of {args.asked.input} with {job.weights}{job.step} ({args.decoder},"
        f" {len(job.coder.codes):,} codes, {texts}{where}){'; resuming what is there' if resumed else ''}"
    ]
    if args.decoder in ("topk", "full") and job.coder.linear_share:
        lines.append(f"Codes are ranked by both decoders together (linear share {job.coder.linear_share:g})")
    if args.target_accuracy is not None:
        texts = f"{job.coder.confidence.texts:,} texts that the confidence was fitted on"
        lines.append(
            f"Rows with conf below {job.least:.3g} get needs_review: of the answers above it"
            f" {args.target_accuracy:.4g} were right, on {job.reach:.1%} of the {texts}"
            if job.reach
            else f"All rows get needs_review: no answers of this model were right as often as"
            f" --target-accuracy {args.target_accuracy:.4g} asks for, on the {texts}"
        )
    return lines + ([f"Thresholds of the linear decoder: {job.thresholds}"] if args.decoder == "flat" else [])


def remove_parts(file: CodedFile, held: contextlib.ExitStack) -> None:
    file.clear()
    held.close()  # the lock
    with contextlib.suppress(OSError):
        os.rmdir(file.folder)


def say_end(args: PredictConfig, world: World, rows: int, counts: dict, seconds: float, job: Job) -> None:
    """What was done and what to look at. All ranks. Raises TrainingError, exit code 1, where rows could not
    be read.
    """
    if not args.non_verbose:
        world.print(
            f"{args.output}: {rows:,} rows in {seconds:.1f} s, {rows / max(seconds, 1e-9):,.0f} rows/s;"
            f" {counts.get('review', 0):,} with needs_review, {counts.get('no_code', 0):,} of them without a"
            f" code (empty texts: {counts.get('empty', 0):,})"
        )
        if counts.get("outside"):
            world.print(
                f"Rows with a code that is none of the model's {len(job.key):,}: {counts['outside']:,},"
                f" marked in needs_review; {args.decoder} writes digits freely, --decoder topk takes codes of"
                " the key"
            )
    if counts["unknown"]:
        names = ", ".join(
            f"{name or 'none'} ({number:,})" for name, number in counts["unknown_languages"].items()
        )
        world.print(
            f"Languages that the model does not know, coded as unk: {counts['unknown']:,} rows: {names}; it"
            f" knows {job.coder.known_for(counts['unknown_languages'])}"
        )
    if job.descriptions is not None:
        without = sum(code not in job.descriptions for code in job.coder.codes)
        if without:
            world.print(
                f"{args.descriptions}: {without:,} of {len(job.coder.codes):,} codes have no description"
            )
    if counts["faults"]:
        raise TrainingError(
            f"{counts['faults']:,} rows of {args.asked.input} could not be read and are not in {args.output};"
            f" {counts['rejected']} lists them by line. All others are there.",
            heard_from_main=True,
        )


def main(argv: list[str] | None = None) -> None:
    entrypoint.start(get_args_parser(), run, argv, "; the same command continues.")


if __name__ == "__main__":
    main()
