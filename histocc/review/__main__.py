"""The review of doubtful rows of a coded file by a person:

    python -m histocc.review make coded.csv --output sheet.csv --rows 300
    python -m histocc.review apply sheet.csv --to coded.csv --output final.csv
    python -m histocc.review make coded.csv --output sample.csv --rows 200 --sample
    python -m histocc.review report sample.csv --to coded.csv
    python -m histocc.review serve texts.csv --key hisco
    python -m histocc.review apply decisions.csv --to texts.csv --key hisco --output final.csv --fill
    python -m histocc.review agreement ann.csv bo.csv --output differences.csv

A sheet has a line for each text, with its most probable codes and an empty column `decision`, for a
spreadsheet. `apply` writes a new file with the decisions in all rows of their texts; the coded file is never
changed. `report` says how accurate a file is, from rows that were drawn at random. `serve` shows the texts in
a browser, and appends each decision to a sheet. With --fill, rows that nobody has decided get codes that are
learned from the decisions. `agreement` says how often two people agree who have decided on the same texts.
"""

import codecs
import os
import shlex
import sys
from collections import Counter
from dataclasses import MISSING, dataclass, replace
from itertools import islice
from typing import Annotated

import numpy as np

from histocc.data.binary import CHUNK, ENDINGS, ending_of, missing_package, table_writer
from histocc.data.config import AUTO, Column, Format, text_columns
from histocc.data.descriptions import CODE_COLUMNS, TEXT_COLUMNS, read_descriptions
from histocc.data.records import DECIDED, GUESS, Record, is_undecided
from histocc.data.rows import csv_text, read_key
from histocc.data.tables import TABLE_NAME, table_format
from histocc.formatter import hisco_classes, hisco_key
from histocc.review import serve
from histocc.review.agreement import compare, share
from histocc.review.sheet import (
    MAX_CODES,
    CodedFile,
    CodedText,
    Codes,
    Key,
    Sheets,
    formatter_of,
    key_of,
    most_wrong_first,
    sheet_rows,
)
from histocc.runtime.config import Count, CountOrZero, Parser, flag, number
from histocc.runtime.errors import UserError, raise_if_any, run_command
from histocc.runtime.files import atomic_write, file_lock, opened, remove_leftovers
from histocc.runtime.files import problems as output_problems
from histocc.text import COLUMN_SEPARATOR

LEAST_SURE = 0.5  # guesses that are less likely right need a review
NEEDED = {"make": ("output",), "apply": ("to", "output"), "report": ("to",), "serve": (), "agreement": ()}
Port = Annotated[int, number(int, lambda port: 0 < port < 65_000, "a port, 1 … 64999")]


@dataclass(frozen=True, kw_only=True)
class ReviewConfig(Format):
    """The flags of review."""

    action: str = flag(MISSING, "what to do, see above", choices=tuple(NEEDED), positional=True)
    files: list[str] = flag(
        MISSING,
        "make and serve: the coded file; apply and report: sheets; agreement: sheets of two people",
        metavar="FILE",
        positional=True,
    )
    to: str = flag("", "apply and report: the coded file that the sheets were made of", metavar="CODED.csv")
    output: str = flag(
        "", "make: the sheet; apply: the final file; agreement: a sheet of what differs", metavar="FILE.csv"
    )
    overwrite: bool = flag(False, "replace an output that exists")
    rows: Count = flag(300, "make: lines of the sheet at most")
    sample: bool = flag(False, "make: rows drawn at random, for report, not those most likely to be wrong")
    seed: CountOrZero = flag(1, "seed of the draw")
    key: str | None = flag(
        None, "codes that may be written: key.csv of a run, or hisco (default for hisco_1 …)", metavar="FILE"
    )
    descriptions: str | None = flag(
        None, f"codes ({', '.join(CODE_COLUMNS)}) and titles ({', '.join(TEXT_COLUMNS)})", metavar="FILE"
    )
    by: str = flag("person", f"serve: who decides; apply: who has, if sheets do not say it ({DECIDED})")
    known: str | None = flag(None, "texts with their codes, which count as decided", metavar="FILE")
    show: list[Column] | None = flag(None, "serve: further columns to show for each text", metavar="COL")
    training_data: str | None = flag(None, "apply: append texts and decided codes to it", metavar="FILE.csv")
    fill: bool = flag(False, "apply: give undecided rows codes that are learned from the decisions")
    guesses: str = flag(
        "built-in",
        "serve, apply --fill: first guesses for a HISCO table without codes",
        choices=("built-in", "none"),
    )
    order: str = flag(
        "learn", "serve: first what teaches most; as in sheets; or as in the file", choices=serve.ORDERS
    )
    decisions: str = flag("", "serve: sheet of decisions (default: FILE.decisions.csv)", metavar="FILE.csv")
    port: Port = flag(8765, "serve: port of the page")
    no_browser: bool = flag(False, "serve: do not open a browser")
    input_col: list[Column] | None = flag(
        None, "columns with the descriptions (default: occ1), as for predict", "--column", metavar="COL"
    )
    weight_col: Column | None = flag(None, "column that says how often each row counts", metavar="COL")
    language_col: Column | None = flag(None, "column with the languages (default: lang)", "--language-column")

    def problems(self) -> list[str]:
        """Return the problems of these arguments, a line each."""
        needed = NEEDED[self.action]
        problems = [f"review {self.action} needs --{name}" for name in needed if not getattr(self, name)]
        count = 2 if self.action == "agreement" else 1
        if "to" not in needed and (self.to or len(self.files) != count):
            problems.append(f"review {self.action} takes {['one file', 'two files'][count - 1]}, and no --to")
        if is_undecided(self.by):
            problems.append(f"--by: {self.by!r} is not the name of somebody who decides")
        inputs: dict[str | None, str] = dict.fromkeys(self.files, "an input")
        inputs |= {self.to or None: "the coded file", self.key: "the file of --key"}
        inputs |= {self.descriptions: "the file of --descriptions", self.known: "the file of --known"}
        endings = {"apply": tuple(ENDINGS), "make": (".csv", ".xlsx")}.get(self.action, ())
        problems += output_problems(filter(None, [self.decisions]), inputs, overwrite=True)  # it grows
        problems += output_problems(filter(None, [self.output]), inputs, overwrite=True, endings=endings)
        problems += missing_package(self.output)
        inputs[self.output or None] = "the file of --output"
        return problems + output_problems(filter(None, [self.training_data]), inputs, overwrite=True)


def codes_of_key(args: ReviewConfig, coded: CodedFile, key: list[str] | None) -> Codes:
    """Return the codes that may be written, with their titles. Raises UserError."""
    if key is None and coded.system != "hisco":
        what = f"add --key FILE, which lists the codes of {coded.system} that may be written"
        raise UserError(f"{what}: key.csv, in the folder of the model that has coded {coded.path}")
    codes = key or list(hisco_key())
    words = read_descriptions(args.descriptions, codes, coded.formatter) | coded.descriptions
    return Codes(codes, coded.system, words)


def next_command(args: ReviewConfig, coded: CodedFile, sheet: str) -> str:
    """Return the shell command that takes a sheet of this file."""
    action = "report" if args.sample else "apply"
    command = ["python", "-m", "histocc.review", action, sheet, "--to", args.files[0]]
    stem, ending = TABLE_NAME.sub(r"\1", args.files[0]), ending_of(args.files[0])
    outputs = (f"{stem}.final{number or ''}{ending}" for number in range(1000))
    command += [] if args.sample else ["--output", next(path for path in outputs if not os.path.exists(path))]
    columns = "input_col", "weight_col", "language_col", "delimiter", "encoding", "no_quotes", "sheet"
    columns += "ditto", "fill_down"
    for name in ("key", "descriptions", "by", "known", "training_data", "fill", "guesses", *columns):
        if (value := getattr(args, name)) != getattr(ReviewConfig, name):
            values = value if isinstance(value, list) else [value] * (value is not True)
            command += [f"--{name.replace('_', '-')}", *values]
    if coded.system != "hisco" and not args.key:
        command += ["--key", "RUN/key.csv"]
    return shlex.join(command)


def take_guesses(coded: CodedFile, model: str) -> None:
    """Give the texts of a HISCO table without codes the choices of a model. Their language does not matter:
    guesses for one that the model does not have help a little at first, and do no harm later.
    """
    texts = [text for text in coded.texts.values() if not text.decided]
    if model != "none" and coded.system == "hisco" and not any(text.codes for text in texts):
        said = f"first guesses are those of the {model} model; --guesses none leaves them out"
        print(f"{coded.path}: {said}", flush=True)
        give_choices(texts, model)


def give_choices(texts: list[CodedText], model: str) -> None:
    """Give texts the most probable codes by a model, to choose from and to learn from."""
    from histocc.predict.coder import Coder  # loads torch, which takes seconds

    coder = Coder.load(model, choices=MAX_CODES)
    answers = coder.code([text.text for text in texts], [text.language for text in texts], "flat")
    for text, answer in zip(texts, answers):
        text.codes = [code for code, _ in answer.choices]
        text.probs = [f"{prob:.6g}" for _, prob in answer.choices]


def make_sheet(args: ReviewConfig, coded: CodedFile, key: list[str] | None) -> None:
    texts, drawn = list(coded.texts.values()), None
    chosen = most_wrong_first(texts)[: args.rows]
    if args.sample and texts:
        share = np.array([text.rows for text in texts]) / sum(text.rows for text in texts)
        draw = np.random.default_rng(args.seed).choice(len(texts), args.rows, p=share)
        drawn = {texts[i].id: times for i, times in Counter(draw.tolist()).items()}
        chosen = [text for text in texts if text.id in drawn]
    if not chosen:
        raise UserError(f"{coded.path}: has no undecided text")
    codes = key or [code for text in texts for code in text.codes]
    words = read_descriptions(args.descriptions, codes, coded.formatter) | coded.descriptions
    header, *lines = sheet_rows(chosen, words, drawn)
    with atomic_write(os.path.realpath(args.output), args.overwrite) as file:
        file.write(codecs.BOM_UTF8 * (ending_of(args.output) == ".csv"))  # Excel needs it
        with table_writer(file, args.output, header, {"rows"}, csv_text) as write:
            write(lines)
    rows, doubt = sum(text.rows for text in chosen), sum(text.doubt for text in chosen)
    total = sum(text.doubt for text in texts)
    how = f"; the model expects {doubt:,.0f} of these and {total:,.0f} of all to be wrong"
    how = f"; it is not known how many of these are wrong: {coded.unfitted}" if coded.unfitted else how
    how = f": {args.rows:,} rows drawn at random" if drawn else how * coded.is_coded
    print(f"{args.output}: {len(chosen):,} texts, which stand in {rows:,.0f} of {coded.rows:,.0f} rows{how}")
    ways = "1 to 5 for the code of that number, a code, several of them with & between, none, or skip"
    command = next_command(args, coded, args.output)
    of_run = " (RUN: the folder of the model that has coded the file)" * ("RUN/key.csv" in command)
    print(f"Fill in the column decision: {ways}. Then{of_run}:\n  {command}")


def apply_sheets(args: ReviewConfig, coded: CodedFile, key: list[str] | None) -> None:
    sheets = Sheets(args.files, coded, codes_of_key(args, coded, key))
    decided = {key: list(made.codes) for key, made in sheets.by_text.items() if made.codes is not None}
    answers = {key: (text.answer, "", text.decided) for key, text in coded.known.items() if text.rows}
    answers |= {key: (codes, "", sheets.by_text[key].by or args.by) for key, codes in decided.items()}
    guessed = learned_codes(args, coded, sheets) if args.fill else {}
    beside = [(coded.codes, None), (coded.words, sheets.codes.words)]
    beside += [(places, hisco_classes()[name]) for name, places in coded.classes.items()]
    own = len(coded.header) - len(coded.added)  # columns; of the others those stay that some row fills
    most = max([1, *(len(codes) for codes, *_ in (*answers.values(), *guessed.values()))])
    most = max(most, sum(place < own for place in coded.codes))
    empty = {place for places, _ in beside for place in places[most:] if place >= own}
    kept = [place for place in range(len(coded.header)) if place not in empty]
    header = [coded.header[place] for place in kept]
    if args.training_data:
        training_rows(args.training_data, coded, decided)  # refuses a file that nothing can be added to
    counts: dict[str, float] = dict.fromkeys(("rows", "changed", "filled"), 0)

    def final_row(record: Record) -> list[str]:
        text, before, decider = key_of(record.text, record.language), record.codes, record.decider
        row, times = [*record.cells, *coded.added], record.weight
        if record.is_ditto and decider not in ("", answers.get(text, [""])[-1]):
            return row  # somebody else has decided on it alone
        if text in answers:
            counts["rows"] += times
            counts["changed"] += times * (answers[text][0] != coded.answer(before, decider))
        elif text in guessed and not decider and (coded.is_coded or not before):
            counts["filled"] += times
        else:
            for place, code in zip(coded.classes["title"], before):
                row[place] = row[place] or hisco_classes()["title"].get(code, "")
            return row
        codes, conf, row[coded.decided] = answers.get(text) or guessed[text]
        for places, of_code in beside:
            values = codes if of_code is None else [of_code.get(code, "") for code in codes]
            for place, value in zip(places, [*values, *[""] * len(places)]):
                row[place] = value
        for place in (*coded.probs, *coded.beside):
            row[place] = ""
        if coded.conf is not None:
            row[coded.conf] = conf
        if coded.review is not None:
            row[coded.review] = str(int(conf != "" and float(conf) < LEAST_SURE))
        return row

    with (
        atomic_write(os.path.realpath(args.output), args.overwrite) as file,
        table_writer(file, args.output, header, coded.numbers, csv_text, coded.types) as write,
    ):
        rows = ([row[place] for place in kept] for row in map(final_row, coded.table))
        while piece := list(islice(rows, CHUNK)):
            try:
                write(piece)
            except ValueError as error:
                raise UserError(f"{coded.path}: {error}; a .csv output keeps such cells") from None
    if args.training_data:
        with file_lock(path := os.path.realpath(args.training_data)):
            remove_leftovers(path)
            added, table = training_rows(args.training_data, coded, decided)  # of other people, too, by now
            if table:
                with atomic_write(path) as file:
                    file.write(table)
    for note in sheets.notes:
        print(f"Note: {note}")
    skipped = len(sheets.by_text) - len(decided)
    print(
        f"{args.output}: {len(answers):,} texts decided, in {counts['rows']:,.0f} of {coded.rows:,.0f} rows,"
        f" {counts['changed']:,.0f} of which get other codes; {skipped:,} skipped,"
        f" {sheets.undecided:,} without a decision"
    )
    if args.fill:
        said = f"{counts['filled']:,.0f} rows get codes that are learned from the decisions"
        print(f"{said}: {DECIDED} is {GUESS} there." if decided else f"{said}, of which there are none yet.")
    if args.training_data:
        print(added)


def learned_codes(
    args: ReviewConfig, coded: CodedFile, sheets: Sheets
) -> dict[Key, tuple[list[str], str, str]]:
    """Return (codes, conf, GUESS) of each text that is neither decided nor without a guess."""
    from histocc.review.learn import Learner  # loads torch, which takes seconds

    take_guesses(coded, args.guesses)
    texts = list(coded.texts.values())
    learner = Learner(texts, sheets.codes.codes)
    place = {key: i for i, key in enumerate(coded.texts)}
    guesses = learner.learn({place[key]: made.codes for key, made in sheets.by_text.items()})
    return {
        text.key: (learner.answer(guesses, i)[: len(coded.codes)], f"{guesses.sure[i]:.4f}", GUESS)
        for i, text in enumerate(texts)
        if guesses.taught and guesses.sure[i] > 0
    }


def training_rows(path: str, coded: CodedFile, decided: dict[Key, list[str]]) -> tuple[str, bytes]:
    """Return (a line for the user, the table with a new row for each text with codes that it lacks; b"" if it
    lacks none). The table need not exist. Raises UserError if it has other columns.
    """
    width, language = len(coded.input_cols), [] if coded.language is None else [coded.language]
    texts = [coded.table.names[place] for place in [*coded.input_cols, *language]]
    header, content, known = [*texts, *(coded.header[place] for place in coded.codes)], b"", set()
    if os.path.exists(path):
        if table_format(path)[:3] != (header, ",", "utf-8-sig"):
            what = f"nothing can be added to it: it is not in UTF-8 with the columns {','.join(header)}"
            raise UserError(f"--training-data {path}: {what}")
        known = CodedFile(path, texts[:width], [*texts, None][width], system=coded.system).texts
        with opened(path) as file:
            content = file.read()
    rows = []
    for key, codes in decided.items():
        if codes and key not in known:
            text = coded.texts[key]
            cells = [cell.strip() for cell in text.text.split(COLUMN_SEPARATOR)]
            cells += [""] * (width - len(cells)) + [text.language] * len(language) + codes
            rows.append(cells + [""] * (len(header) - len(cells)))
    content = content or csv_text([header])
    table = content + (b"" if content.endswith(b"\n") else b"\n") + csv_text(rows) if rows else b""
    there = sum(map(bool, decided.values())) - len(rows)
    kept = f"; {there:,} texts are already there and keep their codes" if there else ""
    return f"{path}: {len(rows):,} rows added{kept}", table


def report_accuracy(args: ReviewConfig, coded: CodedFile, key: list[str] | None) -> None:
    sheets = Sheets(args.files, coded, codes_of_key(args, coded, key))
    for note in sheets.notes:
        print(f"Note: {note}")
    drawn = right = corrected = 0
    for drawn_text, times in sheets.drawn.items():
        decision, text = sheets.by_text.get(drawn_text), coded.texts[drawn_text]
        if decision is None or decision.codes is None:
            continue
        answer, true = set(coded.answer(text.answer, text.decided)), set(decision.codes)
        # a ranking is right if its best code is one of the right ones
        is_right = answer == true or coded.alternatives and not text.decided and bool(answer & true)
        drawn += times
        right += times * is_right
        corrected += times * (is_right or drawn_text in sheets.chosen)
    if not drawn:
        what = f"{' '.join(args.files)}: no rows that were drawn have a decision other than skip"
        raise UserError(f"{what}; chosen texts say nothing about the others: make a sheet with --sample")
    undecided = sum(sheets.drawn.values()) - drawn
    left = f"; {undecided:,} drawn rows have no decision and are left out" if undecided else ""
    found = f"{share(right, drawn)} of its rows with a text are right, by {drawn:,} drawn rows{left}"
    print(f"{coded.path}: {found}")
    if sheets.chosen:
        print(f"With the decisions on texts that were chosen: {share(corrected, drawn)}.")


def serve_page(args: ReviewConfig, coded: CodedFile, key: list[str] | None) -> None:
    path = args.decisions or f"{args.files[0]}.decisions.csv"
    codes = codes_of_key(args, coded, key)  # mistakes are found before the model is made
    take_guesses(coded, args.guesses)
    decisions = serve.Decisions(coded, codes, path, args.order)
    serve.serve(decisions, args.port, args.by, not args.no_browser)
    training = args.training_data or f"{args.files[0]}.training.csv"
    command = next_command(replace(args, fill=True, training_data=training), coded, path)
    print(f"Then, with codes for all rows, of which undecided ones have learned codes:\n  {command}")
    train = ["python", "finetune.py", "--dataset", training]
    train += ["--formatter", coded.formatter.kind.replace("gpf", AUTO)]
    train += ["--input-col", *(coded.table.names[place] for place in coded.input_cols)]
    train += ["--target-cols", *(coded.header[place] for place in coded.codes)]
    train += [] if coded.language is None else ["--language-col", coded.table.names[coded.language]]
    print(f"A model is trained on the decisions by\n  {shlex.join(train)}")


def report_agreement(args: ReviewConfig, system: str, key: list[str] | None) -> None:
    key = key or list(hisco_key())
    words = read_descriptions(args.descriptions, key, formatter_of(system))
    lines, sheet = compare(args.files, Codes(key, system, words))
    print("\n".join(lines))
    if args.output:
        with atomic_write(os.path.realpath(args.output), args.overwrite) as file:
            file.write(sheet)
        print(f"{args.output}: the texts on which they differ; a third person fills in the column decision")


ACTIONS = {"make": make_sheet, "apply": apply_sheets, "report": report_accuracy, "serve": serve_page}


def get_args_parser() -> Parser:
    what = "make: a sheet of the doubtful texts of a coded file; apply: the decisions of sheets to the file;"
    what += " report: how accurate the file is, by a sheet of --sample; serve: a page in the browser;"
    what += " agreement: how often two people agree."
    return Parser(ReviewConfig, "python -m histocc.review", what)


def run(argv: list[str] | None) -> None:
    args = get_args_parser().parse_args(argv)
    raise_if_any(args.problems())
    if args.output and os.path.isdir(os.path.dirname(args.output) or "."):
        remove_leftovers(args.output)
    key = [code for code in read_key(args.key) if code] if args.key else None
    system = ("hisco" if set(key) <= set(hisco_key()) else "code") if key else None
    if args.action == "agreement":
        return report_agreement(args, system or "hisco", key)
    path = args.to or args.files[0]
    columns, codes = text_columns(args.input_col), set(key or ())
    coded = CodedFile(path, columns, args.language_col, args, system, codes)
    if dittos := coded.table.about_dittos():
        print(f"{path}: texts such as {dittos}")
    if args.known:
        coded.know(CodedFile(args.known, columns, args.language_col, system=coded.system, key=codes))
        print(f"{args.known}: {len(coded.known):,} known texts")
    ACTIONS[args.action](args, coded, key)


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main())
