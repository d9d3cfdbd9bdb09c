"""Coding of texts with a trained model, shared by `histocc predict` and `OccCANINE`."""

import contextlib
import functools
import itertools
import os
import shlex
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from histocc.data import several
from histocc.data.arrays import PreparedData, fault, text_keys
from histocc.data.config import text_columns
from histocc.data.learned import hashes_of, keys_of
from histocc.data.records import MODEL
from histocc.data.rows import language_name
from histocc.formatter import PAD_IDX, BlockyFormatter
from histocc.model import decoding
from histocc.model.confidence import Confidence, Thresholds, probability_of_set
from histocc.model.int8 import to_int8
from histocc.model.levels import Levels, map_of
from histocc.model.mixer import Seq2SeqMixerOccCANINE
from histocc.model.search import CodeSearch, CodeTrie
from histocc.predict.decoders import BY_THRESHOLD, DECODERS, MEASURED, MODEL_PARTS, in_series
from histocc.published import models
from histocc.published.formats import Given
from histocc.runtime.device import Precision
from histocc.runtime.errors import UserError, memory_error_ends_with
from histocc.runtime.files import OwnFiles, checksum, read_sealed, write_sealed
from histocc.runtime.world import World
from histocc.text import COLUMN_SEPARATOR, UNKNOWN_LANGUAGE, cleaner, encode

Nearest = Callable[[Tensor], list[list[tuple[str, str]]]]
COMPARED_TEXTS = 200_000  # most distinct training texts that --explain compares, spread over the rows
TRAINED, LISTED = "trained", "list"
SIMILAR_TEXTS = 3  # similar texts shown for each text
MAX_CHARACTERS = 1 << 16  # in a batch of long texts
# lowest conf of each part of a split text, the second if words separate the parts, as they do in titles
PART_CONF = 0.3, 0.5
VECTORS = "training_vectors.bin"  # in the folder of the run
FIRST_USE = threading.RLock()  # held by the thread that makes what all threads of the model share


class Coded(NamedTuple):
    """The answer to a text: at most k codes and their probabilities. conf is the probability that exactly
    these codes are right, for greedy in any order, or in this one if there are more than six. With topk and
    full it is that of the best code. Once fitted, it is how often such answers are right. It is None for an
    empty text, or if a model with n-grams knows none that has a letter. Such texts get no codes.
    """

    codes: list[str]
    probs: list[float]
    conf: float | None
    similar: list[tuple[str, str]] = []  # see `training_examples`
    choices: list[tuple[str, float]] = []  # the most probable codes
    levels: list[float] = []  # conf at the levels that flat was asked for, [] without codes
    # or TRAINED if training rows have this text, LISTED if a list has it, or KNOWN
    source: str = MODEL
    draws: list[str] = []  # cells of `Draws`


class Coder:
    """A model with its formatter and key. Texts are cleaned with its rule. A text of blanks gets no code.

    Args:
        model, formatter, state: as `models.load_model` returns them.
        check: called between batches. Its exception ends the coding.
        raw_confidence: probabilities are the decoders' own, without the checkpoint's fit.
        choices: number of `Coded.choices`, from the linear decoder, or from `both` if that is the decoder.
        split_texts: split a text of several occupations if training rows show that each has a code.
    """

    def __init__(
        self,
        model: Seq2SeqMixerOccCANINE,
        formatter: BlockyFormatter,
        state: dict,
        *,
        batch_size: int = 256,
        precision: Precision | None = None,
        check: Callable[[], None] | None = None,
        raw_confidence: bool = False,
        choices: int = 0,
        split_texts: bool = True,
    ):
        self.model, self.formatter, self.batch_size, self.check = model, formatter, batch_size, check
        self.choices = choices
        self.precision = precision or Precision("float32")
        self.model.to(self.precision.dtype)
        if self.precision.name == "int8":
            to_int8(self.model)
        self.device = next(model.parameters()).device
        self.codes, self.step = list(state["key"]), state.get("step")
        self.levels = Levels(self.codes, formatter)
        self.languages = list(dict.fromkeys([*state["languages"], UNKNOWN_LANGUAGE]))
        self.system = state.get("system") or models.system_name(formatter)
        self.kind = state.get("kind", "mixer")
        parts = MODEL_PARTS[self.kind]
        self.decoders = [name for name, decoder in DECODERS.items() if decoder.needs <= parts]
        self.data_fingerprint = str(state.get("position", {}).get("fingerprint"))
        args = state.get("args") or {}
        self.input_cols = text_columns(args.get("input_col")) if args else []
        self.language: str | None = args.get("language")  # of the training
        self.language_col: str | None = args.get("language_col")
        self.repair_text = bool(args.get("repair_text"))
        self.text_rule, self.max_len = state["config"]["text"], state["config"]["max_len"]
        self.clean = cleaner(self.text_rule)
        self.thresholds = Thresholds.of(state)  # used if none are given
        fitted, self.raw_confidence = Confidence.of(state), raw_confidence
        self.confidence = Confidence() if raw_confidence else fitted
        self.best_decoder, self.why_best = fitted.best_decoder(self.kind, model.ngrams is not None)
        # share of the linear decoder in topk and full, 0…1
        self.linear_share = (state.get("linear_share") or 0.0) if self.kind == "mixer" else 0.0
        self.is_published = state.get("source") == "published"
        self.prior: Coder | None = None  # of a model in closed form
        if held := state.get("prior"):
            loaded = models.model_of_checkpoint(f"the prior {held['name']}", held)
            self.prior = Coder(*loaded, batch_size=batch_size, precision=precision, raw_confidence=True)
            self.prior.model.to(self.device)
        self.trained: tuple[np.ndarray, ...] | None = None  # keys, codes and conf of its training texts
        if held := None if raw_confidence else state.get("answers"):
            self.trained = tuple(held[name].numpy() for name in ("keys", "codes", "conf"))
        self.known_texts = np.array([])  # hashes of unsplit texts, which may be parts of others
        if split_texts and state.get("splits") and not raw_confidence:
            self.known_texts = np.union1d(several.listed_hashes(self.text_rule), state["trained"])
        self.nearest: Nearest | None = None  # makes `Coded.similar`, see `training_examples`
        self._search: CodeSearch | None = None

    @classmethod
    def load(cls, path: str, given: Given = Given(), **options) -> "Coder":
        """Load a run, checkpoint, exported or published model. `given` is for the last. Raises UserError."""
        return cls(*models.load_model(path, given=given), **options)

    def need(self, decoder: str) -> None:
        """Raise UserError if the model has no such decoder."""
        if decoder not in self.decoders:
            lacks = "has only the linear decoder" if self.kind == "flat" else "has no linear decoder"
            remedy = (
                "name no decoder. With --seq2seq-weight 0.1 a model also learns to write codes, but in"
                " steps and without a prior, which is worse with few labels"
            )
            remedy = remedy if self.kind == "flat" else f"use {in_series(self.decoders, 'or')}"
            raise UserError(f"decoder {decoder}: this model {lacks}; {remedy}")

    @property
    def room(self) -> int:
        """The number of codes that a row of the training data had room for."""
        if self.formatter.kind in ("hisco", "occ1950"):  # these always write five or two
            return max(len(self.formatter.target_cols), self.thresholds.at_most or 1)
        return self.formatter.max_num_codes

    def need_fitted(self, flag: str, maps: Iterable[str], model: str) -> None:
        """Raise UserError if the maps of confidence that a flag needs are not fitted."""
        if not {*maps} <= {*self.confidence.maps}:
            new = " --output NEW (then use --model NEW)" * models.is_shared(model)
            raise UserError(
                f"{flag}: how often {model} is right is not known. Measure it on 200 coded texts that it was"
                f" not trained on: histocc evaluate CODED.csv --model {shlex.quote(model)}"
                f" --fit-confidence{new}"
            )

    def asked_levels(self, level: str, decoder: str, model: str) -> list[str]:
        """Return the levels to try for an answer, the deepest first. Raises UserError."""
        if decoder != "flat":
            what = f"--level needs the probabilities of the linear decoder, but the decoder is {decoder} here"
            lacks = "this model has none, so it answers with whole codes only"
            raise UserError(f"{what}: {'give --decoder flat' if 'flat' in self.decoders else lacks}")
        asked = self.levels.asked(level)
        if not self.raw_confidence:
            maps = ["flat" if level == self.levels.whole else map_of(level) for level in asked]
            self.need_fitted("--level without --raw-confidence", maps, model)
        return asked

    @property
    def fitted_levels(self) -> list[str]:
        """Return the levels with a fitted confidence, the whole code first, or [] if there are none."""
        found = [level for level in self.levels.names if map_of(level) in self.confidence.maps]
        return [self.levels.whole, *found] if found else []

    def most_codes(self, decoder: str) -> int:
        """Return the most codes that the decoder can give a text."""
        return self.formatter.max_num_codes if "writing" in DECODERS[decoder].needs else len(self.codes)

    def known(self, language: str) -> str:
        """Return the model's name of a language in any case, region and spelling, or unk."""
        if language.strip() in self.languages:
            return language.strip()
        named = {language_name(name): name for name in self.languages}
        return named.get(language_name(language), UNKNOWN_LANGUAGE)

    def code(
        self,
        texts: list[str],
        languages: list[str],
        decoder: str = "auto",
        k: int = 5,
        threshold: float | dict[str | None, float] | None = None,
        cleaned: bool = False,
        in_any_order: bool = True,
        levels: Sequence[str] = (),
    ) -> list[Coded]:
        """Return the codes of each text. The same text in the same language is coded once.

        Args:
            decoder: auto, or a name in DECODERS.
            languages: one per text.
            k: most codes of a text.
            threshold: the linear decoder's, by language (None: all others) or one number. None: the model's.
            cleaned: whether `clean` was applied to the texts.
            in_any_order: False: conf of greedy is the probability of the tokens in the order written.
            levels: the levels of `Coded.levels`, for flat.

        Raises:
            UserError: the model has no such decoder.
        """
        decoder = self.best_decoder if decoder == "auto" else decoder
        self.need(decoder)
        thresholds = self.thresholds.with_given(threshold)
        settings = {"k": k, "thresholds": thresholds, "in_any_order": in_any_order, "levels": levels}

        def batch(ids: Tensor, mask: Tensor, languages: list[str], answers: Tensor | None) -> list[Coded]:
            inputs = {"languages": languages, "answers": answers, **settings}
            coded = getattr(self, f"_{decoder}")(ids, mask, **inputs)
            if self.choices and decoder not in BY_THRESHOLD:
                linear = self._flat(ids, mask, **inputs)
                coded = [one._replace(choices=other.choices) for one, other in zip(coded, linear)]
            if self.nearest is not None:
                similar = self.nearest(self.model.encode_text(ids, mask, answers).joined())
                coded = [one._replace(similar=texts) for one, texts in zip(coded, similar)]
            return [one if known else Coded([], [], None) for one, known in zip(coded, self._are_known(ids))]

        def answers(texts: list[str], languages: list[str]) -> list[Coded]:
            coded = self.map_texts(texts, languages, batch, Coded([], [], None))
            return self._with_trained(texts, languages, coded, k, levels)

        rows = list(zip(texts, languages, strict=True))
        places = {row: i for i, row in enumerate(dict.fromkeys(rows))}
        texts, languages = ([row[i] for row in places] for i in (0, 1))
        texts = texts if cleaned else list(map(self.clean, texts))
        is_fitted = decoder in {*MEASURED} & {*self.confidence.maps}
        known = self.known_texts if is_fitted else np.array([])
        parts = several.parts_of_texts(texts, known, self.text_rule)
        names = (name for name, some in zip(languages, parts) for _ in some)
        coded, further = answers(texts, languages), iter(answers([*itertools.chain(*parts)], [*names]))
        of_parts = [list(itertools.islice(further, len(some))) for some in parts]
        joined = [self._joined(*one, k) for one in zip(coded, texts, parts, of_parts)]
        return [joined[places[row]] for row in rows]

    def _joined(self, whole: Coded, text: str, names: list[str], parts: list[Coded], k: int) -> Coded:
        """Return the answers to the parts of a text, `names`, as one, with their lowest conf. If it is below
        PART_CONF or all codes are in one group ("sergeant, royal artillery"), the whole text's answer stays.
        """
        pairs = [pair for one in parts for pair in zip(one.codes, one.probs)]
        codes, probs = list(dict(pairs)), dict(reversed(pairs))
        conf = min((one.conf or 0.0 for one in parts), default=0.0)
        has_word = sum(map(str.isalpha, text)) > sum(map(str.isalpha, "".join(names)))  # between parts
        groups = {code[:3] for code in codes}
        if conf < PART_CONF[has_word] or len(groups) < 2 or min(groups) < "0":  # -1, -2, -3: no occupation
            return whole
        choices = [(code, probs[code]) for code in codes]
        choices += (pair for pair in whole.choices if pair[0] not in probs)
        return whole._replace(
            codes=codes[:k],
            probs=[probs[code] for code in codes[:k]],
            conf=conf,
            choices=choices[: self.choices],
            levels=[min(confs) for confs in zip(*(one.levels for one in parts))],
        )

    def _with_trained(
        self, texts: list[str], languages: list[str], coded: list[Coded], k: int, levels: Sequence[str]
    ) -> list[Coded]:
        """Return the answers. If the training knows a text, these are the most frequent codes of its rows,
        with the probability that a further row has them. A list gives the code and sometimes no probability.
        Then that of the model's answer is taken.
        """
        if self.trained is None:
            return coded
        keys, codes, conf = self.trained
        hashes = hashes_of([*texts, ""], self.text_rule)
        language = np.array([self.languages.index(self.known(name)) for name in languages], dtype=np.int64)
        own = keys_of(hashes[:-1], language)
        places = np.searchsorted(keys, own).clip(max=len(keys) - 1)
        for i in np.flatnonzero((keys[places] == own) & (hashes[:-1] != hashes[-1])):
            one, sure, source = coded[i], float(conf[places[i]]), TRAINED
            if np.isnan(sure):
                sure, source = one.conf or 0.0, LISTED
            names = [self.codes[j] for j in codes[places[i]] if j >= 0][:k]
            others, left = [(code, prob) for code, prob in one.choices if code not in names], 1 - sure
            # if texts have one code each, the probabilities sum to at most 1
            total = sum(prob for _, prob in others) if self.thresholds.at_most == 1 else 0.0
            share = left / max(left, total, 1e-12)
            best = [*((code, sure) for code in names), *((code, min(share * p, left)) for code, p in others)]
            confs = [  # at higher levels the model may support the training's codes
                max(sure, of_model)
                if level != self.levels.whole and self.levels.agree(level, names, one.codes)
                else sure
                for level, of_model in zip(levels, one.levels or [0.0] * len(levels))
            ]
            probs, best = [sure] * len(names), best[: self.choices]
            coded[i] = Coded(names, probs, sure, one.similar, best, confs, source)
        return coded

    def probabilities(
        self,
        texts: list[str],
        languages: list[str],
        decoder: str = "flat",
        logits: bool = False,
        cleaned: bool = False,
    ) -> np.ndarray:
        """Return the probability of every code of `codes` as in `Coded`, float32 [texts, codes], or NaN if
        its conf is None. decoder: flat or full. logits: return the linear decoder's output instead (flat
        only). cleaned: whether `clean` was applied to the texts.
        """
        self.need(decoder)

        def batch(ids: Tensor, mask: Tensor, answers: Tensor | None) -> Tensor:
            if decoder == "full":
                outputs = self.confidence.ranked(self.search().full(ids, mask))
            else:
                outputs = self._linear_logits(ids, mask, answers)
                outputs = outputs if logits else self._mapped_outputs(outputs)
            return outputs.masked_fill(~self._are_known(ids)[:, None], np.nan)

        return self._array(texts, languages, len(self.codes), batch, cleaned)

    def answers(self, texts: list[str], languages: list[str]) -> Tensor:
        """Return the probabilities of all codes that a model in closed form uses as its prior's answers,
        float32 [texts, codes] on the device, 0 for an empty text.
        """
        decoder = "flat" if "flat" in self.decoders else "full"
        probs = np.nan_to_num(self.probabilities(self.read(texts), languages, decoder))
        return torch.from_numpy(probs).to(self.device)

    def read(self, texts: list[str]) -> list[str]:
        """Return the columns that a prior reads: the first, unless it was trained on several."""
        if len(self.input_cols) > 1:
            return texts
        return [text.partition(COLUMN_SEPARATOR)[0] for text in texts]

    def embeddings(self, texts: list[str], languages: list[str]) -> np.ndarray:
        """Return the encoder's pooled output, zeros without an encoder, followed by the vector of the text's
        n-grams if the model has them, float32 [texts, width], NaN for an empty text.
        """
        width = self.model.config.hidden_size
        width += self.model.ngrams.width if self.model.ngrams is not None else 0
        return self._array(texts, languages, width, lambda *text: self.model.encode_text(*text).joined())

    def search(self) -> CodeSearch:
        """Return the search, made at first use. Raises UserError if the key does not fit the formatter."""
        with FIRST_USE:
            if self._search is not None:
                return self._search
            try:
                with torch.autocast(self.device.type, enabled=False):
                    tree = CodeTrie(self.codes, self.formatter)
                    self._search = CodeSearch(self.model, tree, self.linear_share)
            except ValueError as error:
                raise UserError(f"the key does not fit formatter {self.formatter.kind}: {error}") from None
            return self._search

    def _array(
        self, texts: list[str], languages: list[str], width: int, batch: Callable, cleaned: bool = False
    ) -> np.ndarray:
        """Return `batch(ids, mask, answers)` for each text, float32 [texts, width], NaN for an empty one."""

        def rows(ids: Tensor, mask: Tensor, _, answers: Tensor | None) -> list[np.ndarray]:
            return list(batch(ids, mask, answers).float().cpu().numpy())

        texts = texts if cleaned else list(map(self.clean, texts))
        arrays = self.map_texts(texts, languages, rows, np.full(width, np.nan, dtype=np.float32))
        return np.stack(arrays) if arrays else np.empty((0, width), dtype=np.float32)

    def map_texts(self, texts: list[str], languages: list[str], batch: Callable, nothing: Any) -> list:
        """Return `batch(ids, mask, languages, answers)` for each cleaned text, `nothing` for an empty one.
        The texts of a batch have similar lengths. answers: the prior's.
        """
        rows = list(zip(texts, map(self.known, languages), strict=True))
        results = dict.fromkeys(rows, nothing)
        left = sorted((row for row in results if row[0].strip()), key=lambda row: len(row[0]) + len(row[1]))
        width = None if self.model.memory_mask else self.max_len
        size, start = self.batch_size, 0  # another thread may set it
        advice = f" with --batch-size {size}: choose a smaller one"
        while start < len(left):
            if self.check is not None:
                self.check()
            part = left[start : start + size]
            while len(part) > 1 and len(part) * len(part[-1][0]) > MAX_CHARACTERS:
                part = part[: len(part) // 2]
            start += len(part)
            texts, languages = map(list, zip(*part))
            answers = None if self.prior is None else self.prior.answers(texts, languages)
            arrays = encode(texts, languages, self.max_len, width)
            ids, mask = (torch.from_numpy(array).to(self.device) for array in arrays)
            with self.precision.autocast(), decoding.evaluating(self.model), memory_error_ends_with(advice):
                results.update(zip(part, batch(ids, mask, languages, answers)))
        return [results[row] for row in rows]

    def _are_known(self, ids: Tensor) -> Tensor:
        """Return whether the model knows an n-gram of each text, bool [B]. True if it has no n-grams."""
        ngrams = self.model.ngrams
        return ids.new_ones(len(ids), dtype=torch.bool) if ngrams is None else ngrams.know(ids)

    def known_ngrams(self, texts: list[str], languages: list[str]) -> float:
        """Return the mean share of the n-grams of cleaned texts that the model knows (`Ngrams.known_share`).
        It is 0 without n-grams or without texts.
        """
        ngrams = self.model.ngrams
        if ngrams is None:
            return 0.0

        def batch(ids: Tensor, *_) -> list[float]:
            return ngrams.known_share(ids).tolist()

        shares = self.map_texts(texts, languages, batch, None)
        return float(np.mean([share for share in shares if share is not None] or [0.0]))

    def _linear_logits(self, ids: Tensor, mask: Tensor, answers: Tensor | None) -> Tensor:
        return decoding.upcast_half(self.model.classify(self.model.encode_text(ids, mask, answers)))

    def _mapped_outputs(self, logits: Tensor) -> Tensor:
        """Return the probabilities of all outputs [B, N] from their logits."""
        first = probability_of_set(logits, logits.amax(1, keepdim=True), torch.ones_like(logits[:, 0]))
        conf = self.confidence.mapped("flat", first)
        return self.confidence.outputs(logits.sigmoid(), conf, logits.shape[1])

    def _topk(self, ids: Tensor, mask: Tensor, k: int, by_all: bool = False, **_) -> Iterator[Coded]:
        numbers, probs = self.search().topk(ids, mask, k, by_all)
        probs = self.confidence.ranked(probs)
        return self._first(numbers, probs, torch.full((len(probs),), k), probs[:, 0])

    _full = functools.partialmethod(_topk, by_all=True)

    def _greedy(self, ids: Tensor, mask: Tensor, k: int, in_any_order: bool, **_) -> Iterator[Coded]:
        blocks, probs, sets = decoding.greedy_sets(self.model, ids, mask, self.formatter, in_any_order)
        sets = self.confidence.mapped("greedy", sets, (blocks != PAD_IDX).any(-1).sum(1) > 1)
        probs = self.confidence.mapped("greedy", probs)
        code_of = functools.cache(self.formatter.decode_block)
        for row, of_row, conf in zip(blocks.tolist(), probs.tolist(), sets.tolist()):
            codes = [code_of(tuple(block)) for block in row]
            written = [(code, prob) for code, prob in zip(codes, of_row) if code is not None][:k]
            yield Coded([code for code, _ in written], [prob for _, prob in written], conf)

    def _both(
        self, ids: Tensor, mask: Tensor, languages: list[str], k: int, thresholds: Thresholds, **_
    ) -> Iterator[Coded]:
        codes, scores, logits = self.search().candidates(ids, mask)
        counts = self._counts(logits.topk(codes.shape[1]).values.sigmoid(), languages, thresholds)
        probs = scores.log_softmax(1).exp()
        conf = probs.gather(1, counts.clamp(1, probs.shape[1])[:, None] - 1)[:, 0]  # the last code's
        conf, probs = self.confidence.mapped("both", conf, counts > 1), self.confidence.ranked(probs)
        return self._first(codes, probs, counts.clamp(max=k), conf)

    def _flat(
        self,
        ids: Tensor,
        mask: Tensor,
        languages: list[str],
        k: int,
        thresholds: Thresholds,
        answers: Tensor | None,
        levels: Sequence[str],
        **_,
    ) -> Iterator[Coded]:
        logits = self._linear_logits(ids, mask, answers)
        logit, codes = logits.topk(min(max(k, self.choices), logits.shape[1]))  # the most probable first
        prob = logit.sigmoid()
        counts = self._counts(prob[:, :k], languages, thresholds)
        raw = probability_of_set(logits, logit, counts)
        conf = self.confidence.mapped("flat", raw, counts > 1)
        prob = self.confidence.outputs(prob, conf, logits.shape[1])
        coded, of_levels = self._first(codes, prob, counts, conf), []
        for level in levels:
            of_level = self.levels.probability(level, logits, codes, counts, raw)
            of_level = self.confidence.mapped(map_of(level), of_level, counts > 1)
            of_levels.append((conf if level == self.levels.whole else torch.maximum(of_level, conf)).tolist())
        return (one._replace(levels=[*of_one]) for one, *of_one in zip(coded, *of_levels))

    def _counts(self, prob: Tensor, languages: list[str], thresholds: Thresholds) -> Tensor:
        """Return the number of codes of each text, int64 [B], from probabilities [B, N]."""
        least = torch.tensor(list(map(thresholds.least, languages)), device=prob.device, dtype=prob.dtype)
        return thresholds.number((prob > least[:, None]).sum(1))

    def _first(self, codes: Tensor, probs: Tensor, counts: Tensor, conf: Tensor) -> Iterator[Coded]:
        """Yield the first `counts` [B] of codes [B, N] with their probabilities, and the choices."""
        for row, of_row, count, sure in zip(codes.tolist(), probs.tolist(), counts.tolist(), conf.tolist()):
            best = [(self.codes[i], prob) for i, prob in zip(row[: self.choices], of_row)]
            yield Coded([self.codes[i] for i in row[:count]], of_row[:count], sure, choices=best)


def training_data(weights: str, fingerprint: str) -> PreparedData | None:
    """Return the prepared data of the run with these weights, or None if they are missing or damaged."""
    folder = os.path.join(os.path.dirname(weights), "prepared", fingerprint)
    if fault(folder) is None:
        with contextlib.suppress(OSError, ValueError, KeyError, UserError):
            return PreparedData.open(folder)
    return None


def kept_beside(weights: str, name: str, of: str, compute: Callable[[], bytes]) -> bytes:
    """Return the result of `compute` for a model. A file in the model's folder keeps it, unless the model is
    shared or cannot have one. of: what the result depends on. Rank 0 only.
    """
    folder = os.path.dirname(weights)
    path = os.path.join(folder, name)
    content = read_sealed(path, of)
    if content is None:
        content = compute()
        if not models.is_shared(weights):
            with contextlib.suppress(OSError):  # it is computed again
                OwnFiles(folder).claim(name)
                write_sealed(path, content, of)
    return content


def training_examples(coder: Coder, weights: str, world: World) -> Nearest:
    """Return a function that explains codes: for vectors [B, H] it finds the SIMILAR_TEXTS training texts
    with the highest cosine similarity, and the codes of their first rows, joined by &. Rank 0 computes the
    vectors of the training texts at first use and keeps them in the folder of the run, unless the model is
    shared. All ranks. Raises UserError if the rows are missing.
    """
    data, folder = training_data(weights, coder.data_fingerprint), os.path.dirname(weights)
    if data is None:
        what = f"--explain shows training rows, but {folder or '.'}/prepared does not hold them;"
        raise UserError(f"{what} repeat the training command with --prepare-only to prepare them again")
    train = data.train
    rows = np.sort(np.unique(text_keys(train.text_hash, train.language), return_index=True)[1])
    rows = rows[np.linspace(0, len(rows) - 1, min(len(rows), COMPARED_TEXTS)).astype(np.int64)]
    rows = rows[[bool(text.strip()) for text in train.strings(rows)]]
    texts = train.strings(rows)
    codes = ["&".join(data.codes[i] for i in row if i >= 0) for row in train.codes[rows].tolist()]

    def compute() -> bytes:
        world.print(f"Computing the vectors of training texts: {len(texts):,}")
        languages = [data.languages[i] for i in train.language[rows].tolist()]
        return normalize(torch.from_numpy(coder.embeddings(texts, languages))).numpy().tobytes()

    kept = world.run_on_main(lambda: kept_beside(weights, VECTORS, str(checksum(weights)), compute))
    vectors = np.frombuffer(bytearray(kept), dtype=np.float32)
    known = torch.from_numpy(vectors.reshape(len(texts), -1)).to(coder.device)  # [N, H]

    def nearest(vectors: Tensor) -> list[list[tuple[str, str]]]:
        with torch.autocast(vectors.device.type, enabled=False):
            similarity = normalize(vectors.float()) @ known.T  # [B, N]
        best = similarity.topk(min(SIMILAR_TEXTS, len(texts))).indices
        return [[(texts[i], codes[i]) for i in row] for row in best.tolist()]

    return nearest
