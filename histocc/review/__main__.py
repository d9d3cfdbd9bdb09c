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
from typing import NamedTuple

import numpy as np

from histocc.data.config import Delimiter
from histocc.data.dataset import CODE_COLUMNS, TEXT_COLUMNS
from histocc.data.rows import read_columns, read_key
from histocc.data.tables import read_chunks, read_header, table_format
from histocc.formatter import hisco_classes, hisco_key, make_formatter
from histocc.predict.output import csv_text
from histocc.review.sheet import (
    DECIDED,
    MODEL,
    CodedFile,
    CodedText,
    Codes,
    Drawn,
    Key,
    Sheets,
    key_of,
    sheet_text,
)
from histocc.runtime.config import Config, Count, CountOrZero, Parser, flag, flag_of
from histocc.runtime.entrypoint import run_command
from histocc.runtime.errors import UserError, raise_if_any
from histocc.runtime.files import atomic_write, opened
from histocc.runtime.files import problems as output_problems

QUARTERS = 4
DRAWS = 100_000  # of the distribution of the accuracy
PERCENTILES = (2.5, 97.5)
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


def descriptions(args: ReviewConfig, coded: CodedFile) -> dict[str, str]:
    """Code → description, those of the coded file first. Raises UserError."""
    if args.descriptions is None:
        return coded.descriptions or (hisco_classes()["title"] if coded.classes["title"] else {})
    header = read_header(args.descriptions)[0]
    names = [next((name for name in usual if name in header), None) for usual in (CODE_COLUMNS, TEXT_COLUMNS)]
    if None in names:
        raise UserError(
            f"--descriptions {args.descriptions}: needs a column of codes ({', '.join(CODE_COLUMNS)}) and"
            f" one of descriptions ({', '.join(TEXT_COLUMNS)}); it has {', '.join(map(repr, header))}"
        )
    found = read_columns(args.descriptions, [name for name in names if name])
    formatter = make_formatter("hisco", None) if coded.system == "hisco" else None
    repaired = [(formatter.repair(code)[0] if formatter else code, words) for code, words in reversed(found)]
    return dict(repaired) | coded.descriptions


def read_sheets(args: ReviewConfig, coded: CodedFile) -> Sheets:
    """What is decided. Raises UserError."""
    if args.key is None and coded.system != "hisco":
        raise UserError(
            f"--key names the codes of {coded.system} that may be written: key.csv in the folder of the run"
        )
    codes = Codes(hisco_key() if args.key is None else read_key(args.key))
    return Sheets(args.files, coded, codes, args.delimiter)


def drawn_texts(texts: list[CodedText], rows: int, seed: int) -> list[Drawn]:
    """The texts of `rows` rows drawn with replacement, as many from each quarter of the file's rows by
    confidence, in no order. A row is drawn, not a text: one with many rows comes more often.
    """
    texts = sorted(texts, key=lambda text: (-text.doubt / text.rows, text.id))
    counts = np.array([text.rows for text in texts])
    middle = np.cumsum(counts) - counts / 2
    quarter = np.minimum((QUARTERS * middle / max(counts.sum(), 1)).astype(np.int64), QUARTERS - 1)
    draw = np.random.default_rng(seed)
    there = np.unique(quarter).tolist()
    times: Counter[int] = Counter()
    for i, each in enumerate(there):
        at = np.flatnonzero(quarter == each)
        number = rows // len(there) + (i < rows % len(there))
        times.update(draw.choice(at, number, p=counts[at] / counts[at].sum()).tolist())
    found = [
        Drawn(texts[i], times[i], int(quarter[i]) + 1, int(counts[quarter == quarter[i]].sum()))
        for i in times
    ]
    return [found[i] for i in draw.permutation(len(found))]


def make(args: ReviewConfig, coded: CodedFile) -> None:
    words, texts = descriptions(args, coded), list(coded.texts.values())
    if args.sample:
        chosen = drawn_texts(texts, args.rows, args.seed)
    else:
        open_texts = [text for text in texts if not text.decided]
        open_texts.sort(key=lambda text: (-text.doubt, -text.rows, text.id))
        chosen = [Drawn(text) for text in open_texts[: args.rows]]
    if not chosen:
        raise UserError(f"{coded.path}: has no text that is not decided yet")
    with atomic_write(os.path.realpath(args.output), args.overwrite) as file:
        file.write(sheet_text(chosen, len(coded.codes), words, args.sample, args.bom))
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


def apply(args: ReviewConfig, coded: CodedFile) -> None:
    sheets = read_sheets(args, coded)
    made = {key: each.codes for key, each in sheets.by_text.items() if each.codes is not None}
    words = descriptions(args, coded)
    # first: the same command can be given again where the rest fails
    added = args.training_data and add_training_rows(
        args.training_data, coded, [(coded.texts[key], codes) for key, codes in made.items() if codes]
    )
    rows = changed = 0
    with atomic_write(os.path.realpath(args.output), args.overwrite) as file:
        file.write(csv_text([coded.header + ([] if coded.decided is not None else [DECIDED])]))
        for chunk in coded.chunks():
            lines = []
            for row in map(list, zip(*chunk.columns)):
                key = coded.key(row)
                before = coded.answer(coded.codes_of(row), coded.decider(row))
                lines.append(row if coded.decided is not None else [*row, MODEL])
                if key not in made:
                    continue
                line, codes = lines[-1], list(made[key])
                rows, changed = rows + 1, changed + (codes != before)
                for places, values in (
                    (coded.codes, codes),
                    (coded.words, [words.get(code, "") for code in codes]),
                    *(
                        (places, [hisco_classes()[name].get(code, "") for code in codes])
                        for name, places in coded.classes.items()
                    ),
                    ([*coded.probs, *coded.more, coded.conf], []),
                ):
                    for i, place in enumerate(places):
                        line[place] = values[i] if i < len(values) else ""
                line[coded.review] = "0"
                by = args.by if key in sheets.chosen else f"{args.by} (drawn)"
                line[-1 if coded.decided is None else coded.decided] = by
            file.write(csv_text(lines))
    for note in sheets.notes:
        print(f"Note: {note}")
    print(
        f"{args.output}: {len(made):,} texts decided, in {rows:,} of {coded.rows:,} rows, {changed:,} of"
        f" which get other codes; {len(sheets.by_text) - len(made):,} skipped, {sheets.undecided:,} without a"
        " decision"
    )
    if added:
        print(added)


def add_training_rows(path: str, coded: CodedFile, decisions: list[tuple[CodedText, tuple[str, ...]]]) -> str:
    """Adds a row for each text that the file of --training-data does not have yet, which need not be there;
    returns what to tell. Raises OSError, and UserError where it lacks a column that a decision needs, or
    cannot be read.
    """
    texts = [coded.header[coded.text]] + ([] if coded.language is None else [coded.header[coded.language]])
    codes = [coded.header[place] for place in coded.codes]
    header, content, known = [*texts, *codes], b"", set()
    if os.path.exists(path):
        with opened(path) as file:
            content = file.read()
    if content:
        header, delimiter = read_header(path)
        missing = [name for name in [*texts, codes[0]] if name not in header]
        if missing:
            raise UserError(
                f"--training-data {path}: has no column {', '.join(map(repr, missing))}; it has"
                f" {', '.join(map(repr, header))}"
            )
        if delimiter != ",":
            raise UserError(f"--training-data {path}: its columns are parted by {delimiter!r}, not by commas")
        if table_format(path).encoding != "utf-8-sig" or b"\r" in content.replace(b"\r\n", b""):
            raise UserError(
                f"--training-data {path}: is not in UTF-8 with usual line ends, so nothing can be added to"
                " it: save it as CSV (UTF-8)"
            )
        codes = [name for name in codes if name in header]
        for chunk in read_chunks(path, texts):
            if chunk.faults:
                line, _, reason = chunk.faults[0]
                raise UserError(f"--training-data {path}, line {line:,}: cannot be read ({reason})")
            languages = chunk.columns[1] if len(texts) > 1 else [""] * len(chunk.lines)
            known.update(map(key_of, chunk.columns[0], languages))
    rows, there, wide = [], 0, 0
    for text, decided in decisions:
        if key_of(text.text, text.language) in known:
            there += 1
        elif len(decided) > len(codes):
            wide += 1
        else:
            cells = dict(zip(texts, (text.text, text.language))) | dict(zip(codes, decided))
            rows.append([cells.get(name, "") for name in header])
    if rows:
        content = content or csv_text([header])
        with atomic_write(os.path.realpath(path)) as file:
            file.write(content + (b"" if content.endswith(b"\n") else b"\n") + csv_text(rows))
    return (
        f"{path}: {len(rows):,} rows added"
        + (f"; {there:,} texts are there already" if there else "")
        + (f"; {wide:,} have more codes than it has columns for, and are left out" if wide else "")
    )


class Quarter(NamedTuple):
    """number: 1 is the least sure; rows of the file; drawn: rows that were drawn and decided; right: those of
    them that are.
    """

    number: int
    rows: int
    drawn: int
    right: int


def estimate(quarters: list[Quarter]) -> tuple[float, float, float]:
    """Accuracy of the file's rows with its 95 % interval, fractions. Quarters weigh as many rows as they
    have. The interval is that of Jeffreys' prior for each quarter (Brown, Cai, DasGupta, 2001, Interval
    estimation for a binomial proportion), so that a quarter in which nothing is decided is anything from 0 to
    1.
    """
    _, rows, drawn, right = np.array(quarters, dtype=np.float64).T
    weight = rows / rows.sum()
    betas = np.random.default_rng(1).beta(right + 0.5, drawn - right + 0.5, size=(DRAWS, len(quarters)))
    low, high = np.percentile(betas @ weight, PERCENTILES)
    accuracy = float(np.where(drawn > 0, right / np.maximum(drawn, 1), 0.5) @ weight)
    return accuracy, float(min(low, accuracy)), float(max(high, accuracy))


def report(args: ReviewConfig, coded: CodedFile) -> None:
    sheet = read_sheets(args, coded)
    for note in sheet.notes:
        print(f"Note: {note}")
    if not sheet.sample:
        raise UserError(
            f"{args.files[0]}: its texts were chosen, not drawn, and say nothing about the others: make a"
            " sheet with --sample"
        )
    # A text that somebody chose to decide is right by now; what was decided because it was drawn counts as
    # the model had it, since that stands for the rows that were not drawn.
    corrected: set[Key] = set()
    if args.now:
        final = CodedFile(args.now, args.column, args.language_column, args.delimiter)
        if final.rows != coded.rows or set(sheet.sample) - set(final.texts):
            raise UserError(f"{args.now} is not {coded.path} with decisions: it has other rows")
        corrected = {
            key for key, text in final.texts.items() if text.decided and not text.decided.endswith(" (drawn)")
        }
    rows: dict[int, int] = {}
    drawn, right = Counter(), Counter()
    for key, each in sheet.sample.items():
        rows[each.quarter] = each.quarter_rows
        decision = sheet.by_text.get(key)
        if decision is None or decision.codes is None:
            continue
        answer, true = set(coded.answer(each.text.codes, each.text.decided)), set(decision.codes)
        is_right = answer == true
        if coded.alternatives and not each.text.decided:  # the best code is one of the right ones
            is_right = is_right or bool(answer & true)
        drawn[each.quarter] += each.times
        right[each.quarter] += each.times * (is_right or key in corrected)
    quarters = [Quarter(i, rows[i], drawn[i], right[i]) for i in sorted(rows)]
    left = sum(text.rows for text in coded.texts.values()) - sum(rows.values())
    quarters += [Quarter(0, left, 0, 0)] if left > 0 else []
    total = sum(each.drawn for each in quarters)
    if not total:
        raise UserError(f"{args.files[0]}: no line with a decision other than skip")
    accuracy, low, high = estimate(quarters)
    undecided = sum(each.times for each in sheet.sample.values()) - total
    print(
        f"{args.now or coded.path}: {accuracy:.1%} of its rows with a text are right (95 % interval"
        f" {low:.1%} to {high:.1%}), by {total:,} rows that were drawn"
        + (f"; {undecided:,} drawn rows have no decision and are left out" if undecided else "")
    )
    names = {0: "not known", 1: "1 (least sure)", 4: "4 (surest)"}
    for each in quarters:
        name = names.get(each.number, str(each.number))
        print(f"  quarter {name}, {each.rows:,} rows: {each.right:,} of {each.drawn:,} drawn rows right")
    texts = [text for text in coded.texts.values() if not text.decided]
    if not args.now and texts:
        number = sum(text.rows for text in texts)
        print(f"  The model itself expects {sum(text.rows - text.doubt for text in texts) / number:.1%}.")


def run(argv: list[str] | None) -> None:
    args = get_args_parser().parse_args(argv)
    raise_if_any(argument_problems(args))
    path = args.files[0] if args.action == "make" else args.to
    coded = CodedFile(path, args.column, args.language_column, args.delimiter)
    {"make": make, "apply": apply, "report": report}[args.action](args, coded)


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main())
