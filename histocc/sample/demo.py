"""The rows of the files that the pages name, equal on every machine: `histocc sample --demo DIR`.

Its lists are next to this file: diary.csv has purchases with their COICOP codes and shops, and occ1950.csv
the OCC1950 codes of HISCO codes.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from random import Random
from zlib import crc32

from histocc.sample.generate import pick, read, rows

_ROWS, _CODED_TWICE, _OTHERS, _REGISTER, _TEXTS, _DECIDED = 2000, 500, 400, 1500, 600, 60
_LANGUAGES = ("en", "da", "se")
CODED, NEW = ("id", "occ1", "lang", "hisco_1", "hisco_2"), ("id", "occ1", "lang")
PARISHES = ("Ashby", "Great Marston", "Kirkby", "Langley", "Netherton", "St. Mary's")
SOURCES = ("Lund", "Malmö", "Ystad", "Ystad")
PURCHASES = ("{}", "{}", "{} x 2", "small {}", "{} for mother", "{} on account")
Lines = list[tuple[str, ...]]


def coded(seed: int, *languages: str) -> Iterator[tuple[str, ...]]:
    """Yield endless rows (occ1, lang, hisco_1, hisco_2) in these languages."""
    return (row[:4] for row in rows(1 << 40, seed) if row[1] in languages and not row[4])


def recoded(row: tuple[str, ...], codes: list[str]) -> tuple[str, ...]:
    """Return a row as coded by another person: with a neighboring code, or one occupation less."""
    *start, first, second = row
    return (*start, first if second else pick(codes, codes.index(first) + 1), "")


def with_ids(lines: Lines, start: int = 1) -> Lines:
    return [(str(i), *row) for i, row in enumerate(lines, start)]


def demo_tables() -> dict[str, Lines]:
    """Return the rows of each file, column names first."""
    bits, stream = Random(1).getrandbits, coded(11, *_LANGUAGES)
    data = with_ids(list(islice(stream, _ROWS)))
    codes, known = sorted({row[3] for row in data}), {row[1].casefold() for row in data}
    test = list(islice((row for row in stream if row[0].casefold() not in known), _OTHERS))
    is_val = [crc32(row[1].casefold().encode()) % 10 == 0 for row in data]  # no text is in both files
    new = [list(islice(stream, _OTHERS)) for _ in range(4)]
    new[0][6] = ("?", "en", "", "")  # nobody can read it
    decided = {row[:2]: row[:3] for row in new[0][::4] if row[2] and not row[3]}
    twice = (row if bits(32) % 10 else recoded(row, codes) for row in data[:_CODED_TWICE])

    pool = list(islice(coded(12, "en"), _TEXTS))
    entries = sorted((str(1851 + bits(32) % 31), pick(PARISHES, bits(32))) for _ in range(_REGISTER))
    often = [bits(32) % _TEXTS * (bits(32) % _TEXTS) // _TEXTS for _ in entries]  # some texts are frequent
    register = with_ids([(*entry, *pool[at][:2]) for entry, at in zip(entries, often)])
    usual = {pool[at][0].casefold(): pool[at] for at, _ in Counter(often).most_common(_DECIDED)}

    diary = [
        (text, row["shop"], row["coicop"]) for row in read("diary.csv") for text in row["texts"].split("|")
    ]
    ways = {(pick(PURCHASES, bits(32)).format(text), *where) for text, *where in diary * 3}
    occ1950 = {row["hisco"]: row["occ1950"] for row in read("occ1950.csv")}
    translated = ((row[0], occ1950[row[2]]) for row in coded(13, "en") if row[2] in occ1950 and not row[3])
    parts = ("test", "train", "train", "train")
    sources = ((row[0], row[2], pick(SOURCES, bits(32)), pick(parts, bits(32))) for row in coded(14, "se"))
    return {
        "data.csv": [CODED, *data],
        "second_coder.csv": [CODED, *twice],
        "train.csv": [CODED, *(row for row, left_out in zip(data, is_val) if not left_out)],
        "val.csv": [CODED, *(row for row, left_out in zip(data, is_val) if left_out)],
        "test.csv": [CODED, *with_ids(test, _ROWS + 1)],
        "new.csv": [NEW, *with_ids([row[:2] for row in new[0]])],
        **{f"tables/{n}.csv": [NEW, *with_ids([row[:2] for row in new[n + 1][::2]])] for n in range(3)},
        "known.csv": [CODED[1:4], *decided.values()],
        "register.csv": [("id", "year", "parish", "occ1", "lang"), *register],
        "register.xlsx": [("id", "year", "parish", "occ1", "lang"), *register],
        "register_decided.csv": [CODED[1:], *usual.values()],
        "purchases.csv": [
            ("text", "shop", "coicop", "n"),
            *((*w, str(1 + crc32(w[0].encode()) % 40)) for w in sorted(ways)),
        ],
        "sources.csv": [("occ1", "hisco_1", "source", "part"), *islice(sources, _OTHERS)],
        "occ1950.csv": [("occ1", "OCC1950_1"), *islice(translated, _OTHERS)],
    }
