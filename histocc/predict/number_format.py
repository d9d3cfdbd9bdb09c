"""In which number format a file is coded: as asked, or the fastest that gives the codes of float32. Some
texts of the file are coded in each, which takes about a second.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from histocc.predict.coder import Coded, Coder
from histocc.runtime.arguments import settings_of
from histocc.runtime.precision import Precision, PrecisionSettings, has_bfloat16, has_int8

AUTO = "auto"
CHOSEN_BY_TRIAL = (AUTO, "int8")  # the codes of these are compared with those of float32
FORMATS = ("float32", "float64", "bf16", "fp16", "int8")
TEXTS_AT_ONCE, MOST_TEXTS, SECONDS = 64, 512, 0.4  # of a trial in float32; others code the same texts
LEAST_SAME, MOST_APART = 0.995, 0.02  # share of texts with the codes of float32; mean difference of conf
LEAST_GAIN = 1.1  # times as fast as float32, to take another one

Code = Callable[[Coder, list[str], list[str]], list[Coded]]


class Trial(NamedTuple):
    """What came out in a format: texts per second, and of how many texts the codes were those of float32,
    with conf how far apart in the mean.
    """

    name: str
    rate: float
    texts: int
    same: int
    apart: float

    @property
    def keeps_codes(self) -> bool:
        return self.same >= LEAST_SAME * self.texts and self.apart <= MOST_APART

    def __str__(self) -> str:
        codes = "" if self.same == self.texts else f" ({self.texts - self.same} with other codes)"
        return f"{self.name} {self.rate:,.0f}{codes}"


def asked_format(args: argparse.Namespace, device) -> str:
    """One of FORMATS, or AUTO."""
    if args.precision is not None:
        return args.precision
    return "int8" if args.int8 else Precision.of(settings_of(PrecisionSettings, args), device).name


def candidates(device_type: str) -> list[str]:
    """The formats that `auto` tries beside float32."""
    found = ["bf16"] if has_bfloat16(device_type) else ["fp16"] if device_type == "cuda" else []
    return [*found, *(["int8"] if device_type == "cpu" and has_int8() else [])]


def tried(
    coder: Coder, names: Sequence[str], texts: list[str], languages: list[str], code: Code
) -> tuple[list[Trial], dict[str, Coder]]:
    """Trials of float32, in which `coder` computes, and of `names`; and the coder of each."""
    device = coder.device
    coders = {"float32": coder} | {name: coder.in_format(Precision(name, device)) for name in names}
    parts = [
        (texts[i : i + TEXTS_AT_ONCE], languages[i : i + TEXTS_AT_ONCE])
        for i in range(0, min(len(texts), MOST_TEXTS), TEXTS_AT_ONCE)
    ]
    number, answers, trials = 0, [], []
    for name, each in coders.items():
        code(each, *parts[0])  # takes memory and chooses kernels
        found, started = [], time.perf_counter()
        for part in parts if name == "float32" else parts[:number]:
            found += code(each, *part)
            if name == "float32":
                number += 1
                if time.perf_counter() - started > SECONDS:
                    break
        seconds = time.perf_counter() - started
        answers = answers or found
        same = sum(one.codes == other.codes for one, other in zip(answers, found))
        apart = [abs((one.conf or 0.0) - (other.conf or 0.0)) for one, other in zip(answers, found)]
        trials.append(
            Trial(name, len(found) / max(seconds, 1e-9), len(found), same, sum(apart) / max(1, len(apart)))
        )
    return trials, coders


def fastest(trials: list[Trial]) -> Trial:
    """The first of them, float32, or a faster one that keeps its codes."""
    plain, *others = trials
    able = [each for each in others if each.keeps_codes and each.rate >= LEAST_GAIN * plain.rate]
    return max(able, key=lambda each: each.rate, default=plain)


def words(chosen: Trial, trials: list[Trial], asked: str) -> str:
    """What is said of a choice, or of a format that was asked for."""
    plain = trials[0]
    if asked == AUTO:
        why = "the fastest that keeps the codes of float32"
        if chosen is plain:
            why = "since no other one that keeps the codes is faster"
        rates = ", ".join(map(str, trials))
        return f"Number format: {chosen.name}, {why} (texts/s in a trial of {plain.texts}: {rates})"
    agree = (
        f"{chosen.name}: in a trial {chosen.same:,} of {chosen.texts:,} texts get the codes of float32, with"
        f" conf {chosen.apart:.3f} apart in the mean, at {chosen.rate / plain.rate:.1f} times its rate"
    )
    if chosen.keeps_codes:
        return agree
    return (
        f"WARNING: {agree}; {LEAST_SAME:.1%} and at most {MOST_APART} are usual. --precision auto takes the"
        " fastest format that keeps the codes"
    )
