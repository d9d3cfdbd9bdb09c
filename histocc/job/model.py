"""The model of a run, its loss, and the entries of a checkpoint for using it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from histocc.data.arrays import PreparedData, code_counts
from histocc.data.config import text_columns
from histocc.data.dataset import TextRows
from histocc.formatter import PAD_IDX, BlockyFormatter
from histocc.job.config import JobConfig, LossFlags, ModelFlags
from histocc.learn.texts import count_ngrams
from histocc.model.canine import CanineEncoder
from histocc.model.confidence import USUAL
from histocc.model.loss import ROWS, BlockOrderInvariantLoss, LinearLoss, LossMixer
from histocc.model.mixer import NGRAMS, Seq2SeqMixerOccCANINE, model_config
from histocc.model.ngrams import ALL_CASES, NONE, PATTERNS, WITH_CELL
from histocc.model.search import EQUAL_SHARE
from histocc.published import models
from histocc.runtime import checkpoint
from histocc.runtime.config import AUTO
from histocc.runtime.device import Precision, compile_layers
from histocc.runtime.errors import UserError
from histocc.runtime.log import counted
from histocc.runtime.rng import WEIGHTS, derived_seed
from histocc.runtime.world import World

NGRAM_WIDTH = 128  # numbers for each n-gram
MAX_AUTO_BITS = 18  # 2^18 n-grams, since a step of the optimizer goes over all
# Factors on the learning rate (see benchmarks/LOG.md): at the rate of the rest, a new linear decoder with a
# mean over the classes learns next to nothing, and fitted parts become worse.
NEW_LINEAR_LR_FACTOR = {"mean": 30.0, "rows": 5.0}
FITTED_LINEAR_LR_FACTOR = 0.1


# ---- the model


def make_model(
    args: JobConfig,
    formatter: BlockyFormatter,
    world: World,
    data: PreparedData,
    resumed: dict | None = None,
    first: dict | None = None,
) -> tuple[JobConfig, Seq2SeqMixerOccCANINE, dict]:
    """Return (arguments with the model's size, model on the CPU, its config). The weights are random, `first`
    (from --initial-checkpoint), or the resumed run's. args: from `decide`. All ranks. Raises UserError.
    """
    assert args.max_len, "still open"
    counted = None
    if resumed:
        config: dict = resumed["config"]
    else:
        config = new_config(args, args.max_len, first) | {"text": data.clean_text}
        config["ngrams"], counted = new_ngrams(args, args.input_col, args.max_len, first, world, data)
    args = args.with_decided(model_size=models.size_name(config))
    torch.manual_seed(derived_seed(args.seed, WEIGHTS) % 2**32)
    model = models.new_model(config, formatter, len(data.codes), args.dropout, args.ngram_dropout)
    start_at_frequencies(model, data)
    model.to(Precision.of(args, world.device).dtype)
    if counted and model.ngrams:
        model.ngrams.hashes.copy_(torch.from_numpy(counted[0]))
        model.ngrams.idf.copy_(torch.from_numpy(counted[1]))
    if resumed:
        model.load_state_dict(resumed["model"])
    if first:
        models.load_initial_weights(model, first, data.codes, formatter, args.only_encoder, world.print)
    return args, model, config


def place(model: Seq2SeqMixerOccCANINE, rows: TextRows, world: World, compile: bool) -> None:
    """Compile the model if asked to, and move it to its device. rows: the training rows."""
    if compile:
        compile_layers(model)
        model.in_groups = False  # a compiled layer has few shapes
    model.to(world.device)
    embeddings = isinstance(model.encoder, CanineEncoder) and model.encoder.char_embeddings
    if embeddings and any(weight.requires_grad for weight in embeddings.parameters()):
        # train only embeddings of characters that occur
        embeddings.train_rows_of(torch.from_numpy(rows.characters()), rows.encoding.max_len)


def auto_size(args: ModelFlags, world: World) -> str:
    """Return the size of a new model. On CPUs an encoder takes most of the time, for little more accuracy."""
    if args.ngrams == NONE or args.freeze_encoder:
        return "base"
    chosen = "base, since there is a GPU; --model-size ngrams trains without encoder"
    if world.device.type != "cuda":
        chosen = f"{NGRAMS}, since there is no GPU; tiny also has an encoder"
    world.print(f"--model-size auto: {chosen}")
    return chosen.partition(",")[0]


def new_config(args: ModelFlags, max_len: int, first: dict | None) -> dict:
    """Return `config` of a new run, without its n-grams and text rule. Raises UserError."""
    dropouts = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), args.encoder_dropout)
    size, named = args.model_size, args.initial_checkpoint
    if first is None:
        encoder = model_config(size or "base", **dropouts).to_dict()
        if size == NGRAMS:
            encoder["encoder"] = False
    else:
        encoder = {**first["config"], **dropouts}
        if not encoder.get("encoder", True) and (args.only_encoder or args.freeze_encoder):
            raise UserError(f"{named} has no encoder: omit --only-encoder and --freeze-encoder")
        if size and not models.has_size(encoder, size):
            sizes = f"width {encoder['hidden_size']}, {counted(encoder['num_hidden_layers'], 'layer')}"
            raise UserError(f"--model-size {size}: the checkpoint {named} has another size ({sizes})")
    config = {**encoder, "max_len": max_len}
    if first is None or args.only_encoder:  # its decoder is new
        config |= {"memory_mask": True, "target_mask": True}
        config["decoder_dim_feedforward"] = config["hidden_size"]
    asked = {name: getattr(args, name) for name in ("decoder_dim_feedforward", "memory_mask")}
    asked["target_mask"] = False if args.published_target_mask else None
    return config | {name: value for name, value in asked.items() if value is not None}


def load_on_all(world: World, load: Callable[[], models.Loaded]) -> models.Loaded:
    """Return the result of `load`, called on rank 0, without an optimizer. All ranks. Raises UserError."""

    def work() -> tuple[BlockyFormatter, dict]:
        _, formatter, state = load()
        return formatter, {**state, "optimizer": {}}

    formatter, state = world.run_on_main(work)
    of_model = state["config"], formatter, len(state["key"]), state["model"], state.get("kind", "mixer")
    return models.model_with_weights(*of_model), formatter, state


def start_at_frequencies(model: Seq2SeqMixerOccCANINE, data: PreparedData) -> None:
    """Start a new linear decoder at the frequency of each code in the training rows: its bias is the
    log-odds, its weights are 0. From ½ each, a short training would only learn that codes are rare.
    """
    share = torch.from_numpy((code_counts(data.train, len(data.codes)) + 0.5) / (len(data.train) + 1))
    with torch.no_grad():
        model.linear_decoder.weight.zero_()
        model.linear_decoder.bias.copy_(torch.logit(share))


def fast_parameters(
    model: Seq2SeqMixerOccCANINE, resumed: dict | None, is_fitted: bool, linear_loss: str | None
) -> tuple[list[str], float]:
    """Return (names of the parameters with a separate learning rate, its factor on the rate of the rest):
    the linear decoder and its n-grams, or only n-grams if these are added to trained weights.
    """
    ngrams, added = model.ngrams, False
    if resumed:
        with checkpoint.reading(resumed["path"]):
            groups, rates = resumed["optimizer"]["param_groups"], resumed["scheduler"]["base_lrs"]
            factor = rates[-1] / rates[0]
            added = ngrams is not None and len(groups[-1]["params"]) == len([*ngrams.parameters()])
    elif ngrams and is_fitted:
        factor = FITTED_LINEAR_LR_FACTOR
    else:
        is_new = not model.linear_decoder.weight.any()
        new_ngrams = ngrams is not None and not ngrams.linear.weight.any()
        added = new_ngrams and not is_new
        starts = new_ngrams if ngrams else is_new
        factor = NEW_LINEAR_LR_FACTOR[linear_loss or "mean"] if starts else 1.0
    parts = ["linear_decoder"] * (not added) + ["ngrams"] * bool(ngrams)
    names = [f"{part}.{name}" for part in parts for name, _ in model.get_submodule(part).named_parameters()]
    return names if factor != 1 else [], factor


def new_ngrams(
    args: ModelFlags,
    input_col: list[str] | str,
    max_len: int,
    first: dict | None,
    world: World,
    data: PreparedData,
) -> tuple[dict | None, tuple[np.ndarray, np.ndarray] | None]:
    """Return (`ngrams` in the config of a new run or None, the result of `count_ngrams`, or None if
    the initial weights bring n-grams). All ranks. Raises UserError if these contradict the arguments.
    """
    asked = args.ngrams
    held = None if first is None or args.only_encoder else first["config"].get("ngrams")
    if held is not None:
        if asked == NONE or asked != AUTO and held["rows"] > 1 << int(asked):
            had = f"the initial weights have {held['rows']:,} n-grams and need them"
            raise UserError(f"--ngrams {asked}: {had}; omit --ngrams, or add --only-encoder")
        return held, None
    if asked == NONE or asked == AUTO and first is not None:
        return None, None
    most, check = 1 << (MAX_AUTO_BITS if asked == AUTO else int(asked)), world.give_up_if_asked
    patterns = patterns_of(input_col)
    counted = world.run_on_main(lambda: count_ngrams(data, max_len, most, patterns, check))
    sizes = {"rows": len(counted[0]), "width": NGRAM_WIDTH}
    return {**sizes, "patterns": patterns, "case": ALL_CASES}, counted


def patterns_of(input_col: list[str] | str) -> list[str]:
    """Return the patterns of the n-grams of a new model, see `histocc.model.ngrams.hash_ngrams`."""
    columns = len(text_columns(input_col))
    return [*PATTERNS, *(f"{WITH_CELL}{i}" for i in range(columns) if columns > 1)]


# ---- its loss, and the entries of a checkpoint


def make_loss(args: LossFlags, formatter: BlockyFormatter) -> LossMixer:
    """Return the loss of the decoder that writes codes and of the linear one, for decided arguments."""
    assert args.empty_blocks and args.block_loss and args.linear_loss, "still open"
    assert args.seq2seq_weight is not None, "still open"
    blocks, size = formatter.max_num_codes, formatter.block_size
    loss_fn = BlockOrderInvariantLoss(PAD_IDX, blocks, size, args.empty_blocks, args.block_loss)
    return LossMixer(loss_fn, LinearLoss(args.linear_loss), args.seq2seq_weight)


def checkpoint_entries(
    args: LossFlags, formatter: BlockyFormatter, data: PreparedData, config: dict
) -> dict[str, Any]:
    """Return the entries of a checkpoint that coding needs in place of the data. `linear_share` is the linear
    decoder's share in rankings: with n-grams it is as accurate as the other one. Its loss decides
    whether `thresholds` always count its best code and limit codes to the most of a training row.
    """
    found: dict[str, Any] = {"linear_share": EQUAL_SHARE} if config["ngrams"] else {}
    if not args.seq2seq_weight:  # the decoder that writes learns nothing
        found["kind"] = "flat"
    if args.linear_loss == ROWS:
        most = max([1, *map(int, data.report["codes_per_row"])])
        usual = {"default": USUAL, "by_language": {}, "source": "usual"}
        found["thresholds"] = {**usual, "at_least_one": True, "at_most": most}
    return {
        "config": config,
        "formatter": formatter.to_dict(),
        "key": {code: i for i, code in enumerate(data.codes)},
        "system": models.system_name(formatter),
        "languages": data.languages,
        "kept_codes": data.kept_codes,
        "hisco_numbers": data.hisco_numbers,
        **found,
    }
