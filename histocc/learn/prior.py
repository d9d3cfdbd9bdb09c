"""The prior of a model in closed form: the model whose answers it builds on."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from histocc import lexicon
from histocc.data.arrays import PreparedData
from histocc.data.learned import hashes_of
from histocc.formatter import BlockyFormatter, CodeError, hisco_key
from histocc.model.ngrams import NONE, NoEncoder
from histocc.predict.coder import Coder
from histocc.published import formats, models
from histocc.published.built_in import NAME as BUILT_IN
from histocc.runtime import checkpoint
from histocc.runtime.config import AUTO
from histocc.runtime.device import Precision
from histocc.runtime.errors import UserError
from histocc.runtime.files import OwnFiles, read_sealed, write_sealed

PRIOR_ANSWERS = "prior_answers.bin"  # answers of a prior with an encoder (minutes), in the run's folder
SAME_SYSTEM = 0.9  # a prior that knows this share of the codes uses the same system


class Prior(NamedTuple):
    """A prior, in a run that learns from its answers."""

    content: dict[str, Any]  # the entry "prior" of a checkpoint
    coder: Coder  # made from the content
    is_same: bool  # whether its codes are of the same system
    own: OwnFiles  # of the run
    data: str  # the fingerprint of the run's data

    def places(self, codes: list[str]) -> Tensor:
        """Return the number in `codes` of each of its codes, int64, −1 for none."""
        numbers = {code: i for i, code in enumerate(codes)} if self.is_same else {}
        return torch.tensor([numbers.get(code, -1) for code in self.coder.codes])

    def seen(self, texts: list[str]) -> np.ndarray:
        """Return whether it was trained on each of these texts, bool [n]."""
        hashes = self.content.get("trained")
        if hashes is None:
            return np.full(len(texts), False)
        return np.isin(hashes_of(self.coder.read(texts), self.coder.text_rule), hashes)

    def answers(self, texts: list[str], languages: list[str]) -> Tensor:
        """Return its probabilities [n, codes] for the run's texts. With an encoder, keep them in a file."""
        if isinstance(self.coder.model.encoder, NoEncoder):
            return self.coder.answers(texts, languages)
        path = self.own.path(PRIOR_ANSWERS)
        of = f"{self.data} {checkpoint.with_checksum(self.content)[checkpoint.CHECKSUM]}"
        if (held := read_sealed(path, of)) is None:
            held = self.coder.answers(texts, languages).cpu().half().numpy().tobytes()
            self.own.claim(PRIOR_ANSWERS)
            write_sealed(path, held, of)
        probs = np.frombuffer(held, np.float16).reshape(len(texts), -1)
        return torch.from_numpy(probs.astype(np.float32))

    def with_codes(self, formatter: BlockyFormatter, data: PreparedData) -> PreparedData:
        """Return the data with the prior's codes appended to theirs, if the formatter can write them."""
        codes, own = [*data.codes], {*data.codes}
        for code in self.coder.codes:
            try:
                formatter.encode_code(code)
            except CodeError:
                continue
            codes += [code] * (code not in own)
        return replace(data, codes=codes)


def has_hisco(formatter: BlockyFormatter, data: PreparedData) -> bool:
    """Return whether the codes are HISCO codes, also with the general-purpose formatter."""
    return formatter.kind == "hisco" or np.isin(data.codes, hisco_key()).mean() >= SAME_SYSTEM


def find_prior(
    name: str,
    formatter: BlockyFormatter,
    data: PreparedData,
    precision: Precision,
    own: OwnFiles,
    check: Callable[[], None],
) -> Prior | None:
    """Return the prior named by --prior, or the built-in model if it may help. own: files of the run. check:
    may raise. Raises UserError.
    """
    is_hisco = has_hisco(formatter, data)
    if name == AUTO:
        name = BUILT_IN if is_hisco or {*data.languages} & {*lexicon.LEXICON_LANGUAGES} else NONE
    if name == NONE:
        return None
    file = models.find_weights(name, f"--prior {name}")
    content = as_prior(name, models.model_of_content(file, formats.load_content(file))[2])
    loaded = models.model_of_checkpoint(f"the prior {name}", content)
    coder = Coder(*loaded, precision=precision, check=check, raw_confidence=True)
    known = sum(code in set(coder.codes) for code in data.codes) / len(data.codes)
    is_same = is_hisco and coder.formatter.kind == "hisco" or known >= SAME_SYSTEM
    return Prior(content, coder, is_same, own, data.fingerprint)


def as_prior(name: str, state: dict[str, Any]) -> dict[str, Any]:
    """Return the entry "prior" for a loaded model, in half precision. Raises UserError if it has a prior."""
    if state.get("prior"):
        raise UserError(
            f"--prior {name}: this model has a prior itself. Name that prior, and train on the rows of both"
        )
    lacking = models.LACKING[state.get("kind", "mixer")]
    weights = {part: x for part, x in state["model"].items() if not (lacking and part.startswith(lacking))}
    kept = {part: x.half() if x.is_floating_point() else x for part, x in weights.items()}
    # the built-in model learned lists of titles, which do not show how a register codes them, so no text
    # counts as seen
    left_out = ("answers", "trained") if name == BUILT_IN else ("answers",)
    names = [entry for entry in models.CODING if entry not in left_out and state.get(entry) is not None]
    settings = {entry: state[entry] for entry in names}
    return {**settings, "name": name, "format": checkpoint.FORMAT, "model": kept}
