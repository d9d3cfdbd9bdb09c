"""What a prepared data set holds: sizes, languages, codes, lengths, duplicates, contradictions, problems."""

import os
from collections.abc import Iterator

import numpy as np

from histocc.data.arrays import RowSet
from histocc.data.rows import NOTES, OTHER_NAMES, WITH_VALUES, Findings, row_writer
from histocc.runtime.rng import mix
from histocc.text import LANGUAGES

RARE = 10  # a code in fewer rows than this is rare
PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
MAX_LENGTH = 1 << 20  # of descriptions that are told apart by length
_BUCKET = 1 << 21  # rows that are compared at once
_BLOCK = 1 << 18  # rows that are read at once


def _blocks(rows: RowSet) -> Iterator[slice]:
    for start in range(0, len(rows), _BLOCK):
        yield slice(start, start + _BLOCK)


def compare_rows(
    parts: list[RowSet],
    lines: list[np.ndarray],
    split: bool,
    files: list[str],
    codes: list[str],
    languages: list[str],
    path: str,
) -> dict:
    """Duplicates and contradictions among the rows of all parts; the contradictions are listed in `path`.

    Texts that differ only in case and blanks are one text. Works on a share of the texts at a time, so that
    memory does not grow with the rows.

    Args:
        lines: of each part, number of the file × 2**40 + line of each row.
        split: whether the parts were made of the same files by their texts.

    Returns:
        distinct_texts; duplicates: rows with the text, language and set of codes of an earlier one;
        conflicts: texts of a language that have several sets of codes; val_rows_seen_in_training: rows of val
        whose text is also in train (0 if the parts were split by text).
    """
    found = dict.fromkeys(("distinct_texts", "duplicates", "conflicts", "val_rows_seen_in_training"), 0)
    buckets = max(1, -(-sum(map(len, parts)) // _BUCKET))
    with open(path, "w", encoding="utf-8", newline="", errors="backslashreplace") as file:
        write_row = row_writer(file)
        write_row(["text", "language", "codes", "rows", "file", "line"])
        for bucket in range(buckets):
            # hashes of texts, of texts and languages, of sets of codes, and numbers (over all parts) of the
            # rows whose text falls into the bucket
            chosen, start = [[np.zeros(0, np.uint64)] * 3 + [np.zeros(0, np.int64)]], 0
            for part in parts:
                for block in _blocks(part):
                    inside = np.flatnonzero(part.text_hash[block] % np.uint64(buckets) == bucket)
                    text = part.text_hash[block][inside]
                    inputs = mix(text + mix(part.language[block][inside].astype(np.uint64)))
                    labels = np.zeros(len(inside), dtype=np.uint64)
                    for column in np.sort(part.codes[block][inside], axis=1).astype(np.uint64).T:
                        labels = mix(labels * np.uint64(3) + column)
                    chosen.append([text, inputs, labels, inside + start + block.start])
                start += len(part)
            texts, inputs, labels, rows = map(np.concatenate, zip(*chosen))
            _, first, counts = np.unique(inputs + mix(labels), return_index=True, return_counts=True)
            found["duplicates"] += len(rows) - len(first)
            found["distinct_texts"] += len(np.unique(texts[first]))
            if not split:
                val = rows >= len(parts[0])
                found["val_rows_seen_in_training"] += int(np.isin(texts[val], texts[~val]).sum())
            _, group, sizes = np.unique(inputs[first], return_inverse=True, return_counts=True)
            found["conflicts"] += int((sizes > 1).sum())
            total = np.bincount(group, weights=counts)
            several = np.flatnonzero(sizes[group] > 1)
            of_text = group[several]
            order = np.lexsort((rows[first[several]], -counts[several], of_text, -total[of_text]))
            for at in several[order]:
                number = int(rows[first[at]])
                in_val = number >= len(parts[0])
                number -= len(parts[0]) * in_val
                part = parts[in_val]
                source, line = divmod(int(lines[in_val][number]), 1 << 40)
                [text] = part.strings(np.array([number]))
                label = " ".join(codes[code] for code in part.codes[number] if code >= 0)
                write_row((text, languages[part.language[number]], label, counts[at], files[source], line))
    return found


def describe_parts(parts: list[RowSet], codes: list[str], languages: list[str]) -> dict:
    """Languages, codes per row, rare codes, lengths of descriptions in characters."""
    of_language = np.zeros(len(languages), dtype=np.int64)
    in_part = np.zeros((len(parts), len(codes)), dtype=np.int64)  # rows of each code
    per_row = np.zeros(parts[0].max_codes + 1, dtype=np.int64)
    lengths = np.zeros(MAX_LENGTH + 1, dtype=np.int64)  # rows of each length
    for part, counts in zip(parts, in_part):
        for block in _blocks(part):
            of_language += np.bincount(part.language[block], minlength=len(languages))
            numbers = part.codes[block]
            counts += np.bincount(numbers[numbers >= 0], minlength=len(codes))
            per_row += np.bincount((numbers >= 0).sum(axis=1), minlength=len(per_row))
            sizes = np.diff(part.offsets[block.start : block.stop + 1])
            lengths += np.bincount(np.minimum(sizes, MAX_LENGTH), minlength=len(lengths))
    of_code = in_part.sum(axis=0)
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
    parts: list[RowSet],
    lines: list[np.ndarray],
    split: bool,
    read: list[str],
    files: list[dict],
    findings: Findings,
    codes: list[str],
    languages: list[str],
    conflicts_file: str,
) -> dict:
    """Everything that was found, as plain types; see `compare_rows`. parts: of training, of validation; read:
    what was read and how, in lines for people.
    """
    paths, (train, val) = [file["path"] for file in files], map(len, parts)
    rejected, unusable = sum(findings.rejected.values()), sum(findings.errors.values())
    return {
        "read": read,
        "rows": train + val + rejected + unusable,
        "train_rows": train,
        "val_rows": val,
        "rejected_rows": rejected,
        "rejected": dict(findings.rejected),
        "unusable_rows": unusable,
        **{kind: findings.notes[kind] for kind in NOTES},
        **compare_rows(parts, lines, split, paths, codes, languages, conflicts_file),
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
                name + (f" ({OTHER_NAMES[name]} there)" if name in OTHER_NAMES else "")
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
    values = dict.fromkeys(first["value"].strip() for first in problem["first"])
    shown = ": " + ", ".join(map(repr, values)) if problem["kind"] in WITH_VALUES else ""
    return f" ({'; '.join(places)}{' …' if problem['rows'] > len(problem['first']) else ''}{shown})"
