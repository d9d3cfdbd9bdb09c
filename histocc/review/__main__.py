"""The review of doubtful rows of a coded file by a person:

    histocc review
    histocc review make coded.csv --output sheet.csv --rows 300
    histocc review apply sheet.csv --to coded.csv --output final.csv
    histocc review make coded.csv --output sample.csv --rows 200 --sample
    histocc review report sample.csv --to coded.csv
    histocc review serve texts.csv --key hisco
    histocc review apply decisions.csv --to texts.csv --key hisco --output final.csv --fill
    histocc review agreement ann.csv bo.csv --output differences.csv

The coded file is never changed. With --fill, rows that nobody has decided get codes learned from the
decisions. Without an action, the page begins with the choice of a table, and a button saves its codes.
"""

import codecs
import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import MISSING, dataclass, replace
from itertools import chain, islice
from operator import eq
from typing import Annotated, Any, NoReturn

import numpy as np

from histocc import __version__
from histocc.data.binary import CHUNK
from histocc.data.config import Column, FormatFlags, given_flags, text_columns, text_flags
from histocc.data.descriptions import TitleFlags, read_descriptions
from histocc.data.records import DECIDED, GUESS, KNOWN, MODEL, Record, is_name, nothing
from histocc.data.rows import code_of_cell, csv_text, escape_formula, read_key
from histocc.data.tables import TABLE_NAME, column_problems, files_of, read_chunks, table_format
from histocc.data.written import ENDINGS, ending_of, missing_package, table_writer, write_rows_of
from histocc.figure import is_right, percent, wilson
from histocc.formatter import CLASSES, cut, hisco_classes, hisco_key, levels_of
from histocc.review import serve
from histocc.review.sheet import (
    CHOSEN,
    DECISION,
    ID,
    OFFERED,
    CodedFile,
    Codes,
    Pair,
    Sheets,
    answers_of,
    cell_of,
    formatter_of,
    most_wrong_first,
    pair_of,
    sheet_rows,
)
from histocc.review.start import SUFFIX, Progress, Start
from histocc.runtime.config import AUTO, Count, CountOrZero, Parser, flag, number
from histocc.runtime.errors import TrainingError, UserError, raise_if_any, run_command
from histocc.runtime.files import atomic_write, file_lock, is_same, opened, remove_leftovers
from histocc.runtime.files import problems as output_problems
from histocc.runtime.log import counted
from histocc.text import COLUMN_SEPARATOR

LEVELS = (3, 2, 1)  # compared digits (or parts) of a code, as far as codes have them
LEAST_SURE = 0.5  # guesses below this probability need review
ABOUT = {  # what an action does, and two examples
    "start": (
        "Choose a table in the browser, decide on its texts and save it with codes (the default).",
        *("register.xlsx", "."),
    ),
    "serve": (
        "Decide on the texts of a table in the browser, one after the other.",
        *("coded.csv", "register.csv --key hisco"),
    ),
    "make": (
        "Make a sheet of doubtful or drawn texts, for a spreadsheet.",
        *("coded.csv --output sheet.csv", "coded.csv --output drawn.csv --rows 200 --sample"),
    ),
    "apply": (
        "Write the decisions of sheets, or of the browser, into a new table.",
        *("sheet.csv --to coded.csv --output final.csv",),
        "coded.csv.decisions.csv --to coded.csv --output final.csv --fill",
    ),
    "report": (
        "Measure how accurate a coded table is, from a sheet that make --sample has drawn.",
        *("drawn.csv --to coded.csv", "ann.csv bo.csv --to coded.csv"),
    ),
    "agreement": (
        "Measure how often two people agree.",
        *("ann.csv bo.csv", "ann.csv bo.csv --output differences.csv"),
    ),
}
NEEDS = {"make": ("output",), "apply": ("to", "output"), "report": ("to",)}
NEEDED = {
    "to": "--to CODED.csv, the table that the sheets are about",
    "output": "--output, the file to write",
}
FinalCodes = tuple[list[str], str, str]  # codes, conf, who has decided
Port = Annotated[int, number(int, lambda port: 0 < port < 65_000, "a port from 1 to 64999")]


@dataclass(frozen=True, kw_only=True)
class AgreementFlags(TitleFlags):
    """The flags of review."""

    action: str = ""
    files: list[str] = flag(
        MISSING,
        "table to review; for apply, report and agreement the filled-in sheets",
        metavar="FILE.csv",
        positional=True,
    )
    output: str = flag("", "sheet or coded table to write", metavar="FILE.csv", of="make apply agreement")
    overwrite: bool = flag(False, "replace an output that exists", of="make apply agreement")
    key: str | None = flag(
        None,
        "codes that may be given: key.csv of a run, or the word hisco (default for hisco_1 …)",
        metavar="FILE",
    )


@dataclass(frozen=True, kw_only=True)
class ReviewConfig(AgreementFlags, FormatFlags):
    """The flags of review."""

    usual = (
        *("files", "to", "output", "overwrite", "rows", "sample", "fill", "key", "by", "known", "order"),
        *("training_data", "input_col", "target_cols", "language_col", "language", "weight_col", "port"),
    )
    to: str = flag(
        "", "coded table that the sheets or decisions are about", metavar="CODED.csv", of="apply report"
    )
    rows: Count = flag(300, "most rows of the sheet", of="make")
    sample: bool = flag(False, "draw rows at random, to measure accuracy with review report", of="make")
    seed: CountOrZero = flag(1, "seed of the draw", of="make")
    by: str = flag(
        "person",
        f"name of the person who decides, if the sheet does not say it ({DECIDED})",
        of="serve apply",
        metavar="NAME",
    )
    known: str | None = flag(
        None, "table of texts whose codes are certain; they count as decided", metavar="FILE.csv"
    )
    show: list[Column] | None = flag(None, "further columns to show", metavar="COL", of="serve")
    training_data: str | None = flag(
        None, "table to which the decided texts are appended", metavar="FILE.csv", of="apply"
    )
    fill: bool = flag(False, "give undecided rows codes learned from the decisions", of="apply")
    guesses: str = flag(
        "built-in",
        "first guesses for a HISCO table without codes: of the built-in model, or none (in apply:"
        " for --fill)",
        choices=("built-in", "none"),
        of="start serve apply",
    )
    order: str = flag(
        "learn",
        "which texts come first: learn (those that teach most), rows (as in sheets) or file (as"
        " in the table)",
        choices=serve.ORDERS,
        of="start serve",
    )
    decisions: str = flag(
        "", "file that keeps the decisions (default: FILE.decisions.csv)", metavar="FILE.csv", of="serve"
    )
    port: Port = flag(8765, "port of the page", of="start serve")
    no_browser: bool = flag(False, "do not open a browser", of="start serve")
    weight_col: Column | None = flag(None, "column that says how often each row counts", metavar="COL")
    target_cols: list[Column] | None = flag(
        None,
        "code columns of a table that no model has coded; its codes count as decided and, without"
        " --key, are those that may be given",
        metavar="COL",
    )
    classes: list[str] | None = flag(
        None, f"also give social classes of HISCO codes: {', '.join(CLASSES)}", choices=CLASSES, of="apply"
    )

    def problems(self) -> list[str]:
        """Return the problems of these arguments, a line each."""
        needed = NEEDS.get(self.action, ())
        missing = [name for name in needed if not getattr(self, name)]
        problems = [f"review {self.action} needs {NEEDED[name]}" for name in missing]
        count = 2 if self.action == "agreement" else 1
        if "to" not in needed and len(self.files) != count:
            problems.append(f"review {self.action} takes {['one file', 'two files'][count - 1]}")
        if self.language and self.language_col:
            problems.append("--language and --language-col are mutually exclusive")
        if not is_name(self.by):
            problems.append(f"--by: {self.by!r:.60} is not a valid name of a person")
        names: list[str | None] = [self.weight_col, self.language, self.language_col, self.sheet]
        names += chain.from_iterable(
            filter(None, (self.input_col, self.target_cols, self.show, self.fill_down))
        )
        what = "would be a flag in commands: rename it, without - at its beginning"
        problems += [
            f"{name!r:.200}: {what}" for name in dict.fromkeys(names) if name and name.startswith("-")
        ]
        inputs: dict[str | None, str] = dict.fromkeys(self.files, "an input")
        inputs |= {self.to or None: "the coded file", self.key: "the file of --key"}
        inputs |= {self.descriptions: "the file of --descriptions", self.known: "the file of --known"}
        endings = {"apply": tuple(ENDINGS), "make": (".csv", ".xlsx")}.get(self.action, ())
        problems += output_problems(filter(None, [self.decisions]), inputs, overwrite=True)  # it grows
        problems += output_problems(filter(None, [self.output]), inputs, overwrite=True, endings=endings)
        problems += missing_package(self.output)
        inputs[self.output or None] = "the file of --output"
        return problems + output_problems(filter(None, [self.training_data]), inputs, overwrite=True)


def writable_codes(args: ReviewConfig, coded: CodedFile) -> Codes:
    """Return the codes that may be written, with their titles. Raises UserError."""
    if not coded.key and coded.system != "hisco":
        what = f"add --key FILE, the list of codes of {coded.system} that may be given"
        raise UserError(f"{what}: key.csv, from the folder of the model that coded {coded.path}")
    codes = coded.key or list(hisco_key())
    return Codes(codes, coded.system, titles_of_codes(args, coded, codes))


def titles_of_codes(args: ReviewConfig, coded: CodedFile, codes: list[str]) -> dict[str, str]:
    """Return the titles of codes: from the coded file, or from --descriptions, or from HISCO."""
    return read_descriptions(args.descriptions, codes, coded.formatter) | coded.descriptions


def next_command(args: ReviewConfig, coded: CodedFile, sheet: str) -> list[str]:
    """Return the words of the command that applies a sheet of this file."""
    action = "report" if args.sample else "apply"
    command = ["histocc", "review", action, sheet, "--to", args.files[0]]
    command += [] if args.sample else ["--output", free_output(args.files[0])]
    names = ["key", "descriptions", "by", "known", "training_data", "fill", "guesses", "input_col"]
    names += ["weight_col", "language", "language_col", "delimiter", "encoding", "no_quotes", "sheet"]
    command += given_flags(args, *names, "ditto", "fill_down", "target_cols", "classes")
    if coded.system != "hisco" and not (args.key or args.target_cols):
        command += ["--key", "RUN/key.csv"]
    return command


def free_output(path: str) -> str:
    """Return an unused name next to a table, for the coded table."""
    path = path.rstrip(os.sep)  # a folder of parts may end with one
    stem, ending = TABLE_NAME.sub(r"\1", path), ending_of(path)
    ending = ".xlsx" if re.search(r"\.(xls[mb]?|ods)$", path, re.IGNORECASE) else ending
    outputs = (f"{stem}.final{number or ''}{ending}" for number in range(10_000))
    return next(path for path in outputs if not os.path.lexists(path))


def take_guesses(coded: CodedFile, model: str, report: Progress = nothing) -> None:
    """Give the texts of a HISCO table without codes the most probable codes of a model, to choose from and to
    learn from. In a language that the model does not know, they help a little at first and do no harm later.
    """
    texts = [text for text in coded.texts.values() if not text.decided]
    has_codes = coded.is_coded or any(text.is_given for text in texts)  # other than earlier guesses
    if model != "none" and coded.system == "hisco" and not has_codes:
        from histocc.predict.coder import Coder  # loads torch, which takes seconds
        from histocc.published import built_in

        print(f"{coded.path}: first guesses come from the {model} model", flush=True)
        is_made = built_in.is_made(built_in.path())
        making = f"making the {model} model (once, about a minute)"
        report(f"loading the {model} model" if is_made else making, None)
        coder = Coder.load(model, choices=OFFERED)
        for start in range(0, len(texts), CHUNK):
            report(f"guessing the codes of {counted(len(texts), 'text')}", start / len(texts))
            some = texts[start : start + CHUNK]
            answers = coder.code([text.text for text in some], [text.language for text in some], "flat")
            for text, answer in zip(some, answers):
                text.codes = [code for code, _ in answer.choices]
                text.probs = [f"{prob:.6g}" for _, prob in answer.choices]


def make_sheet(args: ReviewConfig, coded: CodedFile) -> None:
    texts, drawn = list(coded.texts.values()), None
    chosen = most_wrong_first(texts)[: args.rows]
    if args.sample and texts:
        share = np.array([text.rows for text in texts]) / sum(text.rows for text in texts)
        draw = np.random.default_rng(args.seed).choice(len(texts), args.rows, p=share)
        drawn = {texts[i].id: times for i, times in Counter(draw.tolist()).items()}
        chosen = [text for text in texts if text.id in drawn]
    if not chosen:
        raise UserError(f"{coded.path}: has no undecided text")
    codes = coded.key or [code for text in texts for code in text.codes]
    header, *lines = sheet_rows(chosen, titles_of_codes(args, coded, codes), drawn)
    with atomic_write(os.path.realpath(args.output), args.overwrite) as file:
        file.write(codecs.BOM_UTF8 * (ending_of(args.output) == ".csv"))  # Excel needs it
        with table_writer(file, args.output, header, {"rows"}) as write:
            write(lines)
    rows, doubt = sum(text.rows for text in chosen), sum(text.doubt for text in chosen)
    total = sum(text.doubt for text in texts)
    how = f"; the model expects {doubt:,.0f} of these and {total:,.0f} of all to be wrong"
    how = f"; how many of these are wrong is not known: {coded.unfitted}" if coded.unfitted else how
    how = f" in {rows:,.0f} of {counted(coded.rows, 'row')}{how * coded.is_coded}"
    how = f" of {counted(args.rows, 'row')} drawn at random from {coded.rows:,.0f}" if drawn else how
    print(f"{args.output}: {counted(len(chosen), 'text')}{how}")
    ways = "1 to 5 for the code of that number, a code, several of them with & between, none, or skip"
    command = shlex.join(next_command(args, coded, args.output))
    of_run = " (RUN: the folder of the model that coded the file)" * ("RUN/key.csv" in command)
    print(f"Fill in the column decision: {ways}. Then{of_run}:\n  {command}")


def sheet_of_decisions(args: ReviewConfig) -> str | None:
    """Return --sheet if it names a sheet of the decisions, not of the coded table."""

    def sheets(paths: list[str]) -> set[str]:
        how = replace(args, sheet=None, encoding="latin-1").how(())  # any encoding: only names are read
        books = (table_format(part.path, *how).binary for path in paths for part in files_of(path))
        return {each.name for book in books if book for each in book.sheets}

    of_table = sheets([args.to]) if args.sheet else set()
    is_of_table = args.sheet in of_table or of_table and args.sheet not in sheets(args.files)
    return None if is_of_table else args.sheet


def apply_sheets(args: ReviewConfig, coded: CodedFile) -> None:
    sheets = Sheets(args.files, coded, writable_codes(args, coded), sheet_of_decisions(args))
    decided = {pair: list(made.codes) for pair, made in sheets.by_text.items() if made.codes is not None}
    answers = {pair: (text.answer, "", text.decided) for pair, text in coded.known.items() if text.rows}
    answers |= {pair: (codes, "", sheets.by_text[pair].by or args.by) for pair, codes in decided.items()}
    guessed = learned_codes(args, coded, sheets) if args.fill else {}
    beside = [(coded.codes, None), (coded.words, sheets.codes.words)]
    beside += [(places, hisco_classes()[name]) for name, places in coded.classes.items()]
    own = len(coded.header) - len(coded.added)  # number of columns. Other columns stay if some row fills them
    most = max([1, *(len(codes) for codes, *_ in (*answers.values(), *guessed.values()))])
    most = max(most, sum(place < own for place in coded.codes))
    empty = {place for places, _ in beside for place in places[most:] if place >= own}
    kept = [place for place in range(len(coded.header)) if place not in empty]
    header = [coded.header[place] for place in kept]
    if args.training_data:
        training_rows(args.training_data, coded, decided)  # refuses files that cannot be extended
    counts: dict[str, float] = dict.fromkeys(("rows", "changed", "filled", "empty"), 0)

    def final_row(record: Record) -> list[str]:
        text, before, decider = pair_of(record.text, record.language), record.codes, record.decider
        row, times = [*record.cells, *coded.added], record.weight
        counts["empty"] += times * (not text[0])
        was_guess = row[coded.decided].strip() == GUESS  # from an earlier --fill: learned again, or removed
        if record.is_ditto and decider not in ("", answers.get(text, [""])[-1]):
            return row  # somebody has decided only on this row
        if text in answers:
            counts["rows"] += times
            counts["changed"] += times * (answers[text][0] != coded.answer(before, decider))
        elif text in guessed and not decider and (coded.is_coded or was_guess or not before):
            counts["filled"] += times
        elif not (args.fill and was_guess):
            for place, code in zip(coded.classes["title"], before):
                row[place] = row[place] or hisco_classes()["title"].get(code, "")
            return row
        made, answer = sheets.by_text.get(text), answers.get(text) or guessed.get(text, ([], "", ""))
        return answered(row, coded, beside, answer, bool(made and made.unsure))

    with (
        atomic_write(os.path.realpath(args.output), args.overwrite) as file,
        table_writer(file, args.output, header, coded.numbers, coded.types) as write,
    ):
        rows = ([row[place] for place in kept] for row in map(final_row, coded.table))
        while piece := list(islice(rows, CHUNK)):
            write_rows_of(coded.path, piece, write)
        coded.table.list_faults(os.path.realpath(f"{args.output}.rejected.csv"), args.overwrite)
    added = [add_training_rows(args.training_data, coded, decided)] if args.training_data else []
    said = [f"{args.output}: {counts['rows']:,.0f} of {counted(coded.rows, 'row')} decided"]
    said += [f"{counts['changed']:,.0f} of these with other codes"] * coded.is_coded
    said += [f"{counts['filled']:,.0f} guessed ({DECIDED}: {GUESS})"] * args.fill
    said += [f"{counts['empty']:,.0f} without a text"] * (counts["empty"] > 0)
    texts = f"{counted(len(answers), 'text')} decided, {len(sheets.by_text) - len(decided):,} skipped"
    texts += f", {sheets.undecided:,} without a decision" * (sheets.undecided > 0)
    print(f"{', '.join(said)}; {texts}")
    for note in (*sheets.notes, *sheets.unused):
        print(f"Note: {note}")
    for line in added:
        print(line)
    if faults := coded.table.faults:
        what = f"rows of {coded.path} that could not be read and are not in the output: {len(faults):,}"
        raise TrainingError(f"{what}; {args.output}.rejected.csv lists them by line")


def answered(
    row: list[str], coded: CodedFile, beside: list[tuple[list[int], Any]], answer: FinalCodes, is_unsure: bool
) -> list[str]:
    """Return a row with an answer in its columns. beside: places, and the word of each code, None: itself."""
    codes, conf, row[coded.decided] = answer
    for places, of_code in beside:
        values = codes if of_code is None else [of_code.get(code, "") for code in codes]
        for place, value in zip(places, [*values, *[""] * len(places)]):
            row[place] = value
    for place in (*coded.probs, *coded.beside):
        row[place] = ""
    if coded.conf is not None:
        row[coded.conf] = conf
    if coded.source is not None:
        row[coded.source] = KNOWN if is_name(answer[-1]) else MODEL
    if coded.review is not None:
        row[coded.review] = str(int(is_unsure or conf != "" and float(conf) < LEAST_SURE))
    return row


def learned_codes(args: ReviewConfig, coded: CodedFile, sheets: Sheets) -> dict[Pair, FinalCodes]:
    """Return the guess for each undecided text that has one."""
    from histocc.review.learn import Learner  # loads torch, which takes seconds

    take_guesses(coded, args.guesses)
    texts = list(coded.texts.values())
    learner = Learner(texts, sheets.codes.codes)
    place = {pair: i for i, pair in enumerate(coded.texts)}
    guesses = learner.learn({place[pair]: made.codes for pair, made in sheets.by_text.items()})
    return {
        text.pair: (learner.answer(guesses, i)[: len(coded.codes)], f"{guesses.sure[i]:.4f}", GUESS)
        for i, text in enumerate(texts)
        if guesses.taught and guesses.sure[i] > 0
    }


def training_rows(path: str, coded: CodedFile, decided: dict[Pair, list[str]]) -> tuple[str, bytes]:
    """Return (a line for the user, the table with a new row for each decided text that it lacks, or b"" if it
    lacks none). The table need not exist. Raises UserError if it has other columns.
    """
    own = coded.table
    width, language = len(own.texts), [] if own.languages is None else [own.languages]
    texts = [own.names[place] for place in [*own.texts, *language]]
    header, content, known = [*texts, *(coded.header[place] for place in coded.codes)], b"", set()
    if os.path.exists(path):
        names, *form = table_format(path)[:3]
        needed = len(texts) + max(map(len, decided.values()), default=0)
        is_like = names[: len(header)] == header[: len(names)]  # it may have more or fewer columns of codes
        if form != [",", "utf-8-sig"] or not is_like or len(names) < needed:
            what = "it is not a UTF-8 file with commas and the columns"
            raise UserError(f"--training-data {path}: cannot be extended: {what} {','.join(header)}")
        header = names
        before = CodedFile(path, texts[:width], [*texts, None][width], system=coded.system).texts
        known = {text[: 1 + len(language)] for text in before}
        with opened(path) as file:
            content = file.read()
    rows = []
    for pair, codes in decided.items():
        if codes and pair[: 1 + len(language)] not in known:
            text = coded.texts[pair]
            cells = [cell.strip() for cell in text.text.split(COLUMN_SEPARATOR)]
            cells += [""] * (width - len(cells)) + [text.language] * len(language) + codes
            rows.append(cells + [""] * (len(header) - len(cells)))
    content = content or csv_text([header])
    table = content + (b"" if content.endswith(b"\n") else b"\n") + csv_text(rows) if rows else b""
    there = sum(map(bool, decided.values())) - len(rows)
    kept = f"; already there: {counted(there, 'text')}, whose codes stay" if there else ""
    return f"{path}: {counted(len(rows), 'row')} added{kept}", table


def add_training_rows(path: str, coded: CodedFile, decided: dict[Pair, list[str]]) -> str:
    """Add `training_rows` to a table, to which others may add rows, and return a line for the user."""
    with file_lock(real := os.path.realpath(path)):
        remove_leftovers(real)
        added, table = training_rows(path, coded, decided)
        if table:
            with atomic_write(real) as file:
                file.write(table)
    return added


def report_accuracy(args: ReviewConfig, coded: CodedFile) -> None:
    sheets = Sheets(args.files, coded, writable_codes(args, coded), sheet_of_decisions(args))
    for note in (*sheets.notes, *sheets.unused):
        print(f"Note: {note}")
    drawn = right = corrected = 0
    for drawn_text, times in sheets.drawn.items():
        decision, text = sheets.by_text.get(drawn_text), coded.texts[drawn_text]
        if decision is None or decision.codes is None:
            continue
        ranked = coded.alternatives and not text.decided
        was_right = is_right(coded.answer(text.answer, text.decided), decision.codes, ranked)
        drawn += times
        right += times * was_right
        corrected += times * (was_right or drawn_text in sheets.chosen)
    if not drawn:
        what = "chosen texts say nothing about other texts: make a sheet with --sample"
        waits = "has no decisions yet on drawn rows (skip does not count): fill in its column decision"
        raise UserError(f"{' '.join(args.files)}: {waits if sheets.drawn else what}")
    undecided = sum(sheets.drawn.values()) - drawn
    left = f"; drawn rows without a decision, left out: {undecided:,}" if undecided else ""
    found = f"{share(right, drawn)} of its rows with a text are right"
    print(f"{coded.path}: {found}, from {counted(drawn, 'drawn row')}{left}")
    if sheets.chosen:
        print(f"With the decisions on chosen texts: {share(corrected, drawn)}.")


def serve_page(args: ReviewConfig, coded: CodedFile) -> None:
    server = serve.Server(args.port)
    decisions = open_page(server, args, coded)
    said = f"{coded.path}: {counted(len(decisions.texts), 'text')}, {len(decisions.made):,} of them with a"
    said += f" decision in {decisions.path}"
    serve.serve(server, said, not args.no_browser, lambda: say_next(args, coded, decisions.path))


def open_page(
    server: serve.Server, args: ReviewConfig, coded: CodedFile, report: Progress = nothing
) -> serve.Decisions:
    """Show the texts of a table on the page, with a model's first guesses."""
    path = args.decisions or args.files[0] + SUFFIX
    codes = writable_codes(args, coded)  # finds mistakes before the model is made
    take_guesses(coded, args.guesses, report)
    report(f"comparing {counted(len(coded.texts), 'text')}", None)
    flags = getattr(os, "O_NOFOLLOW", 0) if server.start else 0  # writes nothing outside its folder
    decisions = serve.Decisions(coded, codes, path, args.order, flags)
    server.open(decisions, args.by, lambda: save_table(args, coded, decisions))
    return decisions


def choose_table(args: ReviewConfig) -> None:
    """Serve a page on which a table is chosen. The command's flags hold where the page sets none."""
    opened: list[Any] = []

    def open_table(path: str, chosen: dict[str, Any], report: Progress) -> None:
        flags = get_args_parser().checked(chosen, "the start screen")
        spoken = {"language": None, "language_col": None}  # the page sets at most one of these
        table = replace(args, action="serve", files=[path], **spoken | flags)
        raise_if_any(table.problems())
        coded = read_table(table)
        opened[:] = table, coded, open_page(server, table, coded, report).path

    start, server = Start(args, open_table), serve.Server(args.port)
    server.start = start
    said = f"{args.files[0]}: the page lets you choose a table"
    serve.serve(server, said, not args.no_browser, lambda: say_next(*opened) if opened else None)


def save_table(args: ReviewConfig, coded: CodedFile, decisions: serve.Decisions) -> str:
    """Write the coded table next to the input, like `apply --fill`, and return a report. Raises UserError."""
    output, child = free_output(args.files[0]), "from histocc.review import __main__ as it; it.save_given()"
    given = replace(args, action="apply", files=[decisions.path], to=args.files[0], output=output, fill=True)
    done = subprocess.run(  # in JSON a column's name cannot be taken for a flag
        [sys.executable, "-c", child],
        input=json.dumps(given.values() | {"decisions": ""}),
        capture_output=True,
        encoding="utf-8",
        env=os.environ | {"PYTHONIOENCODING": "utf-8"},
    )
    problem = done.stderr.rpartition("error: ")[2].strip() if done.returncode else ""
    if done.returncode and not os.path.exists(output):  # it exists if only some rows were unreadable
        raise UserError(problem or "the command was stopped")
    cited = f"Cite it as: The histocc contributors. histocc (version {__version__})"
    said = sorted(done.stdout.splitlines(), key=lambda line: not line.startswith(f"{output}: "))
    train = train_command(args, coded, output) if decisions.known else ""
    return "Saved: " + "\n".join(filter(None, (*said, problem, train, cited)))


def save_given() -> NoReturn:
    """Write the table that the page saves, with arguments from standard input."""
    sys.exit(run_command(lambda: act(ReviewConfig(**json.load(sys.stdin)))))


def train_command(args: ReviewConfig, coded: CodedFile, table: str) -> str:
    """Return a line with the command to train a model on a table of decided texts."""
    train = ["histocc", "train", table]
    train += ["--formatter", coded.formatter.kind.replace("gpf", AUTO)]
    train += text_flags(text_columns(args.input_col), args)
    own = args.target_cols or [coded.header[coded.codes[0]]] * (coded.system != "hisco")
    train += ["--target-cols", *own] if own else []  # hisco_1 … are found anyway
    return f"To train a model on the decisions:\n  {shlex.join(train)}"


def say_next(args: ReviewConfig, coded: CodedFile, sheet: str) -> None:
    """Print the commands to run after the decisions."""
    command = next_command(replace(args, fill=True), coded, sheet)
    said = "To write the final table (undecided rows get the learned codes)"
    print(f"{said}:\n  {shlex.join(command)}")
    print(train_command(args, coded, command[command.index("--output") + 1]))


def share(part: int, total: int) -> str:
    """Return a share with its 95 % interval."""
    low, high = (percent(bound, "") for bound in wilson(part / total, total))
    return f"{percent(part / total)} (95 % interval {low} to {high})"


def kappa(one: Sequence[Hashable], other: Sequence[Hashable]) -> float:
    """Return Cohen's kappa of two people's answers to the same texts. The answers must vary."""
    agreed = sum(map(eq, one, other)) / len(one)
    mine, theirs = Counter(one), Counter(other)
    by_chance = sum(mine[answer] * theirs[answer] for answer in mine) / len(one) ** 2
    return (agreed - by_chance) / (1 - by_chance)


def report_agreement(args: ReviewConfig) -> None:
    """Report how often two people agree on the same texts and write a sheet of the other texts."""
    if is_same(*args.files):
        what = "is named twice: each person needs a separate file (--decisions)"
        raise UserError(f"{args.files[0]} {what}")
    system, key = key_of_review(args)
    system, key = system or "hisco", key or list(hisco_key())
    codes = Codes(key, system, read_descriptions(args.descriptions, key, formatter_of(system)))
    one, other = (answers_of(path, codes) for path in args.files)
    pairs = [(text, mine, other[pair][1]) for pair, (text, mine) in one.items() if pair in other]
    if not pairs:
        raise UserError(f"{' and '.join(args.files)}: no text has a decision in both (skip does not count)")
    _, firsts, seconds = zip(*pairs)
    print(f"{counted(len(pairs), 'text')} decided in both files, which agree on")
    separator, levels = levels_of(sorted(codes.codes), codes.formatter.within_block_sep, [])
    unit = "part" if separator else "digit"
    for size in (levels[-1], *(level for level in LEVELS if level in levels[:-1])):
        of_first = f"the first {size} {unit}s" if size > 1 else f"the first {unit}"
        what = "all codes" if size == levels[-1] else of_first
        mine, theirs = (
            [frozenset(cut(code, size, separator) for code in answer) for answer in answers]
            for answers in (firsts, seconds)
        )
        constant = [path for path, answers in zip(args.files, (mine, theirs)) if len({*answers}) == 1]
        undefined = f"is not defined, because all answers of {' and '.join(constant)} are the same"
        said = undefined if constant else f"{kappa(mine, theirs):.3f}"
        print(f"  {what}: {share(sum(map(eq, mine, theirs)), len(pairs))}; Cohen's kappa {said}")
    rows = [["text", "language", "first", "words of first", "second", "words of second", DECISION, ID]]
    for text, first, second in pairs:
        if not is_right(first, second):
            cells = [text.text, text.language]
            for answer in (first, second):
                cells += [cell_of(answer), "; ".join(codes.words.get(code, "") for code in answer)]
            rows.append([escape_formula(cell) for cell in (*cells, "", f"{CHOSEN}-{text.id}")])
    if args.output:
        with atomic_write(os.path.realpath(args.output), args.overwrite) as file:
            file.write(codecs.BOM_UTF8 + csv_text(rows))
        print(f"{args.output}: the texts on which they differ, for a third person to decide")


ACTIONS = {"make": make_sheet, "apply": apply_sheets, "report": report_accuracy, "serve": serve_page}


def get_args_parser(action: str = "") -> Parser:
    """Return the parser of an action, or for "" one with the flags of all actions."""
    kind = AgreementFlags if action == "agreement" else ReviewConfig
    return Parser(kind, "python -m histocc.review", *ABOUT.get(action, ("",)), of=action)


def overview_of_actions() -> str:
    """Return the help without an action."""
    prog, lines = get_args_parser().prog, [f"  {name:<11}{what}" for name, (what, *_) in ABOUT.items()]
    first, flags = f"  {prog}\n  {prog} serve coded.csv", f"{prog} ACTION --help describes an action."
    what = "Check and decide codes by hand, in the browser or in sheets."
    return "\n".join(
        [f"usage: {prog} [ACTION] [FILE …] [flags]", "", what, "", first, "", "actions:", *lines, "", flags]
    )


def run(argv: list[str] | None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if {*argv[:1]} & {"-h", "--help", "help"}:
        return print(overview_of_actions())
    if not {*argv[:1]} & {*ABOUT}:
        argv = ["start", *(["."] if not argv or argv[0].startswith("-") else []), *argv]
    given = get_args_parser(argv[0]).parse_args(argv[1:]).values()
    act(ReviewConfig(**given | {"action": argv[0]}))


def act(args: ReviewConfig) -> None:
    raise_if_any(args.problems())
    if args.output and os.path.isdir(os.path.dirname(args.output) or "."):
        remove_leftovers(args.output)
    if args.action == "start":
        return choose_table(args)
    if args.action == "agreement":
        return report_agreement(args)
    ACTIONS[args.action](args, read_table(args))


def key_of_review(args: ReviewConfig) -> tuple[str | None, list[str] | None]:
    """Return the system and the codes of --key or of --target-cols, if given."""
    key = [code for code in read_key(args.key) if code] if args.key else None
    if args.target_cols and not key:
        path, how = args.to or args.files[0], args.how(text_columns(args.input_col))
        raise_if_any(column_problems(path, table_format(path, *how).names, args.target_cols))
        cells = chain(*(chain(*chunk.columns) for chunk in read_chunks(path, args.target_cols, *how)))
        key = sorted({code_of_cell(cell, formatter_of("code")) for cell in {*cells}} - {""})
        if not key:
            raise UserError(f"{path}: the columns {', '.join(args.target_cols)} hold no codes")
    return ("hisco" if set(key) <= set(hisco_key()) else "code") if key else None, key


def read_table(args: ReviewConfig) -> CodedFile:
    """Return the coded file or table. Raises UserError."""
    args = replace(args, sheet=None) if args.to and sheet_of_decisions(args) else args
    path, (system, key) = args.to or args.files[0], key_of_review(args)
    columns = text_columns(args.input_col)
    coded = CodedFile(path, columns, args.language_col, args, system, key)
    if dittos := coded.table.about_dittos():
        print(f"{path}: texts such as {dittos}")
    for line in coded.unread:
        print(line)
    if args.known:
        coded.know(CodedFile(args.known, columns, args.language_col, system=coded.system, key=key))
        print(f"{args.known}: {counted(len(coded.known), 'known text')}")
    return coded


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main())
