"""The flags that describe files of rows, and the settings to prepare them with."""

import codecs
import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any

from histocc.data.arrays import PREPARED_FORMAT, PreparedData
from histocc.data.records import ALL, LEAVE, Table
from histocc.data.rows import MOST_LEN, hold_numbers, language_name, read_columns, read_key
from histocc.data.tables import DELIMITERS, column_problems, composed, table_format
from histocc.formatter import BlockyFormatter, CodeError, formatter_of_codes, hisco_key, make_formatter
from histocc.runtime.config import AUTO, Config, Count, Fraction, flag, flag_of, number, step_flag
from histocc.runtime.errors import UserError, raise_if_any
from histocc.runtime.files import opened
from histocc.text import AS_IS, TEXT_RULES, UNKNOWN_LANGUAGE

Delimiter = Annotated[
    str,
    number(
        lambda text: {**DELIMITERS, "\\t": "\t"}.get(text, text),
        lambda text: len(text) == 1 and text not in '"\r\n',
        "a single character or one of comma, semicolon, tab and pipe",
    ),
]


def encoding_name(text: str) -> str:
    """Return Python's name of an encoding. Raises ValueError for an unknown one."""
    try:
        name = codecs.lookup(text).name
        "".encode(name)
    except LookupError:
        raise ValueError from None
    return "utf-8-sig" if name == "utf-8" else name


Encoding = Annotated[
    str,
    number(
        encoding_name,
        lambda name: isinstance(name, str),
        "an encoding, such as utf-8, cp1250, cp1251, cp1252, cp1253, cp1254, cp850, mac_roman",
    ),
]
Column = Annotated[str, composed]  # name of a column
LeftOut = Annotated[str, number(composed, lambda text: text.find("=") > 0, "of the form COLUMN=VALUE")]


def text_columns(named: str | list[str] | None) -> list[str]:
    """Return the columns of --input-col, from its form in arguments or checkpoints."""
    return [named] if isinstance(named, str) else list(named or ["occ1"])


def text_flags(columns: list[str], asked: Any = None) -> list[str]:
    """Return the flags of a command that reads these text columns, and the languages as `asked` does."""
    flags = ["--input-col", *columns] if columns != text_columns(None) else []
    return flags + (given_flags(asked, "language", "language_col", "ditto", "fill_down") if asked else [])


def given_flags(asked: Config, *names: str) -> list[str]:
    """Return the flags with these names that differ from their defaults, as words of a command."""
    words: list[str] = []
    for name in names:
        if (value := getattr(asked, name)) != getattr(type(asked), name):
            words += [flag_of(name), *(value if isinstance(value, list) else [value] * (value is not True))]
    return words


SPELLINGS = "spellings"
FEW_TEXTS = 12_000  # up to so many distinct texts, a model without encoder is learned in closed form
USUAL_LEN, USUAL_SHARE = 128, 0.1  # defaults of --max-len and --share-val
ShareOrAuto = Annotated[
    Any,
    number(
        lambda text: AUTO if text == AUTO else float(text),
        lambda value: value == AUTO or 0 <= value <= 1,
        "a number between 0 and 1, or auto",
    ),
]
_RECODING = re.compile(rf"([^=,]+=[^=,]+|{SPELLINGS})(,([^=,]+=[^=,]+|{SPELLINGS}))*")
_FORM = f"of the form OLD=NEW,OLD=NEW, or {SPELLINGS}"
Recoding = Annotated[str, number(str, lambda text: bool(_RECODING.fullmatch(text)), _FORM)]


@dataclass(frozen=True, kw_only=True)
class FormatFlags(Config):
    """your table"""

    input_col: list[Column] | None = flag(
        None,
        "column of descriptions, then any that help, such as industry (default: occ1, or as in training)",
        *("--column", "--col"),
        metavar="COL",
    )
    language: str | None = flag(
        None, "language of all rows, such as en (default: unk, or as in training)", metavar="LANG"
    )
    language_col: Column | None = flag(
        None,
        "column of languages (default: lang, or as in training)",
        "--language-column",
        metavar="COL",
    )
    sheet: str | None = flag(
        None,
        "sheet of a workbook (default: the first one that has the column of descriptions)",
        metavar="NAME",
    )
    delimiter: Delimiter | None = flag(
        None,
        "column delimiter: a character, or comma, semicolon, tab, pipe (default: detected)",
        metavar="CHAR",
    )
    no_quotes: bool = flag(False, "read quotation marks as ordinary letters")
    encoding: Encoding | None = flag(
        None,
        "encoding of CSV files, such as cp1250 (default: UTF-8, UTF-16 or Windows-1252, as detected)",
        metavar="NAME",
    )
    ditto: str | None = flag(
        None,
        "do., ditto and 〃 take the text of the row above (all), or stay unchanged (none). In"
        " sorted, weighted or drawn rows they count as empty (default: all)",
        choices=(ALL, LEAVE),
        nargs="?",
        const=ALL,
    )
    fill_down: list[Column] | None = flag(
        None,
        "columns in which an empty cell repeats the one above, such as the codes of several rows",
        metavar="COL",
    )

    def how(self, texts: Sequence[str]) -> tuple:
        """Return the arguments of `table_format` and `read_chunks` for a file with these text columns."""
        return self.delimiter, self.encoding, self.no_quotes, self.sheet, texts, True


REPAIR_TEXT = "replace broken letters and escapes in descriptions, such as Ã¦, &oslash;, \\u00f8, =C3=B8"


@dataclass(frozen=True, kw_only=True)
class RowFlags(FormatFlags):
    """your table"""

    weight_col: Column | None = flag(
        None, "column that says how often each row counts, such as 3 or 99.5", metavar="COL"
    )
    code_separator: str | None = flag(
        None, "characters or words that separate several codes in one cell", metavar="CHARS"
    )
    recode: Recoding | None = flag(
        None,
        "read codes as others, such as 99999=-1,98999=-1. The word spellings joins codes that"
        " differ only in case or punctuation (I51.9, I519)",
        metavar="OLD=NEW",
    )
    empty_text: str | None = flag(
        None, "keep rows without a description if this is their only code", metavar="CODE"
    )
    repair_text: bool = flag(False, REPAIR_TEXT)


@dataclass(frozen=True, kw_only=True)
class TableFlags(RowFlags):
    """your table"""

    input_col: list[Column] | str = flag(
        "occ1",
        "column of descriptions, then any that help",
        "--column",
        metavar="COL",
        resumable=True,
    )
    target_cols: list[Column] | None = flag(
        None,
        "columns with the codes (default: hisco_1 … hisco_5, OCC1950_1 …, or with --key code1 …,"
        " whichever your table has)",
        metavar="COL",
    )
    language_col: Column | None = flag(
        None,
        "column of languages (default: lang, unless --target-cols is given)",
        "--language-column",
        resumable=True,
        metavar="COL",
    )
    formatter: str | None = flag(
        None,
        "hisco, occ1950, gpf (codes of a fixed length) or auto: from the names of the columns,"
        " else any text is a code (default: auto)",
        choices=(AUTO, "gpf", "hisco", "occ1950"),
    )
    block_size: Count = flag(5, "gpf: how many characters, or parts between commas, a code has")
    use_within_block_sep: bool = flag(False, "gpf: the parts of a code are separated by commas")
    allow_codes_shorter_than_block_size: bool = flag(False, "gpf: accept shorter codes")
    drop_bad_labels: bool = flag(False, "leave out rows whose code does not fit the system, and list them")
    missing_code: str | None = flag(
        None, "code of rows that lack a first code (default: such rows are left out)", metavar="CODE"
    )
    key: str | None = flag(
        None,
        "file that fixes the codes and their order, with columns code and system_code (or hisco),"
        " or the word hisco (default: codes of --initial-checkpoint, then those of your table)",
        metavar="FILE",
        resumable=True,
    )
    all_codes_file: str | None = flag(
        None, "table that lists all codes which the model may give", metavar="FILE", resumable=True
    )
    all_codes_col: str | None = flag(
        None, "its column of codes (default: the first target column)", resumable=True, metavar="COL"
    )
    clean_text: str | None = flag(
        None,
        "ascii-lower: write descriptions in lower case and in ASCII, as published models expect"
        " (default: as in --initial-checkpoint, else as-is)",
        choices=TEXT_RULES,
        resumable="kept",
    )
    max_len: Count | None = flag(
        None,
        f"longest description read; the rest is cut off (default: {USUAL_LEN}; a model"
        " without encoder reads all of it, except with --max-steps or --seq2seq-weight)",
        resumable="kept",
    )

    def problems(self) -> Iterator[str]:
        """Return the problems of these arguments, one per line."""
        yield from problems_of_columns(self)
        if self.key and self.all_codes_file:
            yield "--key and --all-codes-file are mutually exclusive"
        if self.all_codes_col and not self.all_codes_file:
            yield "--all-codes-col needs --all-codes-file"
        if self.max_len and not 16 <= self.max_len <= MOST_LEN:
            yield f"--max-len must be at least 16 and at most {MOST_LEN}, not {self.max_len}"


@dataclass(frozen=True, kw_only=True)
class SplitFlags(Config):
    """validation and test"""

    share_val: ShareOrAuto = flag(
        AUTO,
        f"share of the texts for validation, 0…1; auto: {USUAL_SHARE}, but none if a model without"
        " encoder learns from few texts, each of which is then left out in turn",
        metavar="SHARE|auto",
    )
    share_test: Fraction = flag(
        0.0, "share of the texts for a final test, 0…1, which only histocc evaluate reads"
    )
    split_col: Column | None = flag(
        None,
        "column that assigns each row to train, val or test; the shares apply to the parts that it lacks",
        metavar="COL",
    )
    leave_out: list[LeftOut] | None = flag(
        None, "also keep the texts of these rows for the test, such as source=Lund", metavar="COL=VALUE"
    )


@dataclass(frozen=True, kw_only=True)
class DescriptionFlags(Config):
    """descriptions of codes, added to some of the training texts"""

    include_descriptions: bool = step_flag(
        False, "append the description of the first code to some training texts (needs --descriptions-file)"
    )
    description_prob: Fraction = step_flag(0.5, "share of the training texts that get a description, 0…1")
    description_template: str = step_flag(
        "{occ} [DESC: {desc}]", "how text and description are joined", metavar="TEXT"
    )
    descriptions_file: str | None = step_flag(None, "table of codes and their descriptions", metavar="FILE")
    descriptions_code_col: str | None = step_flag(
        None, "its column of codes (default: system_code, hisco or code)", metavar="COL"
    )
    descriptions_text_col: str | None = step_flag(
        None, "its column of texts (default: description, en_hisco_text or text)", metavar="COL"
    )
    descriptions_lang_col: str | None = step_flag(
        None,
        "its column of languages (default: the first text of a code serves all languages)",
        metavar="COL",
    )


def problems_of_columns(asked: Any) -> Iterator[str]:
    """Yield the problems of the columns that the fields of `asked` name, one per line."""
    if asked.language not in (None, "", UNKNOWN_LANGUAGE) and asked.language_col:
        yield "--language and --language-col are mutually exclusive"
    others = asked.language_col, getattr(asked, "weight_col", None)
    names = Counter([*text_columns(asked.input_col), *(asked.target_cols or []), *filter(None, others)])
    if twice := [name for name, times in names.items() if times > 1]:
        flags = "--input-col, --target-cols, --language-col and --weight-col"
        yield f"column {twice[0]!r} is named twice by {flags}"


def column_flags(asked: Any) -> dict[str, str]:
    """Return the flag that names each column. `asked` has fields of these names."""
    found: dict[str, str] = {}
    names = ["by", "show", "target_cols", "weight_col", "split_col", "fill_down", "language_col", "input_col"]
    for name in names:
        named = getattr(asked, name, None) or (["occ1"] if name == "input_col" else [])
        found |= dict.fromkeys([named] if isinstance(named, str) else named, flag_of(name))
    return found


# ---- settings


@dataclass(frozen=True, kw_only=True)
class PrepareSettings(RowFlags, SplitFlags):
    """The files to read and how to read them: fields named as the flags, with their final values."""

    train_files: list[str]
    formatter: dict  # from `BlockyFormatter.to_dict`
    target_cols: list[str]
    val_files: list[str] = field(default_factory=list)
    share_val: float | None = None  # share of `train_files` for validation, None with `val_files`
    few_texts: int = 0  # up to so many distinct texts are all trained on, ignoring share_val
    by: list[str] | None = None  # for evaluate: columns to group rows by. Line numbers are kept
    input_col: list[str] = field(default_factory=lambda: text_columns(None))
    language: str = UNKNOWN_LANGUAGE
    max_len: int = USUAL_LEN
    missing_code: str | None = None
    drop_bad_labels: bool = False
    fixed_codes: list[str] | None = None  # codes of --key or --all-codes-file, in their order
    number_codes: list[str] | None = None  # codes, if cells hold their numbers, or None if cells hold codes
    first_codes: list[str] | None = None  # codes that precede all other codes in the key
    clean_text: str = AS_IS
    recode: dict[str, str] = field(default_factory=dict)
    join_spellings: bool = False  # treat codes that differ only in case or punctuation as one

    @classmethod
    def of(cls, args: RowFlags, **decided: Any) -> "PrepareSettings":
        """Return the values of the flags of the same names, with those in `decided` replaced."""
        names = {item.name for item in fields(cls)}
        given = {name: value for name, value in args.values().items() if name in names}
        given["input_col"] = text_columns(given.get("input_col"))
        pairs = args.recode.split(",") if args.recode else []
        recode = {old.strip(): new.strip() for old, new in (pair.split("=") for pair in pairs if "=" in pair)}
        return cls(**{**given, "recode": recode, "join_spellings": SPELLINGS in pairs, **decided})

    @property
    def columns(self) -> list[str]:
        others = self.weight_col, self.language_col
        return [*self.input_col, *self.target_cols, *filter(None, others), *(self.fill_down or ())]

    @property
    def split_columns(self) -> list[str]:
        """The columns that decide a row's part: those of --split-col, if given, and --leave-out."""
        columns = (each.partition("=")[0] for each in self.leave_out or [])
        return [*filter(None, [self.split_col]), *columns]

    @property
    def reading(self) -> tuple:
        """Return the arguments of `table_format` and `read_chunks` for the files."""
        return self.how((*self.input_col, *filter(None, [self.language_col])))

    def table(self, path: str, others: Sequence[str] = ()) -> Table:
        """Return one of the files as a table, with further columns. Raises UserError."""
        return Table(
            *(path, self.reading, self.input_col, self.target_cols, others),
            language=self.language,
            language_col=self.language_col,
            weight_col=self.weight_col,
            rule=self.clean_text,
            ditto=self.ditto,
            fill_down=self.fill_down,
            repair=self.repair_text,
        )

    @property
    def max_codes(self) -> int | None:
        """The most codes of a row, or None for as many as the fullest row has."""
        return self.formatter["max_codes"] if self.code_separator else len(self.target_cols)

    @property
    def files(self) -> list[tuple[str, str]]:
        """All files as (part, path), in the order in which they are read."""
        return [("train", path) for path in self.train_files] + [("val", path) for path in self.val_files]


def fingerprint(settings: PrepareSettings) -> str:
    """Return a hash of the content of all files and of the settings, not of paths. Raises UserError."""
    plain: dict[str, Any] = asdict(settings) | {"prepared_format": PREPARED_FORMAT}
    for name in ("train_files", "val_files"):
        plain[name] = []
        for path in getattr(settings, name):
            with opened(path) as file:
                digest = hashlib.file_digest(file, "sha256")  # pyright: ignore[reportArgumentType]
                plain[name].append(digest.hexdigest())
    return hashlib.blake2b(json.dumps(plain, sort_keys=True).encode(), digest_size=8).hexdigest()


def file_problems(settings: PrepareSettings) -> list[str]:
    """Return the problems of the files and their columns, one per line."""
    flags = dict.fromkeys(settings.split_columns, "--leave-out") | column_flags(settings)
    columns = [*settings.columns, *settings.split_columns, *(settings.by or [])]
    problems = []
    if (settings.share_val or 0) + settings.share_test > 1:
        problems.append("--share-val and --share-test add up to more than 1")
    if len(settings.input_col) > 1 and settings.clean_text != AS_IS:
        problems.append(f"--input-col: cleaned texts ({settings.clean_text}) must be in one column")
    for path in dict.fromkeys(path for _, path in settings.files):
        try:
            opened(path).close()  # opens only files: a folder is several tables
            problems += column_problems(path, table_format(path, *settings.reading).names, columns, flags)
        except UserError as error:
            problems.append(str(error))
    return problems


def code_problems(formatter: BlockyFormatter, settings: PrepareSettings) -> Iterator[str]:
    """Yield the problems of the codes that flags name, one per line."""
    codes = [("--missing-code", settings.missing_code), ("--empty-text", settings.empty_text)]
    codes += [("--recode", code) for code in settings.recode.values()]
    for name, code in codes:
        try:
            if code is not None:
                formatter.encode_code(formatter.repair(code)[0] if name == "--recode" else code)
                if settings.fixed_codes is not None and code not in settings.fixed_codes:
                    yield f"{name}: code {code!r} is not among the codes of the key"
        except CodeError as error:
            yield f"{name}: {error}"


@dataclass(frozen=True)
class StartsFrom:
    """The requirements of a run's initial weights on its data."""

    text: str = AS_IS  # rule that cleans texts
    codes: list[str] = field(default_factory=list)  # codes of the linear outputs, or [] if not used
    formatter: dict | None = None  # as `to_dict` describes it, if it is known


def column_of_languages(
    language: str | None, column: str | None, texts: Sequence[str], there: Collection[str]
) -> str | None:
    """Return the column of languages: the one named, or else `lang` if there is one. `lang` is not used if a
    language is named or the texts are in that column.
    """
    return column or ("lang" if "lang" in there and "lang" not in texts and not language else None)


def columns_of(
    args: TableFlags, path: str, problems: list[str], default_formatter: str = AUTO, naming: str = "hisco"
) -> tuple[TableFlags, str]:
    """Return the flags with the columns to read in a file and their formatter, and a line for the user on
    what was found from the column names, or "". Appends problems to `problems`, and target_cols is then [].

    Without --target-cols the names decide, and a column `lang` holds the languages. Without --formatter (or
    with auto), --key and --target-col-naming (`naming`), hisco_1 … and OCC1950_1 … choose their formatter.
    --key hisco chooses hisco. Otherwise it is `default_formatter`, or gpf if flags of gpf are given.
    """
    is_hisco = (args.key or "").lower() == "hisco"
    asked, target_cols = args.formatter or ("hisco" if is_hisco else None), args.target_cols or []
    gpf_flags = args.block_size != 5, args.use_within_block_sep, args.allow_codes_shorter_than_block_size
    kind = asked or ("gpf" if any(gpf_flags) and default_formatter == AUTO else default_formatter)
    texts, language_col, note, header = text_columns(args.input_col), args.language_col, "", []
    try:
        how = args.how([*texts, *filter(None, [language_col])])
        header = [] if target_cols else table_format(path, *how).names
    except UserError as error:
        problems.append(str(error))
    if asked is None and kind == AUTO and target_cols and target_cols[0].casefold().startswith("hisco"):
        note = f"Note: {' '.join(target_cols)} may hold any codes; --formatter hisco takes them as HISCO"

    def family(kind: str, name: str, count: int) -> list[tuple[str, list[str]]]:
        names = [f"{name}{i}" for i in range(1, count + 1)]
        return [(kind, [name for name in names if name in header])] if names[0] in header else []

    if header:
        by_name = asked in (None, AUTO) and not args.key and naming == "hisco"
        numbers = family(kind, "code", 5)
        families = family("hisco" if naming == "hisco" else "gpf", f"{naming}_", 5)
        families += family("occ1950", "OCC1950_", 2)
        if not by_name:
            families.sort(key=lambda family: family[0] != kind)
        families = numbers * bool(args.key) + families or numbers * (kind == "hisco")
        if not families:
            of_key = "code1 … hold numbers of a key: add --key FILE, or --formatter hisco for the HISCO key"
            problems.append(
                f"{path}: has none of the columns {naming}_1, OCC1950_1; name yours with --target-cols"
                f"{f' ({of_key})' * ('code1' in header)}. It has {', '.join(map(repr, header))}"
            )
        elif by_name and len(families) > 1:
            problems.append(
                f"{path}: has columns of two systems, {' and '.join(names[0] for _, names in families)}:"
                f" choose one with --formatter {' or --formatter '.join(kind for kind, _ in families)}"
            )
        else:
            target_cols, kind = families[0][1], families[0][0] if by_name else kind
            note = f"Columns: --formatter {kind} --target-cols {' '.join(target_cols)}"
            language_col = column_of_languages(args.language, args.language_col, texts, header)
            if language_col != args.language_col:
                note += " --language-col lang"
            note += f", by their names in {path}"
    languages = {"language": language_name(args.language or UNKNOWN_LANGUAGE), "language_col": language_col}
    return args.with_decided(formatter=kind, target_cols=target_cols, **languages), note


def settings_from(
    args: TableFlags,
    train_files: list[str],
    val_files: list[str],
    problems: list[str] | None = None,
    start: StartsFrom = StartsFrom(),
    few_texts: int = 0,
    max_len: int = USUAL_LEN,
) -> PrepareSettings:
    """Return the settings to read data as the flags of `columns_of` ask. few_texts applies if --share-val is
    auto, max_len without --max-len. Raises one UserError for its own and the given `problems`.
    """
    problems = list(problems or [])
    kind, target_cols = args.formatter or AUTO, args.target_cols or []
    fixed = formatter = numbers = first = None
    try:
        if target_cols:
            of_start = start.formatter or {}
            formatter = make_formatter(
                "classes" if kind == AUTO else kind,
                target_cols,
                args.block_size,
                args.use_within_block_sep,
                args.allow_codes_shorter_than_block_size,
                of_start.get("chars") if of_start.get("kind") == kind == "gpf" else None,
            )
            fixed = _fixed_codes(args, formatter, target_cols[0])
            first = _kept_codes(formatter, start) if fixed is None else None
            if hold_numbers(target_cols) and (args.key or kind == "hisco"):
                numbers = fixed if args.key else list(hisco_key())
    except (UserError, ValueError) as error:
        problems.append(str(error))
    plain = formatter.to_dict() if formatter else {}
    if args.code_separator and kind in (AUTO, "gpf"):
        plain["max_codes"] = None  # as many as the fullest row has
    share = getattr(args, "share_val", None)
    settings = PrepareSettings.of(
        args,
        max_len=args.max_len or max_len,
        few_texts=few_texts if share == AUTO and not val_files else 0,
        train_files=train_files,
        val_files=val_files,
        formatter=plain,
        share_val=None if val_files else USUAL_SHARE if share == AUTO else share,
        fixed_codes=fixed,
        clean_text=args.clean_text or start.text,
        number_codes=numbers,
        first_codes=first,
    )
    problems += [problem for problem in file_problems(settings) if problem not in problems]
    problems += code_problems(formatter, settings) if formatter else []
    raise_if_any(problems)
    return settings


def written_by(settings: PrepareSettings, data: PreparedData, start: StartsFrom) -> dict:
    """Return the settings of the formatter that writes the codes of prepared data."""
    target_cols, room = settings.target_cols, data.max_codes
    if settings.formatter["kind"] == "classes":
        return formatter_of_codes(data.codes, target_cols, room, start.formatter).to_dict()
    return settings.formatter | {"max_codes": settings.formatter["max_codes"] or room}


def _repaired(codes: list[str], formatter: BlockyFormatter) -> list[str]:
    """Return codes in the formatter's spelling. Raises CodeError."""
    codes = [formatter.repair(code)[0] for code in codes if code]
    for code in codes:
        formatter.encode_code(code)
    return codes


def _kept_codes(formatter: BlockyFormatter, start: StartsFrom) -> list[str] | None:
    """Return the codes of the initial weights if the run's formatter writes them unchanged, or None."""
    kinds = ("gpf", "classes") if formatter.kind == "classes" else (formatter.kind,)
    if not start.codes or start.formatter and start.formatter["kind"] not in kinds:
        return None
    try:
        codes = _repaired(start.codes, formatter)
    except CodeError:
        return None
    return codes if len(set(codes)) == len(start.codes) else None


def _fixed_codes(args: TableFlags, formatter: BlockyFormatter, first_column: str) -> list[str] | None:
    """Return the codes of --key or --all-codes-file. first_column: the first target. Raises UserError."""
    path = args.key or args.all_codes_file
    if not path:
        return None
    if args.key:
        cells = read_key(path)
        if hold_numbers([first_column]) and "" in cells[: sum(map(bool, cells))]:
            number = cells.index("")
            raise UserError(f"{path}: number {number} has no code; columns of numbers need one for each")
    else:
        cells = [cell for (cell,) in read_columns(path, [args.all_codes_col or first_column])]
    try:
        codes = _repaired(cells, formatter)
    except CodeError as error:
        raise UserError(f"{path}: {error}") from None
    if args.key and len(set(codes)) < len(codes):
        raise UserError(f"{path}: a code is listed twice, with and without its leading zero")
    return codes if args.key else sorted(set(codes))
