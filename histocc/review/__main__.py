"""Doubtful rows of a coded file to a person and back:

    python -m histocc.review make coded.csv --output sheet.csv --rows 300
    python -m histocc.review apply sheet.csv --to coded.csv --output final.csv
    python -m histocc.review make coded.csv --output sample.csv --rows 200 --sample
    python -m histocc.review report sample.csv --to coded.csv --now final.csv

A sheet has a line for each text, with its most probable codes and an empty column `decision`, for a
spreadsheet. `apply` writes a new file with the decisions in all rows of their texts; the coded file is never
changed. `report` says how accurate a file is, from rows that were drawn at random.
"""

import os
import sys
from collections import Counter
from dataclasses import MISSING, dataclass

from histocc.data.config import Delimiter
from histocc.data.dataset import CODE_COLUMNS, TEXT_COLUMNS
from histocc.data.rows import read_columns, read_key
from histocc.data.tables import read_header
from histocc.formatter import hisco_classes, hisco_key, make_formatter
from histocc.predict.output import csv_text
from histocc.review.coded import DECIDED, MODEL, CodedFile, Key, Layout
from histocc.review.estimate import Estimate, Quarter, drawn_texts
from histocc.review.sheet import Codes, Decision, Drawn, Sheets, sheet_text
from histocc.review.training_rows import TrainingRows
from histocc.runtime.config import Config, Count, CountOrZero, Parser, flag, flag_of
from histocc.runtime.entrypoint import run_command
from histocc.runtime.errors import UserError, raise_if_any
from histocc.runtime.files import atomic_write
from histocc.runtime.files import problems as output_problems

# Which flags belong to which action; the others are for all.
FLAGS = {
    "make": ("output", "rows", "sample", "seed", "bom", "descriptions", "overwrite"),
    "apply": ("to", "output", "key", "by", "training_data", "descriptions", "overwrite"),
    "report": ("to", "now", "key"),
}
NEEDED = {"make": ("output",), "apply": ("to", "output"), "report": ("to",)}


@dataclass(frozen=True, kw_only=True)
class Make(Config):
    """make"""

    rows: Count = flag(300, "lines of the sheet at most")
    sample: bool = flag(
        False,
        "rows drawn at random, as many from each quarter of the file by confidence, for `report`; without it"
        " the texts in whose rows most mistakes are expected",
    )
    seed: CountOrZero = flag(1, "of the draw")
    bom: bool = flag(False, "begin the sheet with a byte order mark, for older versions of Excel")
    descriptions: str | None = flag(
        None,
        f"codes ({', '.join(CODE_COLUMNS)}) and their descriptions ({', '.join(TEXT_COLUMNS)}), where the"
        " coded file has none",
        metavar="FILE",
    )


@dataclass(frozen=True, kw_only=True)
class ApplyAndReport(Config):
    """apply and report"""

    key: str | None = flag(
        None,
        "codes that may be written, such as key.csv of a run (default: the HISCO key, for columns hisco_1 and"
        " so on)",
        metavar="FILE",
    )
    by: str = flag("person", f"who has decided, for the column {DECIDED}")
    training_data: str | None = flag(
        None,
        "also append the texts and their decided codes to this file, for the next fine-tuning",
        metavar="FILE.csv",
    )
    now: str = flag(
        None, "report: of the file after decisions (default: of the coded file)", metavar="FINAL.csv"
    )


@dataclass(frozen=True, kw_only=True)
class ReviewConfig(Make, ApplyAndReport):
    """What review takes."""

    action: str = flag(
        MISSING,
        "make: a sheet of texts from a coded file; apply: the decisions of sheets to the file; report: how"
        " accurate the file is, from a sheet that was made with --sample",
        choices=tuple(FLAGS),
        positional=True,
    )
    files: list[str] = flag(
        MISSING, "make: the coded file; apply and report: sheets", metavar="FILE", positional=True
    )
    to: str = flag(None, "the coded file that the sheets were made of", metavar="CODED.csv")
    output: str = flag(None, "the sheet, or the final file", metavar="FILE.csv")
    overwrite: bool = flag(False, "replace an output that exists")
    column: str = flag("occ1", "column with the descriptions")
    language_column: str | None = flag(
        None, "column with the languages (default: lang, where the file has it)", metavar="COL"
    )
    delimiter: Delimiter | None = flag(
        None, "column delimiter of what is read (default: found)", metavar="CHAR"
    )


def get_args_parser() -> Parser:
    return Parser(
        ReviewConfig, "python -m histocc.review", "Doubtful rows of a coded file to a person and back."
    )


def argument_problems(args: ReviewConfig) -> list[str]:
    """What is wrong with the arguments themselves, a line each."""
    everyone = {name for names in FLAGS.values() for name in names}
    problems = [
        f"{flag_of(name)} is not for review {args.action}"
        for name in sorted(everyone - set(FLAGS[args.action]))
        if getattr(args, name) != ReviewConfig.__dataclass_fields__[name].default
    ]
    problems += [
        f"review {args.action} needs {flag_of(name)}"
        for name in NEEDED[args.action]
        if not getattr(args, name)
    ]
    if args.action != "apply" and len(args.files) > 1:
        problems.append(f"review {args.action} takes one file, not {len(args.files)}: {' '.join(args.files)}")
    if args.action == "apply" and args.by.strip() in ("", MODEL):
        problems.append(f"--by: {args.by!r} is no name of somebody who decides")
    if problems or args.output is None:
        return problems
    inputs = dict.fromkeys(args.files, "an input") | {
        args.to: "the coded file",
        args.key: "the file of --key",
        args.descriptions: "the file of --descriptions",
    }
    problems = output_problems([args.output], inputs, args.overwrite)
    if args.training_data is not None:
        inputs[args.output] = "the file of --output"
        problems += output_problems([args.training_data], inputs, overwrite=True)
    folders = {
        os.path.dirname(os.path.abspath(path)): path for path in (args.output, args.training_data) if path
    }
    return problems + [
        f"{path}: there is no folder {folder}"
        for folder, path in folders.items()
        if not os.path.isdir(folder)
    ]


def coded_file(args: ReviewConfig, path: str) -> CodedFile:
    layout = Layout.of(path, args.column, args.language_column, args.delimiter)
    return CodedFile(path, layout, args.delimiter)


def words_of(args: ReviewConfig, coded: CodedFile) -> dict[str, str]:
    """Code → description. Raises UserError."""
    if args.descriptions is None:
        return coded.words or (hisco_classes()["title"] if coded.layout.classes["title"] else {})
    header = read_header(args.descriptions)[0]
    names = [next((name for name in usual if name in header), None) for usual in (CODE_COLUMNS, TEXT_COLUMNS)]
    if None in names:
        raise UserError(
            f"--descriptions {args.descriptions}: needs a column of codes ({', '.join(CODE_COLUMNS)}) and"
            f" one of descriptions ({', '.join(TEXT_COLUMNS)}); it has {', '.join(map(repr, header))}"
        )
    found = read_columns(args.descriptions, [name for name in names if name])
    formatter = make_formatter("hisco", None) if coded.layout.system == "hisco" else None
    repaired = [(formatter.repair(code)[0] if formatter else code, words) for code, words in reversed(found)]
    return dict(repaired) | coded.words


def codes_of_key(args: ReviewConfig, coded: CodedFile) -> Codes:
    """Raises UserError."""
    if args.key is not None:
        return Codes(read_key(args.key))
    if coded.layout.system != "hisco":
        raise UserError(
            f"--key names the codes of {coded.layout.system} that may be written: key.csv in the folder of"
            " the run"
        )
    return Codes(hisco_key())


def make(args: ReviewConfig) -> None:
    coded = coded_file(args, args.files[0])
    words = words_of(args, coded)
    texts = list(coded.texts.values())
    if args.sample:
        chosen = drawn_texts(texts, args.rows, args.seed)
    else:
        open_texts = [text for text in texts if not text.decided]
        open_texts.sort(key=lambda text: (-text.doubt, -text.rows, text.id))
        chosen = [Drawn(text) for text in open_texts[: args.rows]]
    if not chosen:
        raise UserError(f"{coded.path}: has no text that is not decided yet")
    content = sheet_text(chosen, len(coded.layout.codes), words, args.sample, args.bom)
    with atomic_write(os.path.realpath(args.output), args.overwrite) as file:
        file.write(content)
    rows, doubt = sum(each.text.rows for each in chosen), sum(each.text.doubt for each in chosen)
    print(
        f"{args.output}: {len(chosen):,} texts, which stand in {rows:,} of {coded.rows:,} rows"
        + (
            f": {sum(each.times for each in chosen):,} rows drawn at random"
            if args.sample
            else f"; by its confidence the model is wrong in {doubt:,.0f} of these, and in"
            f" {sum(text.doubt for text in texts):,.0f} of all"
        )
    )
    print(
        "Fill in the column decision: 1 to 5 for the code of that number, a code, several of them with &"
        " between, none, or skip. Then: python -m histocc.review apply"
    )


def apply(args: ReviewConfig) -> None:
    coded = coded_file(args, args.to)
    sheets = Sheets(args.files, coded, codes_of_key(args, coded), args.delimiter)
    made = {key: each for key, each in sheets.by_text.items() if each.codes is not None}
    training = None if args.training_data is None else TrainingRows(args.training_data, coded.layout)
    words = words_of(args, coded)
    # first: the same command can be given again where the rest fails
    added = training and training.append(
        [(coded.texts[key], each.codes) for key, each in made.items() if each.codes]
    )
    by = {key: args.by if key in sheets.chosen else f"{args.by} (drawn)" for key in made}
    counts: Counter[str] = Counter()
    layout = coded.layout
    header = layout.header + ([] if layout.decided is not None else [DECIDED])

    with atomic_write(os.path.realpath(args.output), args.overwrite) as file:
        file.write(csv_text([header]))
        for chunk in coded.chunks():
            rows = map(list, zip(*chunk.columns))
            file.write(csv_text([with_decision(row, coded, made, by, words, counts) for row in rows]))
    for note in sheets.notes:
        print(f"Note: {note}")
    skipped = len(sheets.by_text) - len(made)
    print(
        f"{args.output}: {len(made):,} texts decided, in {counts['rows']:,} of {coded.rows:,} rows,"
        f" {counts['changed']:,} of which get other codes; {skipped:,} skipped, {sheets.undecided:,} without"
        " a decision"
    )
    if added:
        print(added)


def with_decision(
    row: list[str],
    coded: CodedFile,
    made: dict[Key, Decision],
    by: dict[Key, str],
    words: dict[str, str],
    counts: Counter[str],
) -> list[str]:
    """The row as it is in the final file. by: who has decided on each text; counts: of rows, is added to."""
    layout = coded.layout
    key = layout.key(row)
    decision, before = made.get(key), coded.answer(layout.codes_of(row), layout.decider(row))
    row = row if layout.decided is not None else [*row, MODEL]
    if decision is None:
        return row
    codes = list(decision.codes or ())
    counts["rows"] += 1
    counts["changed"] += codes != before
    for places, values in (
        (layout.codes, codes),
        (layout.words, [words.get(code, "") for code in codes]),
        *(
            (places, [hisco_classes()[name].get(code, "") for code in codes])
            for name, places in layout.classes.items()
        ),
        (layout.probs, []),
        (layout.more, []),
        ([layout.conf], []),
    ):
        for i, place in enumerate(places):
            row[place] = values[i] if i < len(values) else ""
    row[layout.review] = "0"
    decided = layout.decided if layout.decided is not None else len(row) - 1
    row[decided] = by[key]
    return row


def report(args: ReviewConfig) -> None:
    coded = coded_file(args, args.to)
    sheet = Sheets(args.files, coded, codes_of_key(args, coded), args.delimiter)
    for note in sheet.notes:
        print(f"Note: {note}")
    if not sheet.sample:
        raise UserError(
            f"{args.files[0]}: its texts were chosen, not drawn, and say nothing about the others: make a"
            " sheet with --sample"
        )
    corrected = decided_otherwise(args, coded, sheet) if args.now else set()
    found = estimate(coded, sheet, corrected)
    drawn = sum(each.drawn for each in found.quarters)
    if not drawn:
        raise UserError(f"{args.files[0]}: no line with a decision other than skip")
    open_rows = sum(each.times for each in sheet.sample.values()) - drawn
    print(
        f"{args.now or coded.path}: {found.accuracy:.1%} of its rows with a text are right (95 % interval"
        f" {found.low:.1%} to {found.high:.1%}), by {drawn:,} rows that were drawn"
        + (f"; {open_rows:,} drawn rows have no decision and are left out" if open_rows else "")
    )
    for each in found.quarters:
        name = {1: "1 (least sure)", 4: "4 (surest)"}.get(
            each.number, str(each.number) if each.number else "not known"
        )
        print(f"  quarter {name}, {each.rows:,} rows: {each.right:,} of {each.drawn:,} drawn rows right")
    sure = sum(text.rows - text.doubt for text in coded.texts.values() if not text.decided)
    rows = sum(text.rows for text in coded.texts.values() if not text.decided)
    if not args.now and rows:
        print(f"  The model itself expects {sure / rows:.1%}.")


def decided_otherwise(args: ReviewConfig, coded: CodedFile, sheet: Sheets) -> set[Key]:
    """Texts that somebody chose to decide, and not because they were drawn, by the final file. Raises
    UserError where that is no file of these texts.
    """
    final = coded_file(args, args.now)
    if final.rows != coded.rows or set(sheet.sample) - set(final.texts):
        raise UserError(f"{args.now} is not {coded.path} with decisions: it has other rows")
    return {
        key for key, text in final.texts.items() if text.decided and not text.decided.endswith(" (drawn)")
    }


def estimate(coded: CodedFile, sheet: Sheets, corrected: set[Key]) -> Estimate:
    """From the rows that were drawn. A text of `corrected` is right by now; what was decided because it was
    drawn counts as the model had it, since that stands for the rows that were not drawn.
    """
    rows: dict[int, int] = {}
    drawn: Counter[int] = Counter()
    right: Counter[int] = Counter()
    for key, each in sheet.sample.items():
        rows[each.quarter] = each.quarter_rows
        decision = sheet.by_text.get(key)
        if decision is None or decision.codes is None:
            continue
        drawn[each.quarter] += each.times
        answer = coded.answer(each.text.codes, each.text.decided)
        is_right = set(answer) == set(decision.codes)
        if coded.alternatives and not each.text.decided:  # the best code is one of the right ones
            is_right = is_right or bool(set(answer) & set(decision.codes))
        right[each.quarter] += each.times * (is_right or key in corrected)
    quarters = [Quarter(i, rows[i], drawn[i], right[i]) for i in sorted(rows)]
    left = sum(text.rows for text in coded.texts.values()) - sum(rows.values())
    return Estimate.of(quarters + ([Quarter(0, left, 0, 0)] if left > 0 else []))


def run(argv: list[str] | None) -> None:
    args = get_args_parser().parse_args(argv)
    raise_if_any(argument_problems(args))
    {"make": make, "apply": apply, "report": report}[args.action](args)


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main())
