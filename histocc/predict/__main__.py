"""Codes a file of descriptions with a trained model:

    python -m histocc.predict --model ./output --input new.csv --column occ1 --language-column lang \\
        --output coded.csv
    torchrun --nproc_per_node=4 -m histocc.predict --model ./output --input new.csv --column occ1 \\
        --language en --output coded.csv

The columns of the input stay, in order; behind them come up to --k codes with their probabilities and, of
HISCO, their titles, how sure the model is of them together, and whether somebody should look. The same
command, given again, continues where it was interrupted.
"""

from histocc.runtime import signals

if __name__ == "__main__":
    signals.start_listening()  # from here on a signal is heard, though importing torch takes seconds

import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from histocc.data.dataset import read_descriptions
from histocc.data.rows import MISSING_WORDS, fill_dittos, key_reader, language_name
from histocc.data.tables import Chunk, column_problems, read_chunks, table_format
from histocc.formatter import hisco_classes, hisco_key
from histocc.predict import explain
from histocc.predict.coder import Coded, Coder
from histocc.predict.config import PredictConfig, get_args_parser
from histocc.predict.output import INPUT, PIECE, CodedFile, Scan, file_hash, fingerprint, save_pipe
from histocc.published import models
from histocc.published.formats import Given
from histocc.runtime import entrypoint
from histocc.runtime.config import deciding
from histocc.runtime.device import Precision
from histocc.runtime.errors import (
    TrainingError,
    UserError,
    in_words,
    is_out_of_memory,
    memory_error_ends_with,
    raise_if_any,
)
from histocc.runtime.files import kind_of, remove_files, run_lock
from histocc.runtime.forked import Forked, choose_processes
from histocc.runtime.log import Stage
from histocc.runtime.world import World
from histocc.text import AS_IS, UNKNOWN_LANGUAGE, text_key


class Coding:
    """What is coded, by which model, where to.

    Args:
        path: the file that is read: the input, or what came out of it if that is a pipe.

    Attributes:
        header: columns of the input.
        words: columns beside each code: name → code → text.
        columns: of the output, behind those of the input.
        max_codes: of a row.
        known: of --known, codes by text and language, see `read_known`.
        min_conf, reach: the conf below which a row needs review; the share of the texts that the confidence
            was fitted on above it.
    """

    def __init__(self, args: PredictConfig, path: str, world: World):
        self.args, self.path, self.world = args, path, world
        self.format = table_format(path, args.delimiter, args.encoding)
        self.header = self.format.names
        self.batches = (0, 1)  # of the part at hand that are done, of how many
        self.stage: Stage | None = None
        self.forked = Forked(1, world.give_up_if_asked)
        precision = Precision("int8", world.device) if args.int8 else Precision.of(args, world.device)
        precision.use()
        key = key_reader(args.key)
        self.coder = coder = Coder.load(
            args.model,
            world,
            given=Given(args.formatter, key, args.target_cols, args.use_within_block_sep, args.system),
            batch_size=args.batch_size,
            precision=precision,
            check=self.between_batches,
            raw_confidence=args.raw_confidence,
            back_off=args.back_off,
        )
        self.weights = models.find_weights(args.model, args.model)
        self.decoder = coder.best_decoder if args.decoder == "auto" else args.decoder
        for decoder in (self.decoder, *(["full"] if args.back_off is not None else [])):
            coder.need(decoder)
            if decoder in ("both", "topk", "full"):
                coder.search()
        self.key = set(coder.codes)
        self.min_conf, self.reach = args.min_prob, 1.0
        if args.target_accuracy is not None:
            self.min_conf, self.reach = coder.confidence.limit(self.decoder, args.target_accuracy)
        self.system = args.system or coder.system
        thresholds = {language and coder.known(language): value for language, value in args.threshold or []}
        self.thresholds = coder.thresholds.with_given(thresholds or None)
        is_hisco = coder.formatter.kind == "hisco"
        if args.classes and not is_hisco:
            raise UserError(
                f"--classes {' '.join(args.classes)}: these are classes of HISCO codes, and the model writes"
                f" {self.system} (formatter {coder.formatter.kind}): leave --classes out"
            )
        titles = ["title"] if is_hisco and not args.no_titles else []
        self.words = {name: hisco_classes()[name] for name in [*titles, *(args.classes or [])]}
        if args.descriptions:
            self.words["desc"] = read_descriptions(args.descriptions, coder.codes, coder.formatter)
        self.known, self.known_notes = read_known(args, self.system, coder) if args.known else ({}, [])
        self.max_codes = min(
            args.k, coder.formatter.max_num_codes if self.decoder == "greedy" else len(coder.codes)
        )
        names = [self.system, "prob", *self.words]
        self.columns = [f"{name}_{i}" for i in range(1, self.max_codes + 1) for name in names]
        if args.back_off is not None:
            self.columns += [f"{self.system}_prefix", "prob_prefix"]
        if args.explain:
            numbers = range(1, explain.SHOWN + 1)
            self.columns += [name for i in numbers for name in (f"similar_text_{i}", f"similar_codes_{i}")]
        self.columns += [*(["source"] if args.known else []), "conf", "needs_review"]

    def problems(self) -> Iterator[str]:
        args, coder = self.args, self.coder
        wanted = [args.column, *([args.language_column] if args.language_column else [])]
        yield from column_problems(args.input, self.header, wanted)
        there = [name for name in self.columns if name in self.header]
        if there:
            yield (
                f"{args.input}: has columns {', '.join(map(repr, there))} already; --system NAME names those"
                " of codes, --no-titles leaves titles out, rename the others"
            )
        if len(set(self.columns)) < len(self.columns):
            yield f"--system {self.system}: its columns would have the names of others; choose another"
        languages = [args.language, *(language for language, _ in args.threshold or [])]
        unknown = [name for name in languages if name and coder.known(name) == UNKNOWN_LANGUAGE != name]
        if unknown:
            yield (
                f"the model does not know the language {', '.join(map(repr, unknown))}; it knows"
                f" {coder.known_for(unknown)}"
            )

    def settings(self) -> dict:
        """All that decides what the output holds."""
        args = self.args
        files = {name: getattr(args, name) for name in ("descriptions", "key", "known")}
        return {
            "input": fingerprint(self.path, self.path != args.input),
            "model": file_hash(self.weights),
            **{name: getattr(args, name) for name in deciding(PredictConfig)},
            "system": self.system,
            "decoder": self.decoder,
            "threshold": args.threshold and list(map(list, args.threshold)),
            "thresholds": str(self.thresholds),
            **{
                name: file_hash(path) if path and os.path.isfile(path) else path
                for name, path in files.items()
            },
        }

    def known_codes(self, text: str, language: str) -> list[str] | None:
        """Those of --known."""
        if not self.known:
            return None
        key = text_key(text)
        return self.known.get((key, language.strip())) or self.known.get((key, ""))

    def key_of(self, text: str, language: str) -> tuple[str, str]:
        """What the model reads of a row: nothing if its codes are known."""
        if self.known_codes(text, language or self.args.language or ""):
            return "", ""
        return self.coder.clean(text), self.coder.known(language) if self.args.language_column else ""

    def code(self, keys: list[tuple[str, str]]) -> list[Coded]:
        args = self.args
        self.batches = (0, -(-len(keys) // args.batch_size))
        languages = [key[1] if args.language_column else args.language or UNKNOWN_LANGUAGE for key in keys]
        return self.coder.code(
            [text for text, _ in keys],
            languages,
            self.decoder,
            args.k,
            self.thresholds.by_language,
            cleaned=True,
        )

    @contextlib.contextmanager
    def progress(self, file: CodedFile, what: str, unit: str, total: int, pieces: int, names: str):
        """Shows what all processes do together, by the files in the folder whose names fit `names`."""

        def done(share: float) -> int:
            ready = sum(re.fullmatch(names, name) is not None for name in os.listdir(file.folder))
            return round(min(1.0, (ready + share) / max(1, pieces)) * total)

        if self.world.is_main and not self.args.non_verbose:
            self.done, self.stage = done, Stage(what, total, unit, done(0.0))
        try:
            yield
        finally:
            if self.stage is not None:
                self.stage.close()
            self.stage = None

    def between_batches(self) -> None:
        self.forked.check()
        if self.stage is not None and self.stage.is_due():
            self.stage.at(self.done(self.batches[0] / self.batches[1]))
        self.batches = (min(self.batches[0] + 1, self.batches[1]), self.batches[1])

    def share(self, work: Callable[[Callable[[int], bool]], None]) -> None:
        """Runs `work` in all processes; what it is given says whether a piece is this process's."""
        pieces = self.forked.pieces()

        def run(process: int) -> None:
            self.stage = None if process else self.stage  # the first shows what all have done
            work(pieces.is_mine)

        self.forked.each(run)

    def code_frequent(self, file: CodedFile, scan: Scan) -> None:
        """What occurs often, as far as it falls to this rank."""

        def work(is_mine: Callable[[int], bool]) -> None:
            for number in range(scan.pieces):
                name = f"frequent{number}.json"
                if is_mine(number) and file.read(name) is None:
                    file.write(name, self.code(scan.frequent[number * PIECE : (number + 1) * PIECE]))

        self.share(work)

    def code_parts(self, file: CodedFile, scan: Scan) -> None:
        """The parts that fall to this rank."""
        frequent = {key: Coded(*answer) for key, answer in file.frequent(scan).items()}
        place = self.header.index(self.args.column)

        def work(is_mine: Callable[[int], bool]) -> None:
            for number, chunks in file.rows(self.path, self.format, scan, place, self.args.ditto):
                self.forked.check()
                if is_mine(number) and not file.is_done(number):
                    self.code_part(file, number, chunks, frequent)

        self.share(work)

    def code_part(self, file: CodedFile, number: int, chunks: list[Chunk], frequent: dict) -> None:
        args, known = self.args, self.coder.known
        columns = [[cell for chunk in chunks for cell in chunk.columns[i]] for i in range(len(self.header))]
        texts = [text for chunk in chunks for text in chunk.texts]
        languages = [args.language or UNKNOWN_LANGUAGE] * len(texts)
        if args.language_column:
            languages = columns[self.header.index(args.language_column)]
        keys = list(map(self.key_of, texts, languages))
        rare = iter(self.code([key for key in keys if key not in frequent]))
        coded = [frequent[key] if key in frequent else next(rare) for key in keys]
        decided = [self.known_codes(text, language) for text, language in zip(texts, languages)]
        coded = [
            answer if codes is None else Coded(codes, [1.0] * len(codes), 1.0, (codes[0], 1.0))
            for answer, codes in zip(coded, decided)
        ]
        new = [self.cells(answer, codes is not None) for answer, codes in zip(coded, decided)]
        dittos = [] if args.ditto else fill_dittos(texts, "", fill=False)
        dittos = [i for i in dittos if decided[i] is None]
        for i in dittos:
            new[i][-1] = 1
        unknown = Counter(
            language.strip()
            for language in languages
            if known(language) == UNKNOWN_LANGUAGE != language_name(language)
        )
        counts = {
            "rows": len(texts),
            "known": sum(codes is not None for codes in decided),
            "empty": sum(not text.strip() and codes is None for (text, _), codes in zip(keys, decided)),
            "no_code": sum(not answer.codes for answer in coded),
            "review": sum(cells[-1] for cells in new),
            "dittos": len(dittos),
            "unknown": unknown.total(),
            "languages": dict(unknown.most_common(1000)),
            "faults": [fault for chunk in chunks for fault in chunk.faults],
        }
        file.write_part(number, [[*row, *cells] for row, cells in zip(zip(*columns), new)], counts)

    def cells(self, coded: Coded, is_known: bool) -> list:
        """Of a row, for `columns`."""
        cells: list = []
        for code, prob in zip(coded.codes[: self.max_codes], coded.probs):
            cells += [code, f"{prob:.6g}", *(words.get(code, "") for words in self.words.values())]
        cells += [""] * (self.max_codes * (2 + len(self.words)) - len(cells))
        if self.args.back_off is not None:
            prefix, prob = coded.prefix or ("", 0.0)
            cells += [prefix, f"{prob:.6g}" if prefix else ""]
        if self.args.explain:
            similar = [cell for pair in coded.similar or [] for cell in pair]
            cells += similar + [""] * (2 * explain.SHOWN - len(similar))
        if self.args.known:
            cells.append("known" if is_known else "model")
        is_sure = coded.codes and coded.conf is not None and coded.conf >= self.min_conf  # not if it is NaN
        is_outside = not self.key.issuperset(coded.codes)  # written digit by digit
        conf = "" if coded.conf is None else f"{coded.conf:.6g}"
        return [*cells, conf, int(not is_known and (not is_sure or is_outside))]

    def start_lines(self, rows: int, resumed: bool) -> list[str]:
        """What is about to be done."""
        args, coder = self.args, self.coder
        texts = f"texts {coder.text_rule}, " if coder.text_rule != AS_IS else ""
        step = f", step {coder.step:,}" if coder.step is not None else ""
        processes = self.world.size * self.forked.number
        where = f"{processes} {'process' if processes == 1 else 'processes'} on {self.world.device.type}"
        lines = [
            f"Coding {rows:,} rows of {args.input} with {self.weights}{step} ({self.decoder},"
            f" {len(coder.codes):,} codes, {texts}{where}){'; resuming what is there' if resumed else ''}"
        ]
        if args.decoder == "auto":
            lines.append(f"Decoder: {self.decoder} ({coder.why_best})")
        lines += [f"Note: {args.input} {note}" for note in self.format.notes] + self.known_notes
        if "lang" in self.header and not (args.language or args.language_column):
            lines.append("Note: all texts count as language unk; --language-column lang reads column 'lang'")
        if args.target_accuracy is not None:
            lines.append(
                f"Rows with conf below {self.min_conf:.3g} get needs_review: of the answers above it"
                f" {args.target_accuracy:.4g} were right, on {self.reach:.1%} of the"
                f" {coder.confidence.texts:,} texts that the confidence was fitted on"
            )
        if self.decoder in ("flat", "both"):
            lines.append(f"Thresholds of the linear decoder: {self.thresholds}")
        return lines

    def end_lines(self, total: Counter, languages: Counter, seconds: float) -> Iterator[str]:
        """What was done and what to look at."""
        args, rows = self.args, total["rows"]
        if not args.non_verbose:
            yield (
                f"{args.output}: {rows:,} rows in {seconds:.1f} s, {rows / max(seconds, 1e-9):,.0f} rows/s;"
                f" {total['review']:,} with needs_review, {total['no_code']:,} of them without a code (empty"
                f" texts: {total['empty']:,})"
                + (f"; {total['known']:,} with known codes" if args.known else "")
            )
        if total["dittos"]:
            yield (
                f"Texts that only repeat the row above (do., ditto): {total['dittos']:,} rows, with"
                " needs_review; --ditto codes them as the text of the row above"
            )
        if total["unknown"]:
            unknown = dict(languages.most_common(10))
            names = ", ".join(f"{name or 'none'} ({count:,})" for name, count in unknown.items())
            yield (
                f"Languages that the model does not know, coded as unk: {total['unknown']:,} rows: {names};"
                f" it knows {self.coder.known_for(unknown)}"
            )


def read_known(
    args: PredictConfig, system: str, coder: Coder
) -> tuple[dict[tuple[str, str], list[str]], list[str]]:
    """(codes of each text, by `text_key` and language; what to tell of them) of --known, a table with the
    columns of the input and those of codes as in training or as they are written here. The language is "" if
    the table or the input has none: the codes are then those of the text in any language. Of several rows of
    a text the last counts.

    Raises:
        UserError: columns are missing, or codes are none of the system's key.
    """
    formatter, path = coder.formatter, args.known or ""
    header = table_format(path).names
    names = [f"{system}_{i}" for i in range(1, formatter.max_num_codes + 1)]
    names = [name for name in formatter.target_cols if name in header] or [
        name for name in names if name in header
    ]
    language = args.language_column or "lang"
    by_language = language in header and bool(args.language_column or args.language)
    if args.column not in header or not names:
        raise UserError(
            f"--known {path}: needs a column {args.column!r} (--column) and one of codes ({system}_1);"
            f" it has {', '.join(map(repr, header))}"
        )
    key = {*coder.codes, *(hisco_key() if formatter.kind == "hisco" else [])}
    known: dict[tuple[str, str], list[str]] = {}
    several: dict[str, None] = {}
    wrong: list[str] = []
    for chunk in read_chunks(path, [args.column, *([language] if by_language else []), *names]):
        wrong += [f"line {line}: {reason}" for line, _, reason in chunk.faults]
        for line, text, *cells in zip(chunk.lines.tolist(), *chunk.columns):
            text_and_language = text_key(text), cells.pop(0).strip() if by_language else ""
            codes = [
                formatter.repair(cell)[0] for cell in cells if cell.strip().casefold() not in MISSING_WORDS
            ]
            codes = list(dict.fromkeys(filter(None, codes)))
            wrong += [f"line {line}: {code!r} is no code of {system}" for code in codes if code not in key]
            if text_and_language[0] and codes:
                if set(known.get(text_and_language, codes)) != set(codes):
                    several[text.strip()] = None
                known[text_and_language] = codes
    raise_if_any(wrong, f"--known {path}", 5)
    notes = [f"{path}: {len(known):,} known texts"]
    if several:
        notes.append(
            f"{path}: {len(several):,} texts have different codes in several rows, of which the last"
            f" counts: {', '.join(map(repr, list(several)[:3]))}{' …' if len(several) > 3 else ''}"
        )
    return known, notes


def run(args: PredictConfig, world: World) -> None:
    """All ranks."""
    smaller = max(1, args.batch_size // 4)
    advice = f" with --batch-size {args.batch_size}: take a smaller one, for example {smaller}"
    with contextlib.ExitStack() as held, memory_error_ends_with(advice):
        try:
            code_file(args, world, held)
        except OSError as error:
            if is_out_of_memory(error):
                raise
            raise TrainingError(
                f"{in_words(error, error.filename or args.output)}. The same command continues",
                said_by_all=True,
            ) from None


def code_file(args: PredictConfig, world: World, held: contextlib.ExitStack) -> None:
    """All ranks. Who waits polls the store, so that no time limit is met. held: of rank 0, by which the
    folder of the parts is its alone.
    """
    started, folder = time.monotonic(), CodedFile(args.output, {}).folder

    def on_all_ranks(name: str, work: Callable[[], Any]) -> Any:
        """What `work` returns here; a user's mistake on one rank ends all."""
        results: list[Any] = []
        world.run_on(name, list(range(world.size)), lambda: results.append(work()))
        return results[0]

    def take_input() -> str:
        """What comes through a pipe is saved beside the parts, since it is read more than once."""
        raise_if_any(list(args.problems()))
        CodedFile(args.output, {}).refuse_others()
        os.makedirs(folder, exist_ok=True)
        held.callback(remove_if_empty, folder)
        held.enter_context(run_lock(folder))
        if kind_of(args.input) != "a pipe":
            return args.input
        path = os.path.join(folder, INPUT)
        held.callback(remove_files, folder, INPUT)
        save_pipe(args.input, path, world.give_up_if_asked, 60 * args.timeout_minutes)
        return path

    path = world.run_on_main("input", take_input)
    coding = on_all_ranks("model", lambda: Coding(args, path, world))

    world.run_on_main("problems", lambda: raise_if_any(list(coding.problems())))
    if args.explain:
        coding.coder.examples = explain.training_examples(coding.coder, coding.weights, world)

    def first_look() -> list:
        file = CodedFile(args.output, coding.settings())
        resumed = file.begin(args.overwrite)
        columns = [args.column, *([args.language_column] if args.language_column else [])]
        try:
            file.scan(path, coding.format, columns, args.ditto, coding.key_of, world.give_up_if_asked)
        except UserError:
            file.clear()
            raise
        return [file.settings, resumed]

    settings, resumed = world.run_on_main("first look", first_look)
    file = CodedFile(args.output, settings)
    scan = on_all_ranks("scan", file.open_scan)
    processes = choose_processes(args.processes, world, max(scan.parts, scan.pieces))
    coding.forked = Forked(processes, world.give_up_if_asked, world.rank, world.size)
    if not args.non_verbose:
        world.print(*coding.start_lines(scan.rows, resumed), sep="\n")
    pieces, often = scan.pieces, len(scan.frequent)
    with coding.progress(file, "coding what occurs often", "texts", often, pieces, r"frequent\d+\.json"):
        on_all_ranks("frequent texts", lambda: coding.code_frequent(file, scan))
    with coding.progress(file, "coding", "rows", scan.rows, scan.parts, r"\d+\.part"):
        on_all_ranks("parts", lambda: coding.code_parts(file, scan))

    def join() -> list:
        if fingerprint(path, path != args.input) != settings["input"]:
            raise UserError(f"{args.input} was changed while it was coded; start over with --overwrite")
        return list(file.join(coding.header + coding.columns, scan, args.overwrite))

    total, languages = world.run_on_main("join", join)
    if world.is_main:
        file.clear()
    for line in coding.end_lines(total, languages, time.monotonic() - started):
        world.print(line)
    if total["faults"]:
        raise TrainingError(
            f"{total['faults']:,} rows of {args.input} could not be read and are not in {args.output};"
            f" {args.output}.rejected.csv lists them by line. All others are there.",
            heard_from_main=True,
        )


def remove_if_empty(folder: str) -> None:
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def main(argv: list[str] | None = None) -> None:
    entrypoint.start(get_args_parser(), run, argv, "; the same command continues.")


if __name__ == "__main__":
    main()
