"""Thresholds of the linear decoder: which outputs count as codes, by language.

In a checkpoint they are {"default": p, "by_language": {language: p}, "source": "published" or "fitted"};
without them 0.5 counts. With "at_least_one": true the most probable code of a row always counts, and further
ones above the threshold. With "at_most": n only the n most probable ones can: no training row had more codes.
"""

from typing import NamedTuple

from torch import Tensor

USUAL = 0.5

# Of the published models, by their program (Dahl, Johansen, Vedel, 2024, arXiv 2402.13604, and their
# package).
PUBLISHED = {
    "default": 0.31,
    "source": "published",
    "by_language": {
        "unk": 0.31,
        "ca": 0.30,
        "da": 0.24,
        "ge": 0.21,
        "en": 0.26,
        "es": 0.30,
        "fr": 0.21,
        "gr": 0.19,
        "is": 0.17,
        "it": 0.20,
        "nl": 0.22,
        "no": 0.34,
        "pt": 0.27,
        "se": 0.26,
    },
}


class Thresholds(NamedTuple):
    """by_language: language → probability, None for all others; source: "published", "fitted", "given" or
    "usual"; at_least_one: whether the most probable code of a row counts in any case; at_most: how many
    of the most probable codes of a row can count, None for all."""

    by_language: dict[str | None, float]
    source: str
    at_least_one: bool = False
    at_most: int | None = None

    @classmethod
    def of(cls, state: dict) -> "Thresholds":
        """Those that a checkpoint holds, else the usual one. Raises ValueError for what are none, and
        whatever else values of other types make it raise.
        """
        held = state.get("thresholds")
        if held is None:
            return cls({None: USUAL}, "usual")
        numbers = {None: held["default"], **held["by_language"]}
        most = held.get("at_most")
        if not all(0 <= number <= 1 for number in numbers.values()) or most is not None and int(most) < 1:
            raise ValueError(f"thresholds: found {held!r:.200}, expected probabilities by language")
        return cls(numbers, str(held["source"]), bool(held.get("at_least_one")), most and int(most))

    def with_given(self, given: float | dict[str | None, float] | None) -> "Thresholds":
        """The same with those that a user names: one number for all, or by language, where None stands for
        all others. `at_least_one` and `at_most` stay what they are."""
        if given is None:
            return self
        if not isinstance(given, dict):
            return self._replace(by_language={None: given}, source="given")
        numbers = given if None in given else {**self.by_language, **given}
        return self._replace(by_language=numbers, source="given")

    def least(self, language: str) -> float:
        """The threshold of a language."""
        return self.by_language.get(language, self.by_language[None])

    def number(self, above: Tensor) -> Tensor:
        """How many codes of a row count, the most probable first, where `above` of them are above the
        threshold; integers of any shape."""
        return above.clamp(int(self.at_least_one), self.at_most)

    def answered(self, logits: Tensor, place: Tensor, least: Tensor) -> Tensor:
        """Which outputs are answered, bool [B, C]: those of the `number` most probable. logits [B, C]; place:
        as `places` gives it; least [B]: log-odds of the threshold of each row.
        """
        return place < self.number((logits > least[:, None]).sum(1))[:, None]

    def __str__(self) -> str:
        others = self.by_language[None]
        named = [
            f"{language} {value:g}"
            for language, value in sorted(self.by_language.items(), key=str)
            if language is not None
        ]
        source = {
            "usual": "the usual one; evaluate --fit-thresholds finds better ones",
            "given": "as given",
        }.get(self.source, self.source)
        numbers = f"{', '.join(named)}, others {others:g}" if named else f"{others:g}"
        always = ", and in any case the most probable code" if self.at_least_one else ""
        most = f", at most {self.at_most} of a text" if self.at_most else ""
        return f"{numbers} ({source}){always}{most}"


def places(logits: Tensor) -> Tensor:
    """How many outputs of its row are more probable than each, int64 [B, C]; equal ones in their order."""
    return logits.sort(dim=1, descending=True, stable=True).indices.argsort(1)
