"""Draws of codes and expected scores, `--draws`, for analyses that take codes as uncertain (docs/draws.md).

If a model's confidence is fitted, a text gets either the answer (all its codes together) or alternatives:
other codes in proportion to their probabilities. If texts have one code each, one is drawn. If they may have
several, the sample is systematic: each code is drawn as often as its probability says, and the number of
codes is as near as possible to the sum of the probabilities. A draw depends only on its number, the text and
the language, so rows with the same text have the same draws: their true code is nearly always the same, and
they are right or wrong together.
"""

import numpy as np

from histocc.data.learned import hashes_of, keys_of
from histocc.formatter import hisco_classes
from histocc.predict.coder import TRAINED, Coded, Coder
from histocc.predict.decoders import DECODERS
from histocc.runtime.rng import draw, streams

# Alternatives of a text. They share the chance of all further codes: a true code further down the list is
# more like them than like other codes there, and scores from ten are the best calibrated in registers.
LISTED_DRAWS = 10
SEED = 1


class Draws:
    """Further columns: `number` draws and, for HISCO codes, the expected HISCAM and the probability of each
    value of some classes. The decoder's confidence must be fitted.
    """

    def __init__(self, coder: Coder, decoder: str, number: int, classes: list[str]):
        self.coder, self.number = coder, number
        self.is_set = bool(DECODERS[decoder].title)  # whether an answer is all of its codes, or the first
        self.map = DECODERS[decoder].confidence_of or decoder
        self.normal = np.random.default_rng(SEED).standard_normal((number, 2))
        self.values: dict[str, dict[str, float]] = {}  # column → code → the value that the column averages
        if coder.formatter.kind == "hisco":
            scores = hisco_classes()["hiscam"].items()
            self.values["expected_hiscam"] = {code: float(score) for code, score in scores if score}
        for name in (name for name in classes if name != "hiscam"):
            of_code = hisco_classes()[name]
            for value in sorted({*of_code.values()} - {""}, key=int):
                self.values[f"prob_{name}_{value}"] = {code: its == value for code, its in of_code.items()}
        self.columns = [*(f"draw_{i}" for i in range(1, number + 1)), *self.values]

    def cells(self, texts: list[str], languages: list[str], coded: list[Coded]) -> list[list[str]]:
        """Return the cells of `columns` for cleaned texts and their answers, [] without an answer."""
        coder, decoder = self.coder, "flat" if "flat" in self.coder.decoders else "full"
        probs = coder.probabilities(texts, languages, decoder, cleaned=True)
        language = np.array([coder.languages.index(coder.known(name)) for name in languages])
        stream = streams(SEED, 0, keys_of(hashes_of(texts, coder.text_rule), language))
        uniform = (draw(stream[:, None], np.arange(self.number)) >> np.uint64(11)) * 2.0**-53
        conf = np.array([one.conf or 0.0 for one in coded])
        limits = coder.confidence.redrawn(self.map, conf, self.normal)
        best, found = np.argsort(-probs, axis=1, kind="stable")[:, : LISTED_DRAWS + 1], []
        for i, one in enumerate(coded):
            others = {coder.codes[j]: float(probs[i, j]) for j in best[i]}
            limit = np.full(self.number, conf[i]) if one.source == TRAINED else limits[i]
            answer = one if self.is_set else one._replace(codes=one.codes[:1])
            found.append([] if one.conf is None else self.of_text(answer, others, uniform[i], limit))
        return found

    def certain(self, coded: Coded) -> list[str]:
        """Return the cells of a row with known codes, or [] if conf is None (a model gave them)."""
        if coded.conf is None:
            return []
        coded = coded._replace(codes=[*filter(None, coded.codes)])
        return self.of_text(coded, {}, np.zeros(self.number), np.ones(self.number))

    def of_text(
        self, one: Coded, probs: dict[str, float], uniform: np.ndarray, limits: np.ndarray
    ) -> list[str]:
        """Return the cells of a text. probs: those of the likeliest codes. uniform: one random number 0…1 for
        each draw [D]. limits: the probability of the answer in each draw [D].
        """
        conf, is_one = one.conf or 0.0, self.coder.thresholds.at_most == 1
        taken = dict.fromkeys(one.codes, 1.0 if is_one or one.source == TRAINED else conf)
        left = [max(p - taken.get(code, 0.0), 0.0) / max(1 - conf, 1e-9) for code, p in probs.items()]
        chance, codes = np.minimum(left, 1.0), [*probs]
        other = np.array([code not in taken for code in codes], dtype=bool)
        total = chance[other].sum()
        if is_less := chance.sum() < 1 or is_one:  # a text has a code
            chance[other] *= (1 - chance[~other].sum()) / max(total, 1e-9)
        ends, drawn = chance.cumsum(), ["&".join(one.codes)] * self.number
        for i in np.flatnonzero((uniform >= limits) & (total > 1e-9)):
            points = np.arange((uniform[i] - limits[i]) / (1 - limits[i]), ends[-1] - 1e-9)
            names = [codes[j] for j in np.searchsorted(ends, points, side="right")]
            if is_less and {*names} == {*one.codes}:  # `limits` already draws it as often as it is right
                names.append(codes[np.argmax(chance * other)])
            drawn[i] = "&".join(names)
        expected = dict(zip(codes, (1 - conf) * chance))
        expected |= {code: expected.get(code, 0.0) + conf for code in one.codes}
        for of_code in self.values.values():
            known = sum(p for code, p in expected.items() if code in of_code)
            mean = sum(p * of_code[code] for code, p in expected.items() if code in of_code) / (known or 1.0)
            drawn.append(f"{mean:.6g}" if 2 * known > sum(expected.values()) else "")
        return drawn
