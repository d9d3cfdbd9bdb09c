"""What a new run starts from: random weights, or those of --initial-checkpoint with the key and the text rule
that belong to them."""

from typing import Any

from torch import nn

from histocc.data.config import StartsFrom
from histocc.data.rows import read_key
from histocc.formatter import BlockyFormatter, hisco_key
from histocc.job.config import JobConfig
from histocc.job.recipe import CHOICES
from histocc.model.mixer import NGRAMS, Seq2SeqMixerOccCANINE, model_config
from histocc.published import formats, models
from histocc.runtime import checkpoint
from histocc.runtime.errors import UserError
from histocc.runtime.world import World
from histocc.text import AS_IS

OF_CODES = ("linear_decoder.", "ngrams.linear.")  # tensors with a row for each code


def initial_file(args: JobConfig) -> str:
    """The file that --initial-checkpoint names. Raises UserError."""
    return models.find_weights(
        args.initial_checkpoint or "", f"--initial-checkpoint {args.initial_checkpoint}"
    )


def initial_weights(args: JobConfig) -> dict:
    """model, key, config, what (in words), formatter (its kind, or None), chars and blocks (tokens of a code,
    whether separated) of the checkpoint that the
    run starts from: one of histocc, an exported one, or what others published. Raises UserError.

    A published mixer was trained with a decoder that looks at padding too; it keeps that unless
    --memory-mask.
    """
    file = initial_file(args)
    state = formats.load_content(file)
    with checkpoint.reading(file):
        if not models.brings_settings(state):
            return _published_weights(args, file, formats.read(file, state))
        whole = models.own_model(file, state)[2]
        formatter, config = whole["formatter"], whole["config"]
        # exported again: fine-tuning from it is as from the file itself
        if whole.get("source") == "published":
            config = {**config, "target_mask": True}
        separated = formatter["within_block_sep"] is not None
        return {
            "model": whole["model"],
            "key": whole["key"],
            "config": config,
            "what": "a checkpoint of histocc",
            "formatter": formatter["kind"],
            "chars": formatter.get("chars"),
            "blocks": (formatter["block_size"], separated),
            **{
                name: value
                for name, value in whole["args"].items()
                if name in CHOICES and name != "learning_rate"  # which belongs to a schedule, not to weights
            },
        }


def _published_weights(args: JobConfig, file: str, found: formats.Published) -> dict:
    """The same of published weights. Fine-tuning masks PAD among the target tokens, unless
    --published-target-mask."""
    key = _published_key(args, file, found)
    separated = models.are_separated(key)
    return {
        "model": found.weights,
        "key": key,
        "config": {**found.config, "target_mask": True},
        "what": formats.KINDS[found.kind],
        "formatter": None if found.kind == "encoder" else models.kind_of_formatter(found, list(key)),
        "chars": found.chars,
        "blocks": (max(models.code_lengths(list(key), separated), default=0), separated),
    }


def _published_key(args: JobConfig, file: str, found: formats.Published) -> dict[str, int]:
    """The key of published weights: that of --initial-key, their own, that of --key, or the HISCO key where
    it fits; {} where none is known.

    Raises UserError for a key that has another number of codes than the weights have outputs.
    """
    if found.kind == "encoder":
        return {}
    named, said = list(found.key), f"the key of {file}"
    if args.initial_key:
        named, said = read_key(args.initial_key), f"--initial-key {args.initial_key}"
    elif not named and args.key and (found.outputs is None or not models.is_hisco(found)):
        named, said = read_key(args.key), f"--key {args.key}"
    elif not named and models.is_hisco(found):
        named = list(hisco_key())
    if named and found.outputs is not None and len(named) != found.outputs:
        raise UserError(
            f"{said} has {len(named):,} codes, and the linear decoder of {file} {found.outputs:,} outputs:"
            " name the key that belongs to it with --initial-key, put it beside it as key.json, or take"
            " --only-encoder"
        )
    return {code: i for i, code in enumerate(named)}


def starts_from(args: JobConfig) -> StartsFrom:
    """What the data of a run must know of its --initial-checkpoint. Raises UserError."""
    first = initial_weights(args)
    return StartsFrom(
        text=first["config"]["text"],
        codes=[] if args.only_encoder else list(first["key"]),
        formatter=first["formatter"],
        chars=None if args.only_encoder else first["chars"],
    )


def resumes_from(state: dict) -> StartsFrom:
    """The same of a run that is resumed, from its own checkpoint."""
    formatter = state["formatter"]
    return StartsFrom(
        text=state["config"]["text"],
        codes=list(state["key"])[: int(state.get("kept_codes") or 0)],
        formatter=formatter["kind"],
        chars=formatter.get("chars"),
    )


def run_config(args: JobConfig, first: dict | None) -> dict:
    """`config` of a new run: sizes from --model-size or from the checkpoint that it starts from. Raises
    UserError."""
    dropouts = {
        "hidden_dropout_prob": args.encoder_dropout,
        "attention_probs_dropout_prob": args.encoder_dropout,
    }
    if first is None:
        encoder = model_config(args.model_size or "base", **dropouts).to_dict()
        if args.model_size == NGRAMS:
            encoder["encoder"] = False
    else:
        encoder = {**first["config"], **dropouts}
        if not encoder.get("encoder", True) and (args.only_encoder or args.freeze_encoder):
            flag = "--only-encoder" if args.only_encoder else "--freeze-encoder"
            raise UserError(f"{flag}: {args.initial_checkpoint} has no encoder; leave the flag out")
        if args.model_size and not models.has_size(encoder, args.model_size):
            raise UserError(
                f"--model-size {args.model_size}: the checkpoint {args.initial_checkpoint} has another"
                f" size (width {encoder['hidden_size']}, {encoder['num_hidden_layers']} layers); leave "
                "--model-size out"
            )
    config = {
        **encoder,
        "max_len": args.max_len,
        "memory_mask": True,
        "target_mask": True,
        "decoder_dim_feedforward": args.decoder_dim_feedforward or encoder["hidden_size"],
        "text": args.clean_text or (first["config"]["text"] if first else AS_IS),
    }
    if first is not None and not args.only_encoder:
        config |= {name: first["config"][name] for name in ("memory_mask", "target_mask")}
        if args.decoder_dim_feedforward is None:
            config["decoder_dim_feedforward"] = first["config"]["decoder_dim_feedforward"]
    if args.memory_mask is not None:
        config["memory_mask"] = args.memory_mask
    if args.published_target_mask:
        config["target_mask"] = False
    return config


def load_matching(model: nn.Module, weights: dict[str, Any]) -> list[list[str]]:
    """Copies the weights whose name and shape fit. Returns [new, unused]: those in the model alone or of
    another shape, and those in `weights` alone or of another shape, each as «name [shape]»."""
    own = model.state_dict()
    fitting = {
        name: tensor for name, tensor in weights.items() if name in own and own[name].shape == tensor.shape
    }
    model.load_state_dict(fitting, strict=False)
    return [
        [f"{name} {list(part[name].shape)}" for name in sorted(part.keys() - fitting.keys())]
        for part in (own, weights)
    ]


def load_initial_weights(
    model: Seq2SeqMixerOccCANINE,
    args: JobConfig,
    first: dict,
    key: dict,
    formatter: BlockyFormatter,
    world: World,
) -> None:
    """Weights of --initial-checkpoint where name and shape fit; says what is new. key, formatter: of the
    run."""
    # others write 1110 for 01110
    first_key = {formatter.repair(code)[0]: number for code, number in first["key"].items()}
    weights = {
        name: value
        for name, value in first["model"].items()
        if not args.only_encoder or name.startswith("encoder.")
    }
    same_key = list(first_key) == list(key)
    if not same_key:
        linear = {name: weights.pop(name) for name in list(weights) if name.startswith(OF_CODES)}
    if model.ngrams and "ngrams.idf" not in weights:
        model.ngrams.zero_output()
    new, unused = load_matching(model, weights)
    world.print(
        f"Initial weights: {args.initial_checkpoint}, {first['what']}"
        + (", of which the encoder alone" if args.only_encoder else "")
    )
    if not same_key and not args.only_encoder and linear:
        own = model.state_dict()
        kept = transfer_linear_rows(own, linear, first_key, key)
        model.load_state_dict(own)
        new = [name for name in new if not name.startswith(OF_CODES)]
        world.print(
            f"  the key differs: {kept:,} of {len(key):,} codes keep their weights in the linear decoder, "
            "the others are new"
        )
        if not first_key:
            world.print(
                "  it does not say which codes its linear outputs are: key.json beside it, or --key, names "
                "them"
            )
    if model.ngrams and "ngrams.idf" not in weights:
        new = [name for name in new if not name.startswith("ngrams.")]
        world.print(f"  new: {len(model.ngrams.idf):,} n-grams, not fitted; they add nothing until trained")
    if new:
        world.print(f"  new, with random weights: {', '.join(models.by_part(new, model.state_dict()))}")
    if unused:
        world.print(
            "  in the checkpoint, but of another name or shape: "
            f"{', '.join(models.by_part(unused, first['model']))}"
        )
    if not args.only_encoder:
        for note in notes_on_formatter(first, formatter):
            world.print(f"  {note}")
    if not model.memory_mask:
        world.print(
            "  its decoder looks at padding too, as it was trained: texts are padded to the full width; "
            "--memory-mask makes it faster"
        )


def notes_on_formatter(first: dict, formatter: BlockyFormatter) -> list[str]:
    """Which flags would keep the decoder of the initial weights, where this run has another formatter."""
    size, separated = first["blocks"]
    if first["formatter"] not in (None, formatter.kind):
        return [
            f"its decoder writes {first['formatter']} codes, this run {formatter.kind}: --formatter "
            f"{first['formatter']} keeps it"
        ]
    own = (formatter.block_size, formatter.within_block_sep is not None)
    if first["formatter"] == "gpf" and size and own != (size, separated):
        flags = f"--block-size {size}" + " --use-within-block-sep" * separated
        return [f"its decoder writes codes in other blocks than this run: {flags} keeps it"]
    return []


def transfer_linear_rows(
    model_state: dict[str, Any], weights: dict[str, Any], old_key: dict[str, Any], new_key: dict[str, Any]
) -> int:
    """Rows of the linear decoder for codes that both keys hold, copied in place; returns how many."""
    shared = [code for code in new_key if code in old_key]
    if not shared or "linear_decoder.weight" not in weights:
        return 0
    new, old = [new_key[code] for code in shared], [old_key[code] for code in shared]
    names = [
        name
        for name in ("linear_decoder.weight", "linear_decoder.bias", "ngrams.linear.weight")
        if name in weights and name in model_state
    ]
    if any(
        weights[name].shape[1:] != model_state[name].shape[1:] or len(weights[name]) != len(old_key)
        for name in names
    ):
        return 0
    for name in names:
        model_state[name][new] = weights[name][old].to(model_state[name])
    return len(shared)
