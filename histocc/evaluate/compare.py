"""Compare two models from their reports, on the texts in both that neither model has learned from:

histocc compare ./first/evaluation ./second/evaluation > comparison.md
"""

import csv
import json
import math
import os
import sys
from collections import Counter
from dataclasses import MISSING, dataclass
from typing import Any

import numpy as np

from histocc.evaluate.report import ANSWERS, BY_COLUMN, JSON, PARTS_BETWEEN, automatic, table
from histocc.figure import Z, is_right, names_of, percent
from histocc.formatter import SEP_VALUE, cut
from histocc.runtime.config import Config, Parser, flag
from histocc.runtime.errors import UserError, in_words, run_command
from histocc.runtime.log import counted
from histocc.text import text_key

Answer = dict[str, str]  # a row of answers.csv


def read_answers(folder: str) -> tuple[dict, list[tuple[tuple[str, ...], Answer]]]:
    """Return the report in a folder, and its answers, each with a key: the text without case and blanks, the
    codes, the language, and the text as written. Raises UserError.
    """
    try:
        with open(os.path.join(folder, JSON), encoding="utf-8") as file:
            report = json.load(file)
        with open(os.path.join(folder, ANSWERS), encoding="utf-8", newline="") as file:
            answers = list(csv.DictReader(file))
        return report, [((text_key(x["text"]), x["codes"], x["language"], x["text"]), x) for x in answers]
    except (OSError, ValueError, KeyError) as error:
        what = f"{folder}: holds no report with {ANSWERS}; make one with histocc evaluate ({in_words(error)})"
        raise UserError(what) from None


def difference(ahead: np.ndarray) -> list[float]:
    """Return the mean of paired differences of shares, float [n], with its 95 % interval (Bonett and Price,
    2012, doi 10.3102/1076998611411915), which is also valid for few or equal pairs.
    """
    n = len(ahead) + 2
    up, down = (float(np.maximum(each, 0).sum() + 1) / n for each in (ahead, -ahead))
    reach = Z * math.sqrt((up + down - (up - down) ** 2) / n)
    return [float(ahead.mean()), max(up - down - reach, -1.0), min(up - down + reach, 1.0)]


def right_at(answers: list[Answer], digits: int, separator: str | None) -> np.ndarray:
    """Return which answers are right with codes cut to a level, float [N]."""
    codes = ([x[name].split(SEP_VALUE) for x in answers] for name in ("codes", "predicted"))
    true, said = ([[cut(code, digits, separator) for code in some] for some in each] for each in codes)
    return np.array(list(map(is_right, said, true)), dtype=float)


def compare(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the comparison of the models of two reports, each with the decoder that it codes with, on texts
    that both have with the same codes and no model has learned from. A difference above 0 means that the
    second is ahead. first, second: folders. Raises UserError.

    Example:
        >>> from histocc.evaluate.compare import compare
        >>> found = compare("./output/evaluation", "./encoder/evaluation")
        >>> found["lines"][0]["label"], found["lines"][0]["texts"]
        ('all', 147)
    """
    folders = [os.fspath(first), os.fspath(second)]
    reports, answers = zip(*map(read_answers, folders))
    models = [report["model"] for report in reports]
    if models[0]["system"] != models[1]["system"]:
        what = " and ".join(f"{folder} has codes of {x['system']}" for folder, x in zip(folders, models))
        raise UserError(f"{what}: compare models with the same codes")
    learned = {key[0] for key, x in (*answers[0], *answers[1]) if x["learned"] == "1"}
    # the partner has the same language and writing, if one has
    others = {key[:most]: x for most in (2, 3, 4) for key, x in answers[1]}
    common = [(key, x) for key, x in answers[0] if key[:2] in others and key[0] not in learned]
    if not common:
        what = f"{' and '.join(folders)} have no text with the same codes that is new to both models"
        raise UserError(what)
    partners = [others.get(key) or others.get(key[:3]) or others[key[:2]] for key, _ in common]
    pairs = [[x for _, x in common], partners]
    text = np.unique([key[0] for key, _ in common], return_inverse=True)[1]
    times = np.array([float(x["rows"]) for x in pairs[0]])

    def line(label: str, right: list[np.ndarray], part: Any = slice(None)) -> dict[str, Any]:
        place, weight = np.unique(text[part], return_inverse=True)[1], times[part]
        a, b = (np.bincount(place, weight * x[part]) / np.bincount(place, weight) for x in right)
        shares = [float(a.mean()), float(b.mean())]
        return {"label": label, "texts": len(a), "right": shares, "difference": difference(b - a)}

    levels = [(next(iter(x["decoders"].values()))["by_digits"], x["levels"]) for x in reports]
    levels, unit = max(levels, key=lambda of_report: len(of_report[0]))
    lines, right = [], []
    separator = unit.removeprefix(PARTS_BETWEEN) if unit.startswith(PARTS_BETWEEN) else None
    for each in levels:
        right = [right_at(some, each["digits"], separator) for some in pairs]
        lines.append(line(f"{unit}: {each['digits']}", right))
    whole = lines.pop() | {"label": "all"}
    for name in ("language", *(name for name in pairs[0][0] if name.startswith(BY_COLUMN))):
        values = np.array([x[name] for x in pairs[0]])
        for value, number in Counter(values.tolist()).most_common():
            if number < len(values):
                lines.append(line(f"{name}: {value}", right, values == value))
    confs = (np.array([float(x["conf"]) for x in some]) for some in pairs)
    weight = times / np.bincount(text, times)[text]
    for each in zip(*(automatic(*of_model, weight) for of_model in zip(confs, right))):
        label = f"coded with at most {100 * each[0]['errors']:.0f} % wrong"
        lines.append({"label": label, "texts": whole["texts"], "right": [x["texts"] for x in each]})
    names = names_of([x["name"] for x in models])
    return {
        "models": names if names[0] != names[1] else folders,
        "reports": folders,
        "left_out": [len({key[0] for key, _ in each}) - whole["texts"] for each in answers],
        "is_new": all(x["learned"] for some in pairs for x in some),
        "rows": [float(times @ each / times.sum()) for each in right],
        "lines": [whole, *lines],
    }


def points(*values: float, sign: str = "+") -> list[str]:
    return [f"{100 * each:{sign}.1f}".replace("-", "−") for each in values]


def verdict(found: dict[str, Any]) -> str:
    """Return which model is ahead, in a sentence."""
    whole, names = found["lines"][0], found["models"]
    shares, (value, *bounds) = whole["right"], whole["difference"]
    if value < 0:
        names, shares, value, bounds = names[::-1], shares[::-1], -value, [-bound for bound in bounds[::-1]]
    ahead, low, high = points(value, *bounds, sign="-")
    chance = ", so this may be chance" * (bounds[0] <= 0)
    new = "that neither has learned from" if found["is_new"] else "(perhaps not new to both)"
    how = f"ahead of {names[0]} by {ahead} points" if value else f"as good as {names[0]}"
    return (
        f"{names[1]} is {how} (95 % interval {low} to {high}{chance}) on {counted(whole['texts'], 'text')}"
        f" {new}: {percent(shares[1])} against {percent(shares[0])}."
    )


def comparison_text(found: dict[str, Any]) -> str:
    """Return the text of a comparison."""
    names, rows = found["models"], []
    lines = ["# Comparison", "", f"**{verdict(found)}**", ""]
    lines += [f"- {name}: {folder}" for name, folder in zip(names, found["reports"])]
    if any(found["left_out"]):
        some = " and ".join(f"{number:,} of {name}" for number, name in zip(found["left_out"], names))
        lines.append(f"- Compared are the texts that both reports have with the same codes; left out: {some}")
    lines.append("- Of their rows, {} and {} respectively are right".format(*map(percent, found["rows"])))
    for each in found["lines"]:
        gap = "{} ({} to {})".format(*points(*each["difference"])) if "difference" in each else ""
        rows.append([each["label"], each["texts"], *(percent(x, "") for x in each["right"]), gap])
    return "\n".join([*lines, "", *table(["right, % of texts", "texts", *names, "difference, points"], rows)])


@dataclass(frozen=True, kw_only=True)
class CompareConfig(Config):
    """The flags of compare."""

    first: str = flag(MISSING, "folder of an evaluation", metavar="FIRST", positional=True)
    second: str = flag(
        MISSING, "folder of another evaluation on the same rows", metavar="SECOND", positional=True
    )


def run(args: CompareConfig) -> None:
    print(comparison_text(compare(args.first, args.second)))


def get_args_parser() -> Parser:
    what = "Compare two models evaluated on the same rows, with an interval of the difference."
    examples = "./first/evaluation ./second/evaluation", "./first/evaluation ./second/evaluation > it.md"
    return Parser(CompareConfig, "python -m histocc.evaluate.compare", what, *examples)


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: run(get_args_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
