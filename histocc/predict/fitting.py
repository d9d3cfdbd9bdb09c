"""The confidence of a trained model, fitted on rows that it was not trained on: on the validation rows after
each training, or on any rows with `histocc evaluate --fit-confidence`. For topk, which takes most of the
time, it is fitted when topk is first asked for. A model in closed form is judged on its training texts, each
left out (`histocc.learn.few.judge`).
"""

import contextlib
import copy
import json
import os
import zlib
from functools import partial

import numpy as np
import torch

from histocc.data.arrays import PreparedData, RowSet
from histocc.figure import VALIDATION, Figure, is_right, may_have_seen
from histocc.model import confidence
from histocc.model.confidence import MIN_TEXTS, OUTPUTS, Confidence, Thresholds
from histocc.model.levels import map_of
from histocc.predict.coder import Coded, Coder, kept_beside, training_data
from histocc.predict.decoders import DECODERS, MEASURED, RANKED
from histocc.published import models
from histocc.runtime import checkpoint
from histocc.runtime.device import Precision
from histocc.runtime.errors import UserError
from histocc.runtime.files import checksum
from histocc.runtime.signals import Stopped
from histocc.runtime.world import World

JUDGED_TEXTS, JUDGED_ROWS = 1_000, 1_500  # most that confidence is fitted on
MAX_BATCH = 256  # rows
RANKED_TEXTS = 250  # about so many texts are ranked, which takes most of the time
MAX_CODES_OF_ANSWER = 100  # most compared codes of an answer
RANKED_FILE = "confidence_of_topk.bin"  # in the folder of the run
Judged = dict[str, list[tuple[float, bool, bool, float, int]]]  # see `judged_answers`


def judged_answers(
    coder: Coder,
    decoders: list[str],
    texts: list[str],
    languages: list[str],
    codes: list[set[str]],
    weights: np.ndarray,
    rank_one_of: int = 1,
) -> Judged:
    """Return each decoder's answers: (probability, whether it has several codes, whether it is right, weight
    of the row, its number). For a decoder that `auto` does not measure, an answer is the best code of one
    text of `rank_one_of`. For one of OUTPUTS it is the output in this place. For `map_of(level)` it is the
    linear decoder's answer at this level, where all codes have a group.
    """

    def asked(decoder: str, k: int, one_of: int = 1) -> list[tuple[Coded, set[str], float, int]]:
        """Return (answer, true codes, weight, number) of the texts, or of one text in `one_of`."""
        some = [i for i, text in enumerate(texts) if zlib.crc32(text.encode()) % one_of == 0]
        part = [texts[i] for i in some], [languages[i] for i in some]
        coded = coder.code(*part, decoder, k, cleaned=True, levels=levels)
        return [(one, codes[i], float(weights[i]), i) for one, i in zip(coded, some)]

    levels = coder.levels.names[1:]
    found: Judged = {}
    for name in (name for name in coder.decoders if name in decoders):
        is_set = name in MEASURED
        answers = asked(name, *((MAX_CODES_OF_ANSWER,) if is_set else (1, rank_one_of)))
        found[name] = [
            (one.conf, len(one.codes) > 1, is_right(one.codes, true, ranked=not is_set), weight, i)
            for one, true, weight, i in answers
            if one.conf is not None  # None: an empty text
        ]
        for one, true, weight, i in answers:
            for level, conf in zip(levels, one.levels):
                if (agrees := coder.levels.agree(level, one.codes, true)) is not None:
                    judged = conf, len(one.codes) > 1, agrees, weight, i
                    found.setdefault(map_of(level), []).append(judged)
        if name == "flat":
            for one, true, weight, i in answers:
                for place, (code, prob) in zip(OUTPUTS, one.choices):
                    found.setdefault(place, []).append((prob, False, code in true, weight, i))
    return found


def rows_right(coded: list[Coded], rows: RowSet, data: PreparedData) -> np.ndarray:
    """Return whether each row got exactly its codes, bool [N]. coded: the answers to all rows."""
    true = [{data.codes[i] for i in codes if i >= 0} for codes in np.asarray(rows.codes).tolist()]
    return np.array([is_right(one.codes, codes) for one, codes in zip(coded, true)], dtype=bool)


def rows_to_judge(rows: RowSet, usable: np.ndarray) -> np.ndarray:
    """Return the rows of JUDGED_TEXTS of the usable texts (bool [N]), at most JUDGED_ROWS. Of texts with many
    rows these are the first ones, so that rare texts count as much.
    """
    distinct = np.unique(rows.text_hash[usable])
    index = np.flatnonzero(usable & np.isin(rows.text_hash, distinct[:JUDGED_TEXTS]))
    order = np.argsort(rows.text_hash[index], kind="stable")
    _, first, times = np.unique(rows.text_hash[index][order], return_index=True, return_counts=True)
    place = np.arange(len(index)) - np.repeat(first, times)  # of each row among the rows of its text
    return np.sort(index[order[np.argsort(place, kind="stable")[:JUDGED_ROWS]]])


def judged_rows(
    coder: Coder, decoders: list[str], rows: RowSet, index: np.ndarray, data: PreparedData, part: slice
) -> Judged:
    """Return `judged_answers` to some of the rows `index`. Each text counts the same."""
    _, text, times = np.unique(rows.text_hash[index], return_inverse=True, return_counts=True)
    own, weights = index[part], 1.0 / times[text.reshape(-1)][part]
    codes = [{data.codes[i] for i in row if i >= 0} for row in rows.codes[own].tolist()]
    languages = [data.languages[i] for i in np.asarray(rows.language)[own].tolist()]
    one_of = max(1, len(times) // RANKED_TEXTS)
    return judged_answers(coder, decoders, rows.strings(own), languages, codes, weights, one_of)


def fit_maps(fitted: Confidence, judged: Judged) -> list[str]:
    """Fill the maps and curves from judged answers. Returns each decoder's calibration error before and
    after, in words.
    """
    errors = []
    for decoder, of_decoder in judged.items():
        raw, several, right, weight, _ = (np.array(column) for column in zip(*of_decoder))
        fitted.maps[decoder] = confidence.fit(raw, several, right, weight)
        if decoder not in DECODERS:
            continue
        mapped = fitted.mapped(decoder, torch.from_numpy(raw), torch.from_numpy(several)).numpy()
        fitted.curves[decoder] = confidence.curve(mapped, right, weight)
        before, after = (100 * confidence.calibration_error(each, right, weight) for each in (raw, mapped))
        errors.append(f"{decoder} {before:.1f} → {after:.1f}")
    return errors


def too_few(texts: int, state: dict) -> str:
    """Return the message that these are too few texts to fit the confidence of a model on."""
    kept = "the earlier fit stays" if Confidence.of(state).maps else "probabilities are not corrected"
    return (
        f"Confidence is not fitted: it takes {MIN_TEXTS} distinct texts with an answer that the model was"
        f" not trained on, and has {texts:,}. Give it more rows, or train with a larger"
        f" --share-val; {kept}"
    )


def of_all_ranks(shares: list[dict[str, list]]) -> Judged:
    """Return the answers to the rows that the ranks have shared, with their numbers among all rows."""
    judged: Judged = {}
    for rank, share in enumerate(shares):
        for decoder, of_decoder in share.items():
            whole = ((*answer, rank + len(shares) * number) for *answer, number in of_decoder)
            judged.setdefault(decoder, []).extend(whole)
    return judged


def fit_confidence(
    name: str,
    loaded: models.Loaded,
    decoders: list[str],
    rows: RowSet,
    usable: np.ndarray,
    data: PreparedData,
    world: World,
    batch_size: int,
    precision: Precision,
) -> dict | None:
    """Measure the figure of a model on its device and fit the confidence of its decoders, on the rows
    `usable` (bool [N]) of `data`, whose codes are the model's (`rows_to_judge`). name: for messages. All
    ranks. Returns the entries of a checkpoint on rank 0, {} on the others. With fewer than MIN_TEXTS distinct
    texts they lack confidence, without any all ranks get None. Raises Stopped on all ranks if asked to stop.
    """
    index = rows_to_judge(rows, usable)
    texts = len(np.unique(rows.text_hash[index]))
    if texts < MIN_TEXTS and name != checkpoint.BEST:  # BEST comes after the run's other checkpoint
        world.print(too_few(texts, loaded[2]))
    if not texts:
        return None
    found, known, check = None, 0.0, world.give_up_if_asked
    with contextlib.suppress(Stopped):
        how = {"batch_size": batch_size, "precision": precision, "check": check}
        coder = Coder(*loaded, **how, raw_confidence=True, choices=len(OUTPUTS))
        found = judged_rows(coder, decoders, rows, index, data, world.share())
        if world.is_main:
            names = [data.languages[i] for i in np.asarray(rows.language)[index].tolist()]
            known = coder.known_ngrams(rows.strings(index), names)
    if world.stop_agreed():
        raise Stopped
    shares = world.gather(found, main_alone=True)
    if not shares:
        return {}
    judged = of_all_ranks(shares)
    most = Thresholds.of(loaded[2]).at_most
    fitted, sets = Confidence(texts, {}, {}, {}, known=known, several=most != 1), {}
    for decoder in (name for name in MEASURED if name in judged):
        _, _, right, weight, _ = (np.array(column) for column in zip(*judged[decoder]))
        fitted.accuracy[decoder] = float(weight @ right / weight.sum())
        sets[decoder] = weight * right
    kind, has_ngrams = loaded[2].get("kind", "mixer"), loaded[0].ngrams is not None
    usual, _ = Confidence().best_decoder(kind, has_ngrams)
    best = usual if texts < MIN_TEXTS else confidence.most_accurate(sets)
    *_, right, _, number = (np.array(column) for column in zip(*judged[best]))
    hashes, times = np.unique(rows.text_hash[usable], return_counts=True)
    of_row = np.searchsorted(hashes, rows.text_hash[index][number])
    figure = Figure.measured(right, of_row, VALIDATION, best, may_have_seen(loaded[2]), times[of_row])
    found = {"figure": figure and figure._asdict()}
    if texts < MIN_TEXTS:
        return found
    errors = fit_maps(fitted, judged)
    fitted = fitted._replace(best=best)
    best, why = fitted.best_decoder(kind)
    world.print(
        f"{name}: confidence is fitted on {fitted.texts:,} texts; expected calibration error there, in"
        f" points: {', '.join(errors)}. --decoder auto is {best} ({why})"
    )
    return {**found, "confidence": fitted._asdict()}


def fit_run(
    folder: str,
    precision: Precision,
    batch_size: int,
    world: World,
    data: PreparedData,
    resumed: dict | None = None,
) -> None:
    """Measure the figure and fit the confidence of last.bin and best.bin of a finished run on its validation
    rows, if they have none. Both have the same weights, and so the same entries, if they are of the same
    step. All ranks. resumed: the checkpoint that the run was resumed from, if it took no step since.
    """
    size = min(batch_size, MAX_BATCH)
    entries: dict[int, dict] = {}  # entries by the step of the checkpoint
    for name in (checkpoint.LAST, checkpoint.BEST):
        file = os.path.join(folder, name)
        if resumed and resumed["path"] == file and resumed.get("figure"):
            continue
        # other nodes may not see the file
        read = unfitted(file, data) if world.is_main else {}
        state = world.broadcast({**read, "optimizer": {}} if read else None, 0)
        if state is None:
            continue
        if state["step"] not in entries:
            model, formatter, state = models.model_of_checkpoint(file, state)
            loaded = model.to(world.device), formatter, state
            usable = ~np.isin(data.val.text_hash.view(np.int64), state.get("trained", []))  # files may share
            try:
                entry = fit_confidence(name, loaded, MEASURED, data.val, usable, data, world, size, precision)
            except Stopped:
                return world.print("Confidence is not fitted yet: the same command fits it")
            if entry is None:
                return
            entries[state["step"]] = entry
        changed = {**read, **entries[state["step"]]}
        world.run_on_main(partial(checkpoint.rewrite, file, changed))  # nothing else writes it meanwhile


def unfitted(file: str, data: PreparedData) -> dict:
    """Return the checkpoint of a run on these data if it has no figure, else {}. Links, and other files of
    this name, belong to others and stay as they are. Rank 0 only.
    """
    with contextlib.suppress(UserError):
        state = {} if os.path.islink(file) else checkpoint.load(file)
        if state.get("position", {}).get("fingerprint") == data.fingerprint and not state.get("figure"):
            return state
    return {}


def fit_ranked(coder: Coder, weights: str, decoder: str, world: World) -> None:
    """Fit the confidence of topk, which `decoder` uses, once, if the run of the weights has fitted the other
    decoders. Rank 0 fits it on the same rows, if they still exist. All ranks.
    """
    held = coder.confidence
    if not held.maps or RANKED in held.maps or "tree" not in DECODERS[decoder].needs:
        return

    def find() -> bytes:
        data = training_data(weights, coder.data_fingerprint)
        if data is None or not len(data.val):
            return b"[{}, {}]"

        def compute() -> bytes:
            world.print(f"Fitting the confidence of {RANKED}")
            raw, fitted = copy.copy(coder), Confidence(0, {}, {})
            raw.confidence, raw.trained = Confidence(), None
            is_new = ~np.isin(data.val.text_hash, data.train.text_hash)  # files may share texts
            index = rows_to_judge(data.val, is_new)
            fit_maps(fitted, judged_rows(raw, [RANKED], data.val, index, data, slice(None)))
            return json.dumps([fitted.maps, fitted.curves]).encode()

        return kept_beside(weights, RANKED_FILE, f"{checksum(weights)} {coder.precision.name}", compute)

    maps, curves = json.loads(world.run_on_main(find))
    coder.confidence = held._replace(maps=held.maps | maps, curves=held.curves | curves)
