"""What the decoders answered and what is right → the figures of an evaluation report, as plain types."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from histocc.data.arrays import PreparedData, RowSet
from histocc.data.rows import OUTSIDE_KEY
from histocc.evaluate import measures as report_metrics
from histocc.evaluate.answers import CANDIDATES, GRID, RANKED
from histocc.evaluate.coverage import Coverage
from histocc.evaluate.measures import SHARES, Candidates
from histocc.formatter import PAD_IDX, BlockyFormatter, cut

LEAST_ROWS = 100  # of a language, below which no threshold is chosen for it


@dataclass(frozen=True)
class Answers:
    """One decoder's codes for `n` rows. codes: every code that stands or was written anywhere; pred, true:
    (rows, numbers of `codes`). confidence float [n]: the probability of what `certain` bool [n] says is
    right of each row; None: that its whole set of codes is.
    """

    codes: list[str]
    n: int
    pred: tuple[np.ndarray, np.ndarray]
    true: tuple[np.ndarray, np.ndarray]
    confidence: np.ndarray
    certain: np.ndarray | None
    text: np.ndarray
    resamples: int
    seed: int

    def pairs(self, digits: int, separator: str | None) -> tuple[np.ndarray, np.ndarray]:
        """`distinct_pairs` of the predicted and of the true codes, cut to so many digits."""
        number, _ = report_metrics.numbered([cut(code, digits, separator) for code in self.codes])
        pred, true = (
            report_metrics.distinct_pairs(rows, number[codes]) for rows, codes in (self.pred, self.true)
        )
        return pred, true

    @cached_property
    def columns(self) -> np.ndarray:
        """`row_counts` of whole codes."""
        return report_metrics.row_counts(
            self.n, *(report_metrics.distinct_pairs(*pairs) for pairs in (self.pred, self.true))
        )

    @cached_property
    def sure(self) -> np.ndarray:
        """What confidence is about, bool [n]."""
        return self.columns[:, 1] > 0 if self.certain is None else self.certain

    def measured(self, columns: np.ndarray) -> dict:
        return report_metrics.measured(columns, self.text, self.resamples, self.seed)

    def by_digits(self, block_size: int, separator: str | None) -> list[dict]:
        return [
            {
                "digits": digits,
                **self.measured(report_metrics.row_counts(self.n, *self.pairs(digits, separator))),
            }
            for digits in range(1, block_size + 1)
        ]

    def by_language(self, language: np.ndarray, names: list[str]) -> dict:
        return {
            names[each]: self.measured(self.columns * (language == each)[:, None])
            for each in np.unique(language)
        }

    def by_major_group(self, separator: str | None) -> dict:
        """Groups of codes with the same first digit, those that stand in a row."""
        group_of, names = report_metrics.numbered([cut(code, 1, separator) for code in self.codes])
        pred, true = (report_metrics.distinct_pairs(*pairs) for pairs in (self.pred, self.true))
        right = self.columns[:, 1] > 0
        return {
            names[group]: self.measured(
                report_metrics.group_counts(self.n, pred, true, group_of, group, right)
            )
            for group in np.unique(group_of[self.true[1]])
        }

    def coverage(self, rows: RowSet, languages: list[str], separator: str | None) -> dict:
        """How many answers stay where so many of these are to be right: see `coverage.Coverage`."""
        group_of, names = report_metrics.numbered([cut(code, 1, separator) for code in self.codes])
        row, code = self.true
        of_group = {
            names[each]: np.isin(np.arange(self.n), row[group_of[code] == each])
            for each in np.unique(group_of[code])
        }
        language = np.asarray(rows.language)
        of_language = {languages[each]: language == each for each in np.unique(language)}
        found = Coverage(self.confidence, self.sure, np.asarray(rows.text_hash), self.measured)
        return {
            "curve": found.curve(),
            "targets": found.targets(),
            "by_language": found.by(of_language),
            "by_major_group": found.by(of_group),
        }

    def confusions(self, rows: RowSet) -> list[dict]:
        wrong = np.flatnonzero(self.columns[:, 1] == 0)
        place = {row: i for i, row in enumerate(wrong.tolist())}
        sets: tuple[list, list] = ([[] for _ in wrong], [[] for _ in wrong])
        for found, pairs in zip(sets, (self.true, self.pred)):
            for row, code in zip(*(values.tolist() for values in pairs)):
                if row in place:
                    found[place[row]].append(self.codes[code])
        true, pred = (["&".join(sorted(set(codes))) for codes in found] for found in sets)

        def text(i: int) -> str:
            return "".join(map(chr, rows.texts(wrong[i : i + 1])[0]))

        return report_metrics.confusions(true, pred, self.text[wrong], text)

    def report(
        self, formatter: BlockyFormatter, rows: RowSet, languages: list[str], outside_key: int
    ) -> dict:
        separator, right = formatter.within_block_sep, self.columns[:, 1] > 0
        over = 1 / np.bincount(self.text)[self.text]
        return {
            "right_rows": int(right.sum()),
            "accuracy": float(right.mean()),
            "accuracy_with_rows_outside_key": float(right.sum() / (self.n + outside_key)),
            "by_digits": self.by_digits(formatter.block_size, separator),
            "by_language": self.by_language(np.asarray(rows.language), languages),
            "by_major_group": self.by_major_group(separator),
            "calibration": report_metrics.calibration(self.confidence, self.sure, over),
            "coverage": self.coverage(rows, languages, separator),
            "confusions": self.confusions(rows),
        }


def written_codes(
    blocks: np.ndarray, formatter: BlockyFormatter, key: list[str]
) -> tuple[list[str], tuple[np.ndarray, np.ndarray]]:
    """Codes of canonical blocks [N, M, bs]: (the key and behind it what else was written, (rows, numbers of
    codes)).

    The seq2seq decoder writes digits, so a code need not be in the key.
    """
    row, column = np.nonzero((blocks != PAD_IDX).any(-1))
    kinds, number = np.unique(blocks[row, column], axis=0, return_inverse=True)
    codes, place = list(key), {code: i for i, code in enumerate(key)}
    of_kind = np.zeros(len(kinds), dtype=np.int64)
    for i, kind in enumerate(kinds):
        code = formatter.decode_block(kind)
        assert code is not None  # canonical blocks without a code are PAD
        if code not in place:
            place[code] = len(codes)
            codes.append(code)
        of_kind[i] = place[code]
    return codes, (row, of_kind[number.reshape(-1)])


def thresholds(counts: dict[int, np.ndarray], language: np.ndarray, names: list[str]) -> dict:
    """The best threshold of the linear decoder for each language with LEAST_ROWS rows, and for all rows
    together.
    """
    groups = {names[each]: (values, int((language == each).sum())) for each, values in counts.items()}
    chosen = {
        "all": (sum(counts.values()), len(language)),
        **{name: group for name, group in groups.items() if group[1] >= LEAST_ROWS},
    }
    return {
        name: {"rows": rows, **report_metrics.best_threshold(values, GRID)}
        for name, (values, rows) in chosen.items()
    }


def distinct_codes(codes: np.ndarray) -> np.ndarray:
    """int [N, K] with -1 instead of what stands in a row a second time, sorted."""
    codes = np.sort(np.asarray(codes), axis=1)
    again = np.pad(codes[:, 1:] == codes[:, :-1], ((0, 0), (1, 0)))
    return np.where(again, -1, codes)


@dataclass(frozen=True)
class Both:
    """What both decoders answer together, see `search`. share: of the linear decoder, fitted on all rows;
    halves: fitted on each half of the texts, of which the rows of the other half are counted; pred:
    as of `Answers`; best, worst: as of `report_metrics.top_k`, at most RANKED.
    """

    share: float
    halves: list[float]
    pred: tuple[np.ndarray, np.ndarray]
    best: np.ndarray
    worst: np.ndarray

    @classmethod
    def of(cls, found: dict, rows: RowSet) -> "Both":
        """From `Outcomes.gathered` with candidates. A row has as many codes as the linear decoder's set, at
        least one.
        """
        candidates = Candidates(
            found["both_codes"],
            found["both_written"],
            found["both_linear"],
            np.maximum(found["both_number"], 1),
        )
        true = distinct_codes(rows.codes)
        right = report_metrics.right_by_share(candidates, true)
        share, halves, half = report_metrics.fitted_shares(right, np.asarray(rows.text_hash))
        used = np.array(halves)[1 - half]  # [N], fitted on the other half
        order, scores = candidates.ranking(SHARES[used])
        codes, on = np.take_along_axis(candidates.codes, order, axis=1), candidates.answered(scores)
        hit = (true[..., None] == codes[:, None, :RANKED]) & (true >= 0)[..., None]  # [N, K, RANKED]
        place = np.where(hit.any(2), hit.argmax(2), RANKED)
        best = np.where(true >= 0, place, RANKED).min(1)
        worst = np.where(true >= 0, place, -1).max(1)
        row, column = np.nonzero(on)
        return cls(
            float(SHARES[share]),
            [float(SHARES[each]) for each in halves],
            (row, codes[row, column].astype(np.int64)),
            best,
            worst,
        )


def decoders_report(
    found: dict,
    formatter: BlockyFormatter,
    data: PreparedData,
    rows: RowSet,
    resamples: int,
    seed: int,
    kind: str = "mixer",
) -> dict:
    """{"seq2seq": …, "linear": …}: figures of the decoders that a model of this kind has, from
    `Outcomes.gathered` and the rows, those of `data` that were evaluated; "both", where that has candidates
    for it, with what `Both` says of the share. Rank 0 only.
    """
    key, languages, outside_key = data.codes, data.languages, data.report["rejected"].get(OUTSIDE_KEY, 0)
    true = np.nonzero(rows.codes >= 0)
    true = true[0], np.asarray(rows.codes)[true].astype(np.int64)
    text = np.unique(rows.text_hash, return_inverse=True)[1]
    codes, written = written_codes(found["seq_blocks"], formatter, key)

    def answers(
        names: list[str], pred: tuple, confidence: np.ndarray, sure: np.ndarray | None = None
    ) -> dict:
        each = Answers(names, len(rows), pred, true, confidence, sure, text, resamples, seed)
        return each.report(formatter, rows, languages, outside_key)

    seq = answers(codes, written, found["seq_confidence"])
    seq["codes_outside_key"] = int((written[1] >= len(key)).sum())
    linear = answers(key, (found["flat_rows"], found["flat_codes"]), found["flat_confidence"])
    linear["top_k"] = report_metrics.top_k(found["best"], found["worst"])
    seq["top_k"] = report_metrics.top_k(found["seq_best"], found["seq_worst"])
    linear["thresholds"] = thresholds(found["thresholds"], np.asarray(rows.language), languages)
    if kind != "mixer":
        return {"seq2seq": {"seq2seq": seq}, "flat": {"linear": linear}}[kind]
    if "both_codes" not in found:
        return {"seq2seq": seq, "linear": linear}
    together = Both.of(found, rows)
    both = answers(key, together.pred, found["both_confidence"], found["both_best_right"])
    both |= {
        "linear_share": together.share,
        "linear_share_of_halves": together.halves,
        "candidates": CANDIDATES,
        "top_k": report_metrics.top_k(together.best, together.worst),
    }
    return {"seq2seq": seq, "linear": linear, "both": both}
