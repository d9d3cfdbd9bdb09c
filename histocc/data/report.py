"""What a prepared data set holds: sizes, languages, codes, lengths, duplicates, contradictions, problems."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from histocc.data.arrays import ARRAYS, map_array
from histocc.data.rows import NOTES, Findings, row_writer
from histocc.runtime.rng import mix
from histocc.text import LANGUAGES

LINES = np.dtype("<i8")  # number of the file × 2**40 + line
RARE = 10  # a code in fewer rows than this is rare
PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
_BUCKET = 1 << 22  # rows that are compared at once
_BLOCK = 1 << 18  # rows that are read at once
# What the published models call languages that have another usual name.
USUAL_NAMES = {
    "sv": "se",
    "swe": "se",
    "swedish": "se",
    "de": "ge",
    "ger": "ge",
    "german": "ge",
    "dk": "da",
    "dan": "da",
    "danish": "da",
    "eng": "en",
    "english": "en",
    "nb": "no",
    "nn": "no",
    "norwegian": "no",
    "el": "gr",
    "greek": "gr",
    "dutch": "nl",
    "french": "fr",
    **{name.upper().casefold(): name for name in LANGUAGES},
}


@dataclass
class WrittenPart:
    """The array files of one part before its folder has its name. codes: numbers of the final key."""

    folder: str
    part: str
    rows: int
    max_codes: int

    def blocks(self, name: str, dtype: np.dtype, width: int = 1) -> Iterator[np.ndarray]:
        """Rows of an array, `_BLOCK` at a time and read rather than mapped, so that memory stays small."""
        with open(os.path.join(self.folder, f"{self.part}.{name}"), "rb") as file:
            while data := file.read(_BLOCK * width * dtype.itemsize):
                values = np.frombuffer(data, dtype=dtype)
                yield values.reshape(-1, width) if width > 1 or name == "codes" else values

    @cached_property
    def maps(self) -> dict[str, np.ndarray]:
        """The arrays, mapped, for single rows."""
        return {
            name: map_array(os.path.join(self.folder, f"{self.part}.{name}"), dtype)
            for name, dtype in {**ARRAYS, "lines": LINES}.items()
        }

    def keys(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """(hash of the text, hash of text and language, hash of the set of codes), uint64 each, block by
        block.
        """
        arrays = zip(
            self.blocks("text_hash", ARRAYS["text_hash"]),
            self.blocks("language", ARRAYS["language"]),
            self.blocks("codes", ARRAYS["codes"], self.max_codes),
        )
        for text, language, codes in arrays:
            ordered = np.sort(codes, axis=1).astype(np.uint64)
            labels = np.zeros(len(text), dtype=np.uint64)
            for column in ordered.T:
                labels = mix(labels * np.uint64(3) + column)
            yield text, mix(text + mix(language.astype(np.uint64))), labels


def compare_rows(
    parts: list[WrittenPart], split: bool, files: list[str], codes: list[str], languages: list[str], path: str
) -> dict:
    """Duplicates and contradictions among the rows of all parts; the contradictions are listed in `path`.

    Texts that differ only in case and blanks are one text. Works on a share of the texts at a time, so that
    memory does not grow with the rows.

    Returns:
        distinct_texts; duplicates: rows with the text, language and set of codes of an earlier one;
        conflicts: texts of a language that have several sets of codes; val_rows_seen_in_training: rows of val
        whose text is also in train (0 if the parts were split by text).
    """
    found = dict.fromkeys(("distinct_texts", "duplicates", "conflicts", "val_rows_seen_in_training"), 0)
    buckets = max(1, -(-sum(part.rows for part in parts) // _BUCKET))
    with open(path, "w", encoding="utf-8", newline="", errors="backslashreplace") as file:
        write_row = row_writer(file)
        write_row(["text", "language", "codes", "rows", "file", "line"])
        for bucket in range(buckets):
            # the three keys and the numbers (over all parts) of the rows whose text falls into the bucket
            chosen, start = [[np.zeros(0, np.uint64)] * 3 + [np.zeros(0, np.int64)]], 0
            for part in parts:
                for keys in part.keys():  # noqa: SIM118 (not a dict)
                    inside = np.flatnonzero(keys[0] % np.uint64(buckets) == bucket)
                    chosen.append([*(key[inside] for key in keys), inside + start])
                    start += len(keys[0])
            texts, inputs, labels, rows = map(np.concatenate, zip(*chosen))
            _, first, counts = np.unique(inputs + mix(labels), return_index=True, return_counts=True)
            found["duplicates"] += len(rows) - len(first)
            found["distinct_texts"] += (
                1 + int(np.count_nonzero(np.diff(np.sort(texts[first])))) if len(first) else 0
            )
            if not split:
                val = rows >= parts[0].rows
                found["val_rows_seen_in_training"] += int(np.isin(texts[val], texts[~val]).sum())
            _, group, sizes = np.unique(inputs[first], return_inverse=True, return_counts=True)
            found["conflicts"] += int((sizes > 1).sum())
            total = np.bincount(group, weights=counts)
            several = np.flatnonzero(sizes[group] > 1)
            of_text = group[several]
            order = np.lexsort((rows[first[several]], -counts[several], of_text, -total[of_text]))
            for at in several[order]:
                write_row(_conflict(parts, int(rows[first[at]]), int(counts[at]), files, codes, languages))
    return found


def _conflict(
    parts: list[WrittenPart], row: int, count: int, files: list[str], codes: list[str], languages: list[str]
) -> tuple:
    """One line of conflicts.csv: a text with one of its sets of codes, how often, and where first."""
    part = parts[0]
    if row >= part.rows:
        row, part = row - part.rows, parts[1]
    at = part.maps
    begin, end = at["offsets"][row : row + 2]
    numbers = at["codes"][row * part.max_codes : (row + 1) * part.max_codes]
    file, line = divmod(int(at["lines"][row]), 1 << 40)
    return (
        "".join(map(chr, at["chars"][begin:end])),
        languages[at["language"][row]],
        " ".join(codes[n] for n in numbers if n >= 0),
        count,
        files[file],
        line,
    )


def describe_parts(parts: list[WrittenPart], codes: list[str], languages: list[str]) -> dict:
    """Languages, codes per row, rare codes, lengths of descriptions in characters."""
    of_language = np.zeros(len(languages), dtype=np.int64)
    in_part = []  # rows of each code, part by part
    per_row = np.zeros(parts[0].max_codes + 1, dtype=np.int64)
    lengths = np.zeros(1, dtype=np.int64)  # rows of each length
    for part in parts:
        for values in part.blocks("language", ARRAYS["language"]):
            of_language += np.bincount(values, minlength=len(languages))
        in_part.append(np.zeros(len(codes), dtype=np.int64))
        for numbers in part.blocks("codes", ARRAYS["codes"], part.max_codes):
            in_part[-1] += np.bincount(numbers[numbers >= 0], minlength=len(codes))
            per_row += np.bincount((numbers >= 0).sum(axis=1), minlength=len(per_row))
        end = 0
        for ends in part.blocks("offsets", ARRAYS["offsets"]):
            counts = np.bincount(np.minimum(np.diff(ends, prepend=end), 1 << 20))
            end = ends[-1]
            lengths = (
                counts + np.pad(lengths, (0, len(counts) - len(lengths)))
                if len(counts) > len(lengths)
                else lengths + np.pad(counts, (0, len(lengths) - len(counts)))
            )
        lengths[0] -= 1  # the first offset, 0, ends no row
    of_code = np.sum(in_part, axis=0)
    unseen = np.flatnonzero((in_part[0] == 0) & (of_code > 0))
    named = {name: int(count) for name, count in zip(languages, of_language) if count}
    return {
        "languages": dict(sorted(named.items(), key=lambda item: -item[1])),
        "unpublished_languages": [name for name in named if name not in LANGUAGES],
        "codes": len(codes),
        "codes_used": int((of_code > 0).sum()),
        "codes_per_row": {str(n): int(count) for n, count in enumerate(per_row) if count},
        "frequent_codes": {
            codes[i]: int(of_code[i]) for i in np.argsort(-of_code, kind="stable")[:RARE] if of_code[i]
        },
        "rare_codes": {codes[i]: int(of_code[i]) for i in np.flatnonzero((of_code > 0) & (of_code < RARE))},
        "codes_only_in_validation": {codes[i]: int(of_code[i]) for i in unseen} if in_part[0].any() else {},
        "length": _percentiles(lengths),
    }


def _percentiles(lengths: np.ndarray) -> dict:
    """Of rows of each length (int64 [longest + 1]): mean, percentiles (the smallest length that so many rows
    do not exceed), max.
    """
    rows = int(lengths.sum())
    if not rows:
        return {}
    upto = np.cumsum(lengths)
    at = {f"p{share}": int(np.searchsorted(upto, -(-rows * share // 100))) for share in PERCENTILES}
    present = np.flatnonzero(lengths)
    return {
        "mean": round(float(lengths @ np.arange(len(lengths))) / rows, 2),
        "min": int(present[0]),
        **at,
        "max": int(present[-1]),
    }


def make_report(
    parts: list[WrittenPart],
    split: bool,
    read: list[str],
    files: list[dict],
    findings: Findings,
    codes: list[str],
    languages: list[str],
    conflicts_file: str,
) -> dict:
    """Everything that was found, as plain types. split: whether the parts were made from the same files by
    the texts; read: what was read and how, in lines for people.
    """
    with_rows = {part.part: part.rows for part in parts}
    rejected = sum(findings.rejected.values())
    return {
        "read": read,
        "rows": sum(with_rows.values()) + rejected + sum(findings.errors.values()),
        "train_rows": with_rows["train"],
        "val_rows": with_rows["val"],
        "rejected_rows": rejected,
        "rejected": dict(findings.rejected),
        "unusable_rows": sum(findings.errors.values()),
        **{kind: findings.notes[kind] for kind in NOTES},
        **compare_rows(parts, split, [file["path"] for file in files], codes, languages, conflicts_file),
        **describe_parts(parts, codes, languages),
        "files": files,
        "problems": findings.problems(),
    }


def report_lines(report: dict) -> list[str]:
    """A report as lines for people; what did not happen is not said."""
    lines = [*report["read"], *_what_there_is(report), *_notes(report)]
    for problem in report["problems"]:
        if problem["action"] == "noted":
            lines.append(f"Note: {problem['rows']:,} {NOTES[problem['kind']]}{_where(problem)}")
    if report["rejected_rows"]:
        lines.append(f"Note: {report['rejected_rows']:,} rows rejected, listed in rejected_rows.csv")
        lines += [
            f"  {problem['rows']:,} × {problem['kind']}{_where(problem)}"
            for problem in report["problems"]
            if problem["action"] == "rejected"
        ]
    return lines


def _what_there_is(report: dict) -> list[str]:
    """Rows, texts, lengths, codes and languages."""
    unusable = (
        f", {report['unusable_rows']:,} that stop the run; what follows is without them"
        if report["unusable_rows"]
        else ""
    )
    lines = [
        f"Rows: {report['rows']:,} read, {report['train_rows']:,} for training, {report['val_rows']:,} for"
        " validation" + unusable,
        (
            f"Texts: {report['distinct_texts']:,} distinct; {report['duplicates']:,} rows repeat an earlier"
            " one (text, language and codes)"
        ),
    ]
    if report["length"]:
        lines.append(
            "Length in characters: "
            + ", ".join(f"{name} {value:,}" for name, value in report["length"].items())
        )
    codes = [
        f"Codes: {report['codes_used']:,} used"
        + (f" of {report['codes']:,} in the key" if report["codes"] > report["codes_used"] else "")
        + f", {len(report['rare_codes']):,} of them in fewer than {RARE} rows"
        + "".join(
            f"; rows with {n} {'code' if n == '1' else 'codes'}: {count:,}"
            for n, count in report["codes_per_row"].items()
        )
    ]
    return [
        *lines,
        *(codes if report["codes"] else []),
        "Languages: "
        + (", ".join(f"{name} {count:,}" for name, count in report["languages"].items()) or "none"),
    ]


def _notes(report: dict) -> list[str]:
    """What is remarkable about the data as a whole."""
    lines = [
        f"Note: {os.path.basename(file['path'])} {note}" for file in report["files"] for note in file["notes"]
    ]
    if report["unpublished_languages"]:
        lines.append(
            "Note: languages that the published models were not trained on: "
            + ", ".join(
                name + (f" ({USUAL_NAMES[name.casefold()]} there)" if name.casefold() in USUAL_NAMES else "")
                for name in report["unpublished_languages"]
            )
            + f". They know {' '.join(LANGUAGES)}; a model that is trained on others learns them as they"
            " stand"
        )
    if report["conflicts"]:
        lines.append(
            f"Note: texts that are coded differently in different rows: {report['conflicts']:,}, listed in"
            " conflicts.csv"
        )
    if report["codes_only_in_validation"]:
        unseen = report["codes_only_in_validation"]
        lines.append(
            f"Note: codes that occur in validation rows alone: {len(unseen):,} (rows:"
            f" {sum(unseen.values()):,}), which the model cannot learn"
        )
    if report["val_rows_seen_in_training"]:
        share = report["val_rows_seen_in_training"] / report["val_rows"]
        lines.append(
            f"Note: {report['val_rows_seen_in_training']:,} validation rows ({share:.0%}) have a text that is"
            " also trained on; their accuracy flatters the model"
        )
    return lines


def _where(problem: dict) -> str:
    lines: dict[str, list[str]] = {}
    for first in problem["first"]:
        lines.setdefault(os.path.basename(first["file"]), []).append(f"{first['line']:,}")
    places = [f"{name} line{'s' * (len(found) > 1)} {', '.join(found)}" for name, found in lines.items()]
    return f" ({'; '.join(places)}{' …' if problem['rows'] > len(problem['first']) else ''})"
