"""Texts to codes, with a trained model: what `python -m histocc.predict` and `OccCANINE` have in common."""

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from histocc.data.rows import OTHER_NAMES, language_name
from histocc.formatter import PAD_IDX, BlockyFormatter, cut
from histocc.model import decoding
from histocc.model.confidence import OUTPUT, Confidence, Thresholds
from histocc.model.int8 import to_int8
from histocc.model.mixer import Seq2SeqMixerOccCANINE
from histocc.model.search import CodeSearch, CodeTrie
from histocc.published import models
from histocc.published.formats import Given
from histocc.runtime.device import Precision
from histocc.runtime.errors import UserError
from histocc.runtime.world import World
from histocc.text import UNKNOWN_LANGUAGE, cleaner, encode

DECODERS = {
    "auto": "that of greedy, flat and both which was right most often on the validation texts",
    "greedy": "writes the codes digit by digit",
    "flat": "the linear decoder's codes above --threshold: fast",
    "both": "as many as flat, of the linear decoder's 20 best, which both decoders rank: fast enough",
    "topk": "the most probable codes of the key, each alone",
    "full": "as topk, by way of the probability of every code",
}


class Coded(NamedTuple):
    """What a text gets. codes and probs: at most k, in order; conf: how sure the model is of them together,
    None for an empty text.

    greedy: probs are those of writing each code behind the ones before, conf is the probability of the set of
    codes, in any order (of more than six: in the order written), and no other. flat: the most probable first,
    which thresholds with at_least_one always count; conf is the probability that these outputs and no others
    are on. both: as many codes as flat, those that both decoders rank first among the candidates of the
    linear one. topk, full: the most probable first, each as if it were written first; conf is the probability
    of the best one. With a linear share above 0 the probabilities of topk and full are those by both decoders
    together, see `search`, which sum to 1 over the codes of the key. If the confidence of the model is
    fitted, conf is how often such an answer is right: of greedy, flat and both, exactly these codes; of topk
    and full, the best one among the true ones.

    prefix: with `back_off`, the longest prefix of the first code that is sure enough, and its probability.
    similar: with `examples`, the nearest training texts and their codes, the nearest first.
    """

    codes: list[str]
    probs: list[float]
    conf: float | None
    prefix: tuple[str, float] | None = None
    similar: list[tuple[str, str]] | None = None


NOTHING = Coded([], [], None)


class Prefixes:
    """All prefixes of the codes of a key: their first tokens, one by one."""

    def __init__(self, codes: list[str], formatter: BlockyFormatter):
        self.block_size, self.separator = formatter.block_size, formatter.within_block_sep
        self.below: dict[str, list[int]] = {}
        for i, code in enumerate(codes):
            for prefix in dict.fromkeys(self.of(code)):
                self.below.setdefault(prefix, []).append(i)

    def of(self, code: str) -> list[str]:
        """The code and its prefixes, the longest first; -1 and the like have none beside themselves."""
        return [cut(code, digits, self.separator) for digits in range(self.block_size, 0, -1)]

    def longest(self, code: str, probs: np.ndarray, least: float) -> tuple[str, float]:
        """(prefix, probability) of the longest prefix of the code whose codes have at least so much together;
        ("", 0) where none has. probs: of all codes of the key, float [C].
        """
        for prefix in self.of(code):
            prob = float(probs[self.below[prefix]].sum(dtype=np.float64)) if prefix in self.below else 0.0
            if prob >= least:
                return prefix, min(prob, 1.0)
        return "", 0.0


class Coder:
    """A model with its formatter and key.

    Texts are cleaned by the model's rule, see `text.cleaner`; one of blanks alone gets no code. Languages are
    those that the model was trained on, see `known`.

    Args:
        model, formatter, state: as `models.load_model` gives them.
        batch_size: texts at once.
        check: called between batches; what it raises ends the coding.
        raw_confidence: probabilities are the decoders' own, not as the checkpoint has fitted them.
        back_off: least probability of `Coded.prefix`; None: there is none.

    Attributes:
        thresholds: of the linear decoder, if none are given.
        linear_share: 0…1, how much the linear decoder counts in topk and full; 0 if there is none.
        best_decoder, why_best: what "auto" is.
        examples: where `Coded.similar` comes from, see `explain.Examples`.
    """

    def __init__(
        self,
        model: Seq2SeqMixerOccCANINE,
        formatter: BlockyFormatter,
        state: dict,
        *,
        batch_size: int = 256,
        precision: Precision | None = None,
        check: Callable[[], None] = lambda: None,
        raw_confidence: bool = False,
        back_off: float | None = None,
    ):
        self.model, self.formatter, self.batch_size, self.check = model, formatter, batch_size, check
        self.precision = precision or Precision("float32")
        self.model.to(self.precision.dtype)
        if self.precision.name == "int8":
            to_int8(self.model)
        self.device = next(model.parameters()).device
        self.codes = list(state["key"])
        self.languages = list(dict.fromkeys([*state["languages"], UNKNOWN_LANGUAGE]))
        self.system = state.get("system") or models.system_name(formatter)
        self.kind = state.get("kind", "mixer")
        self.step: int | None = state.get("step")
        self.data_fingerprint = str(state.get("position", {}).get("fingerprint"))
        self.text_rule = state["config"]["text"]
        self.clean = cleaner(self.text_rule)
        self.thresholds = Thresholds.of(state)
        fitted = Confidence.of(state)
        self.confidence = Confidence() if raw_confidence else fitted
        self.best_decoder, self.why_best = fitted.best_decoder(self.kind, model.ngrams is not None)
        self.linear_share = (state.get("linear_share") or 0.0) if self.kind == "mixer" else 0.0
        self.max_len = state["config"]["max_len"]
        self._width = None if model.memory_mask else self.max_len
        self.back_off = back_off
        self._prefixes = None if back_off is None else Prefixes(self.codes, formatter)
        self.examples: Any = None
        self._search: CodeSearch | None = None
        self._code_of: dict[tuple[int, ...], str] = {}

    def __getstate__(self) -> dict:
        """For pickle and copy: the weights on the CPU, and nothing that is computed from them."""
        model = self.model if self.device.type == "cpu" else copy.deepcopy(self.model).cpu()
        on_cpu = {"model": model, "device": torch.device("cpu")}
        return {**vars(self), **on_cpu, "check": None, "_search": None, "_code_of": {}}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state, check=lambda: None)

    def to(self, device: torch.device) -> "Coder":
        """This coder with its model on `device`, in place."""
        self.model.to(device)
        self.device, self._search = device, None
        return self

    @classmethod
    def load(cls, path: str, world: World | None = None, *, given: Given = Given(), **options) -> "Coder":
        """The coder of a run, checkpoint, exported or published model; given: for the last alone. Raises
        UserError.
        """
        world = world or World()
        return cls(*models.load_model(path, world.device, given), **options)

    def need(self, decoder: str) -> None:
        """Raises UserError if the model has no such decoder."""
        if decoder != "flat" and self.kind == "flat":
            raise UserError(
                f"decoder {decoder}: this model is a flat classifier, which has no decoder that writes codes;"
                " use flat"
            )
        if decoder in ("flat", "both") and self.kind == "seq2seq":
            raise UserError(f"decoder {decoder}: this model has no linear decoder; use greedy, topk or full")

    def known(self, language: str) -> str:
        """The language as the model knows it: itself, whatever its case and region, or unk."""
        names = language.strip(), language_name(language)
        return next((name for name in names if name in self.languages), UNKNOWN_LANGUAGE)

    def known_for(self, asked: Iterable[str]) -> str:
        """The languages that the model knows, for a message about others: "unk, ge, se; de is ge here"."""
        asked = {language.strip().lower() for language in asked}
        names = [
            f"{name} is {other} here"
            for name, other in OTHER_NAMES.items()
            if name in asked and name not in self.languages and other in self.languages
        ]
        return "; ".join([", ".join(self.languages), *names])

    def code(
        self,
        texts: list[str],
        languages: list[str],
        decoder: str = "auto",
        k: int = 5,
        threshold: float | dict[str | None, float] | None = None,
        cleaned: bool = False,
        in_any_order: bool = True,
    ) -> list[Coded]:
        """Codes of each text; the same text in the same language is coded once.

        Args:
            languages: one per text.
            k: most codes of a text.
            threshold: of the linear decoder, by language (None: all others) or one number; None: the model's.
            cleaned: whether the texts are what `clean` gave.
            in_any_order: False: conf of greedy is the probability of the tokens as they were written.

        Raises:
            UserError: the model has no such decoder.
            ValueError: nobody knows such a decoder.
        """
        if decoder not in DECODERS:
            raise ValueError(f"decoder {decoder!r} is not one of {', '.join(DECODERS)}")
        decoder = self.best_decoder if decoder == "auto" else decoder
        self.need(decoder)
        thresholds = self.thresholds.with_given(threshold)

        def batch(ids: Tensor, mask: Tensor, languages: list[str]) -> list[Coded]:
            if decoder == "greedy":
                coded = list(self._greedy(ids, mask, k, in_any_order))
            elif decoder == "flat":
                coded = list(self._flat(ids, mask, languages, k, thresholds))
            elif decoder == "both":
                coded = list(self._both(ids, mask, languages, k, thresholds))
            else:
                coded = list(self._ranked(ids, mask, k, decoder))
            if self._prefixes is not None:
                coded = self._with_prefixes(coded, ids, mask, self._prefixes)
            if self.examples is not None:
                similar = self.examples.nearest(self._vectors(ids, mask))
                coded = [one._replace(similar=texts) for one, texts in zip(coded, similar)]
            return coded

        return self.map_texts(texts, languages, batch, NOTHING, cleaned)

    def probabilities(
        self, texts: list[str], languages: list[str], decoder: str = "flat", logits: bool = False
    ) -> np.ndarray:
        """Probability of every code of `codes`, float32 [texts, codes], by the decoder flat or full, as
        `Coded` has them; an empty text has NaN. logits: what the linear decoder puts out instead, for flat
        alone.
        """
        self.need(decoder)

        def batch(ids: Tensor, mask: Tensor) -> Tensor:
            if decoder == "full":
                return self.confidence.ranked(self.search().full(ids, mask))
            outputs = self.linear_logits(ids, mask)
            return outputs if logits else self.confidence.mapped(OUTPUT, outputs.sigmoid())

        return self._array(texts, languages, len(self.codes), batch)

    def embeddings(self, texts: list[str], languages: list[str], ngrams: bool = False) -> np.ndarray:
        """The encoder's pooled output, float32 [texts, width]; an empty text has NaN.

        Args:
            ngrams: whether what n-grams add to it follows.
        """
        width = self.model.config.hidden_size
        if ngrams and self.model.ngrams is not None:
            width += self.model.ngrams.width
        return self._array(texts, languages, width, lambda ids, mask: self._vectors(ids, mask)[:, :width])

    def search(self) -> CodeSearch:
        """Made when it is first asked for. Raises UserError if the key does not fit the formatter."""
        if self._search is None:
            try:
                with torch.autocast(self.device.type, enabled=False):
                    tree = CodeTrie(self.codes, self.formatter)
                    self._search = CodeSearch(self.model, tree, self.linear_share)
            except ValueError as error:
                raise UserError(f"the key does not fit formatter {self.formatter.kind}: {error}") from None
        return self._search

    def _array(self, texts: list[str], languages: list[str], width: int, batch: Callable) -> np.ndarray:
        """What `batch(ids, mask)` gives for each text, float32 [texts, width]; NaN for an empty one."""

        def rows(ids: Tensor, mask: Tensor, _) -> list[np.ndarray]:
            return list(batch(ids, mask).float().cpu().numpy())

        arrays = self.map_texts(texts, languages, rows, np.full(width, np.nan, dtype=np.float32))
        return np.stack(arrays) if arrays else np.empty((0, width), dtype=np.float32)

    def map_texts(
        self, texts: list[str], languages: list[str], batch: Callable, nothing, cleaned: bool = False
    ) -> list:
        """What `batch(ids, mask, languages)` gives for each text, in batches of texts of similar length;
        `nothing` for an empty one.
        """
        rows = [
            (text if cleaned else self.clean(text), self.known(language))
            for text, language in zip(texts, languages, strict=True)
        ]
        results = dict.fromkeys(rows, nothing)
        left = sorted((row for row in results if row[0].strip()), key=lambda row: len(row[0]) + len(row[1]))
        size = self.batch_size  # which another thread may set
        for start in range(0, len(left), size):
            self.check()
            part = left[start : start + size]
            texts, languages = map(list, zip(*part))
            with self.precision.autocast():
                results.update(zip(part, batch(*self._inputs(texts, languages), languages)))
        return [results[row] for row in rows]

    def _inputs(self, texts: list[str], languages: list[str]) -> tuple[Tensor, Tensor]:
        ids, mask = encode(texts, languages, self.max_len, self._width)
        return torch.from_numpy(ids).to(self.device), torch.from_numpy(mask).to(self.device)

    def _vectors(self, ids: Tensor, mask: Tensor) -> Tensor:
        with decoding.evaluating(self.model):
            return self.model.encode_text(ids, mask)

    def linear_logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        with decoding.evaluating(self.model):
            return decoding.upcast_half(self.model.classify(self.model.encode_text(ids, mask)))

    def _ranked(self, ids: Tensor, mask: Tensor, k: int, decoder: str) -> Iterator[Coded]:
        """topk and full."""
        if decoder == "topk":
            numbers, probs = self.search().topk(ids, mask, k)
        else:  # equal ones in the order of topk
            probs, numbers = self.search().full(ids, mask).sort(dim=1, descending=True, stable=True)
            probs, numbers = probs[:, :k], numbers[:, :k]
        for row, of_row in zip(numbers.tolist(), self.confidence.ranked(probs).tolist()):
            yield Coded([self.codes[i] for i in row], of_row, of_row[0])

    def _with_prefixes(
        self, coded: list[Coded], ids: Tensor, mask: Tensor, prefixes: Prefixes
    ) -> list[Coded]:
        probs = self.confidence.ranked(self.search().full(ids, mask)).float().cpu().numpy()
        least = self.back_off or 0.0
        return [
            one._replace(prefix=prefixes.longest(one.codes[0], row, least) if one.codes else ("", 0.0))
            for one, row in zip(coded, probs)
        ]

    def _greedy(self, ids: Tensor, mask: Tensor, k: int, in_any_order: bool) -> Iterator[Coded]:
        blocks, probs, sets = decoding.greedy_sets(self.model, ids, mask, self.formatter, in_any_order)
        sets = self.confidence.mapped("greedy", sets, (blocks != PAD_IDX).any(-1).sum(1) > 1)
        probs = self.confidence.mapped("greedy", probs)
        for row, of_row, conf in zip(blocks.tolist(), probs.tolist(), sets.tolist()):
            there = [
                (self._name(tuple(block)), prob)
                for block, prob in zip(row, of_row)
                if any(token != PAD_IDX for token in block)
            ][:k]
            yield Coded([code for code, _ in there], [prob for _, prob in there], conf)

    def _name(self, block: tuple[int, ...]) -> str:
        code = self._code_of.get(block)
        if code is None:
            code = self.formatter.decode_block(block)
            assert code is not None  # canonical blocks without a code are PAD
            self._code_of[block] = code
        return code

    def _both(
        self, ids: Tensor, mask: Tensor, languages: list[str], k: int, thresholds: Thresholds
    ) -> Iterator[Coded]:
        codes, scores, logits = self.search().candidates(ids, mask)
        prob = logits.topk(codes.shape[1]).values.sigmoid()
        least = torch.tensor(list(map(thresholds.least, languages)), device=prob.device, dtype=prob.dtype)
        counts = thresholds.number((prob > least[:, None]).sum(1))
        probs = scores.log_softmax(1).exp()
        conf = probs.gather(1, counts.clamp(1, probs.shape[1])[:, None] - 1)[:, 0]  # of the last one answered
        conf, probs = self.confidence.mapped("both", conf, counts > 1), self.confidence.ranked(probs)
        for row, of_row, count, sure in zip(codes.tolist(), probs.tolist(), counts.tolist(), conf.tolist()):
            count = min(count, k)
            yield Coded([self.codes[i] for i in row[:count]], of_row[:count], sure)

    def _flat(
        self, ids: Tensor, mask: Tensor, languages: list[str], k: int, thresholds: Thresholds
    ) -> Iterator[Coded]:
        logits, least = self.linear_logits(ids, mask), list(map(thresholds.least, languages))
        logit, number = logits.topk(min(k, logits.shape[1]))
        prob = logit.sigmoid()
        # [B, k], the most probable first
        above = prob > torch.tensor(least, device=prob.device, dtype=prob.dtype)[:, None]
        counts = thresholds.number(above.sum(1))
        on = torch.arange(prob.shape[1], device=prob.device) < counts[:, None]
        none = torch.nn.functional.logsigmoid(-logits).sum(1)  # log-probability that no output is on
        conf = (none + torch.where(on, logit, 0.0).sum(1)).exp()  # log p − log (1 − p) is the logit
        conf, prob = self.confidence.mapped("flat", conf, counts > 1), self.confidence.mapped(OUTPUT, prob)
        for row, of_row, count, sure in zip(number.tolist(), prob.tolist(), counts.tolist(), conf.tolist()):
            yield Coded([self.codes[i] for i in row[:count]], of_row[:count], sure)
