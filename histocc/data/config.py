"""The flags that say what files of rows hold, and what of them does not go together."""

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from histocc.data.tables import DELIMITERS
from histocc.runtime.config import Config, Count, Fraction, flag, number
from histocc.text import UNKNOWN_LANGUAGE
from histocc.text_rules import TEXT_RULES

Delimiter = Annotated[
    str,
    number(
        lambda text: {**DELIMITERS, "\\t": "\t"}.get(text, text),
        lambda text: len(text) == 1 and text not in '"\r\n',
        "one character, nor comma, semicolon, tab or pipe",
    ),
]


def encoding_name(text: str) -> str:
    """An encoding by the name that Python has for it. Raises ValueError."""
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
        "an encoding; some are utf-8, cp1250, cp1251, cp1252, cp1253, cp1254, cp850, mac_roman",
    ),
]
Recoding = Annotated[
    str,
    number(
        str,
        lambda text: re.fullmatch(r"[^=,]+=[^=,]+(,[^=,]+=[^=,]+)*", text) is not None,
        "of the form OLD=NEW,OLD=NEW",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Reading(Config):
    """data"""

    encoding: Encoding | None = flag(
        None,
        "encoding of CSV files, such as cp1250 (default: UTF-8, UTF-16 or Windows-1252, as found)",
        metavar="NAME",
        resumable=True,
    )
    code_separator: str | None = flag(
        None,
        "a cell may hold several codes, separated by one of these characters, such as ';&'",
        metavar="CHARS",
    )
    recode: Recoding | None = flag(
        None, "codes that are read as others, such as 99999=-1,98999=-1", metavar="OLD=NEW"
    )
    empty_text: str | None = flag(
        None,
        "keep rows without a description if this is their only code; without it they are rejected",
        metavar="CODE",
    )
    ditto: bool = flag(False, "descriptions such as do., ditto, 〃 take the text of the row above")


@dataclass(frozen=True, kw_only=True)
class Tables(Reading):
    """data"""

    input_col: str = flag("occ1", "column with the descriptions", resumable=True)
    target_cols: list[str] | None = flag(
        None,
        "columns with the codes; default: the first of code1 … code5 (numbers, with --key), hisco_1 …"
        " hisco_5, OCC1950_1/2 that the file has; without --formatter and --key, hisco_1 … and OCC1950_1 …"
        " bring their formatter, and a column lang the language",
        metavar="COL",
    )
    language: str | None = flag(
        None, f"language of all descriptions, where no column has it (default: {UNKNOWN_LANGUAGE})"
    )
    language_col: str | None = flag(
        None,
        "column with the language of each description (default: see --target-cols; else all have that of"
        " --language)",
        metavar="COL",
        resumable=True,
    )
    delimiter: Delimiter | None = flag(
        None,
        "column delimiter of CSV files: a character, or comma, semicolon, tab, pipe (default: found in the"
        " first line)",
        metavar="CHAR",
        resumable=True,
    )
    formatter: str | None = flag(
        None,
        "system of the codes; gpf, general purpose: as many codes as target columns (default: that of the"
        " columns, see --target-cols, else gpf; of train_mixer.py hisco)",
        choices=("gpf", "hisco", "occ1950"),
    )
    block_size: Count = flag(5, "gpf: tokens of a code")
    use_within_block_sep: bool = flag(False, "gpf: the tokens of a code are separated by ','")
    allow_codes_shorter_than_block_size: bool = flag(False, "gpf: accept shorter codes")
    drop_bad_labels: bool = flag(False, "leave out, and list, rows whose code does not fit")
    missing_code: str | None = flag(
        None,
        "code of rows whose first code is missing; without it they are left out, and listed",
        metavar="CODE",
    )
    key: str | None = flag(
        None,
        "fixes the codes and their order: columns code and system_code (or hisco), or the word hisco for the"
        " 1,919 codes of the published models; without it the codes are those of --all-codes-file, else those"
        " of --initial-checkpoint, then those of the data, in sorted order",
        metavar="FILE",
        resumable=True,
    )
    all_codes_file: str | None = flag(
        None, "fixes the set of codes: a CSV that lists them", metavar="FILE", resumable=True
    )
    all_codes_col: str | None = flag(
        None, "column of --all-codes-file (default: the first target column)", resumable=True
    )
    clean_text: str | None = flag(
        None,
        "what happens to texts before a model sees them; ascii-lower: lower case, transliterated to ASCII, as"
        " the published models have them (default: as in --initial-checkpoint, else as-is)",
        choices=TEXT_RULES,
        resumable="kept",
    )
    max_len: Count = flag(128, "most positions of an input; longer descriptions are cut")

    def problems(self) -> Iterator[str]:
        """What is wrong with these arguments, a line each."""
        yield from problems_of_columns(self, self.max_len)
        if self.key and self.all_codes_file:
            yield "--key and --all-codes-file are mutually exclusive"
        if self.all_codes_col and not self.all_codes_file:
            yield "--all-codes-col needs --all-codes-file"
        if not 16 <= self.max_len <= 2048:
            yield f"--max-len must be at least 16 and at most 2048, not {self.max_len}"
        if self.block_size > 100:
            yield f"--block-size must be at most 100, not {self.block_size}"


@dataclass(frozen=True, kw_only=True)
class Split(Config):
    """data"""

    share_val: Fraction = flag(0.1, "share of texts set aside for validation, 0…1")


@dataclass(frozen=True, kw_only=True)
class Descriptions(Config):
    """descriptions of codes, shown with some of the training texts"""

    include_descriptions: bool = flag(
        False, "put the description of its first code behind some training texts; needs --descriptions-file"
    )
    description_prob: Fraction = flag(0.5, "probability that a text gets it, 0…1")
    description_template: str = flag(
        "{occ} [DESC: {desc}]",
        "what the text becomes: {occ} is the text itself, {desc} the description",
        metavar="TEXT",
    )
    descriptions_file: str | None = flag(None, "codes and their descriptions", metavar="FILE")
    descriptions_code_col: str | None = flag(
        None, "its column of codes (default: the first of system_code, hisco, code)", metavar="COL"
    )
    descriptions_text_col: str | None = flag(
        None,
        "its column of descriptions (default: the first of description, en_hisco_text, text)",
        metavar="COL",
    )
    descriptions_lang_col: str | None = flag(
        None,
        "its column of languages; a text gets the description in its language, or else the first of its code",
        metavar="COL",
    )


def problems_of_columns(asked: Any, max_len: int) -> Iterator[str]:
    """What is wrong with the columns and the language that a user names, a line each.

    Args:
        asked: input_col, target_cols, language and language_col.
        max_len: positions of an input.
    """
    target_cols, language = asked.target_cols or [], asked.language or ""
    if language not in ("", UNKNOWN_LANGUAGE) and asked.language_col:
        yield "--language and --language-col are mutually exclusive"
    if len(set(target_cols)) < len(target_cols):
        yield "--target-cols: a column is named twice"
    if asked.input_col in target_cols:
        yield f"--input-col and --target-cols both name {asked.input_col!r}"
    if asked.language_col in (asked.input_col, *target_cols):
        yield f"--language-col {asked.language_col} is also the column of the descriptions or of codes"
    if asked.language_col is not None and not asked.language_col.strip():
        yield "--language-col is empty"
    if len(language) > max(max_len, 16) // 2:
        yield f"--language {language[:30]}: is it a language?"
