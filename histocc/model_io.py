"""Models out of checkpoints, and the first weights of a new run."""

import argparse
import contextlib
import os

import torch

from histocc import checkpoint, published, tables
from histocc.canine import CanineConfig
from histocc.distributed import World
from histocc.errors import UserError
from histocc.formatter import BlockyFormatter, CodeError, make_formatter
from histocc.mixer import MODEL_SIZES, Seq2SeqMixerOccCANINE, model_config
from histocc.text import LANGUAGES


def build_model(config: dict, formatter: BlockyFormatter, codes: int, dropout: float = 0.0) -> Seq2SeqMixerOccCANINE:
    """The model that a checkpoint's `config` describes, with random weights from torch's generator."""
    return Seq2SeqMixerOccCANINE(
        num_classes=formatter.num_classes, num_classes_flat=codes, dropout_rate=dropout,
        decoder_dim_feedforward=config["decoder_dim_feedforward"], config=CanineConfig.from_dict(config),
        memory_mask=config["memory_mask"])


def load_model(path: str, device: torch.device | str = "cpu", *, formatter: str | None = None,
               key: str | None = None) -> tuple[Seq2SeqMixerOccCANINE, BlockyFormatter, dict]:
    """(model in eval mode, formatter, checkpoint) of a checkpoint file, a run's folder, its best one first, or what others published: a
    file, a folder, or a name on the hub.

    formatter, key: kind of formatter and file of codes, for published models alone. Raises UserError.
    """
    file = find_weights(path, path)
    model, own, state = model_of(file, load_state(file), formatter, key)
    return model.to(device), own, state


def load_state(file: str) -> dict:
    """What a file of weights holds. Raises UserError."""
    return published.load_content(file)


def brings_settings(state: dict) -> bool:
    """Whether a file of weights is a checkpoint of histocc, which holds formatter and sizes."""
    return "format" in state or "config" in state


@contextlib.contextmanager
def damage_is_said(file: str):
    """What goes wrong inside with weights that do not fit, as a UserError."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        said = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise UserError(f"{file}: its weights do not fit its settings; it may be damaged ({said})") from None


def model_of(file: str, state: dict, formatter: str | None = None, key: str | None = None) -> tuple[Seq2SeqMixerOccCANINE, BlockyFormatter, dict]:
    """As `load_model`, of what `load_state` gave, on the CPU."""
    if not brings_settings(state):
        with damage_is_said(file):
            model, own, state = published_model(file, state, formatter, key)
        return model.eval(), own, state
    if formatter or key:
        raise UserError(f"{file}: brings its formatter and its key; leave {'--formatter' if formatter else '--key'} out")
    state = own_checkpoint(file, state)
    with damage_is_said(file):
        own = BlockyFormatter.from_dict(state["formatter"])
        model = build_model(state["config"], own, len(state["key"]))
        model.load_state_dict(state["model"])
    return model.eval(), own, state


def published_model(file: str, content: dict, kind: str | None, key_file: str | None) -> tuple[Seq2SeqMixerOccCANINE, BlockyFormatter, dict]:
    """As `load_model`, of weights that come without settings. `kind` in the checkpoint: mixer, or flat, which has no seq2seq decoder.

    A mixer looks at padding too, as it was trained. Raises UserError.
    """
    found = published.read(file, content)
    if found.kind == "encoder" or "linear_decoder.weight" not in found.weights:
        raise UserError(f"{file}: holds an encoder alone, which codes nothing; train from it with --initial-checkpoint")
    formatter = published_formatter(file, found, kind)
    codes = tables.read_key(key_file) if key_file else list(found.key)
    codes, outputs = [formatter.repair(code)[0] for code in codes], len(found.weights["linear_decoder.weight"])
    if len(codes) != outputs or len(set(codes)) < outputs:
        raise UserError(f"{file}: has {outputs:,} outputs, and its key {len(set(codes)):,} different codes; --key FILE names its codes, columns "
                        "code and system_code (or hisco)")
    config = {**found.config, "memory_mask": found.kind != "mixer", "max_len": 128}
    model = build_model(config, formatter, outputs)
    missing = [name for name in checkpoint.load_matching(model, found.weights)[0] if found.kind == "mixer" or not name.startswith("decoder.")]
    if missing:
        raise UserError(f"{file}: misses {', '.join(by_part(missing, model.state_dict()))}")
    state = {**found.as_checkpoint(), "key": {code: i for i, code in enumerate(codes)}, "config": config, "formatter": formatter.to_dict(),
             "system": formatter.kind, "languages": list(LANGUAGES), "kind": found.kind}
    return model, formatter, state


def published_formatter(file: str, found: published.Published, kind: str | None) -> BlockyFormatter:
    """The formatter of published weights: `kind`, or the one whose tokens they have. Raises UserError where that is not known or not so."""
    tokens = found.weights.get("decoder.token_emb.embedding.weight")
    possible = [make_formatter(name, None) for name in ("hisco", "occ1950") if kind in (None, name)]
    if tokens is not None:
        possible = [formatter for formatter in possible if formatter.num_classes[0] + 1 == len(tokens)]
    elif kind is None:                               # a flat classifier has no tokens, but perhaps codes that only one system has
        possible = [formatter for formatter in possible if fits(formatter, found.key)]
    if len(possible) == 1:
        return possible[0]
    what = f"{len(tokens)} tokens" if tokens is not None else "no tokens"
    raise UserError(f"{file}: the weights have {what}, and those of " + (f"formatter {kind} are others" if kind else "neither hisco nor occ1950 alone; "
                    "--formatter names the system. A general-purpose model brings its settings when it is trained on, with --initial-checkpoint"))


def fits(formatter: BlockyFormatter, codes) -> bool:
    """Whether there are codes and the formatter can write each."""
    try:
        return bool([formatter.encode_code(formatter.repair(code)[0]) for code in codes])
    except CodeError:
        return False


def own_checkpoint(file: str, state: dict | None = None) -> dict:
    state = checkpoint.load(file) if state is None else state
    if state.get("format") != checkpoint.FORMAT:
        raise UserError(f"{file}: holds weights but not the settings of their model (format {state.get('format')!r}); "
                        f"this version reads format {checkpoint.FORMAT}, as its own training writes it")
    check_whole(file, state)
    return state


def check_whole(file: str, state: dict) -> None:
    """Raises UserError where something is missing that a checkpoint of histocc has."""
    wrong = [name for name in ("model", "config", "formatter", "key", "args", "rng", "position")
             if not isinstance(state.get(name), dict)]
    if wrong:
        raise UserError(f"{file}: is not a whole checkpoint: {', '.join(wrong)} missing or of another type")


def newest_good(folder: str) -> tuple[str, dict, list[str]]:
    """(file, checkpoint, what is wrong with the files that should have been it) of the run in `folder`.

    Raises UserError where no checkpoint of it can be read.
    """
    wrong = []
    for path in checkpoint.newest_first(folder):
        try:
            return path, own_checkpoint(path), wrong
        except UserError as error:
            wrong.append(str(error))
    raise UserError("\n  ".join([f"{folder}: no checkpoint of the run can be read; --overwrite starts anew", *wrong]))


def run_config(args: argparse.Namespace, first: dict | None) -> dict:
    """`config` of a new run: sizes from --model-size or from the checkpoint that it starts from. Raises UserError."""
    dropouts = {"hidden_dropout_prob": args.encoder_dropout, "attention_probs_dropout_prob": args.encoder_dropout}
    if first is None:
        encoder = model_config(args.model_size or "base", **dropouts).to_dict()
    else:
        encoder = {**first["config"], **dropouts}
        if args.model_size and not has_size(encoder, args.model_size):
            raise UserError(f"--model-size {args.model_size}: the checkpoint {args.initial_checkpoint} has another size "
                            f"(width {encoder['hidden_size']}, {encoder['num_hidden_layers']} layers); leave --model-size out")
    config = {**encoder, "max_len": args.max_len, "memory_mask": True,
              "decoder_dim_feedforward": args.decoder_dim_feedforward or encoder["hidden_size"]}
    if first is not None and not args.only_encoder:
        config["memory_mask"] = args.memory_mask or first["config"]["memory_mask"]
        if args.decoder_dim_feedforward is None:
            config["decoder_dim_feedforward"] = first["config"]["decoder_dim_feedforward"]
    return config


def load_first_weights(model: Seq2SeqMixerOccCANINE, args: argparse.Namespace, first: dict, key: dict, world: World) -> None:
    """Weights of --initial-checkpoint where name and shape fit; says what is new."""
    weights = {name: value for name, value in first["model"].items()
               if not args.only_encoder or name.startswith("encoder.")}
    same_key = list(first["key"]) == list(key)
    if not same_key:
        linear = {name: weights.pop(name) for name in list(weights) if name.startswith("linear_decoder.")}
    new, unused = checkpoint.load_matching(model, weights)
    world.print(f"First weights: {args.initial_checkpoint}, {first['what']}" + (", of which the encoder alone" if args.only_encoder else ""))
    if not same_key and not args.only_encoder and linear:
        own = model.state_dict()
        kept = checkpoint.transfer_linear_rows(own, linear, first["key"], key)
        model.load_state_dict(own)
        new = [name for name in new if not name.startswith("linear_decoder.")]
        world.print(f"  the key differs: {kept:,} of {len(key):,} codes keep their weights in the linear decoder, the others are new")
    if new:
        world.print(f"  new, with random weights: {', '.join(by_part(new, model.state_dict()))}")
    if unused:
        world.print(f"  in the checkpoint, but of another name or shape: {', '.join(by_part(unused, first['model']))}")
    if not model.memory_mask:
        world.print("  its decoder looks at padding too, as it was trained: texts are padded to the full width; --memory-mask makes it faster")


def by_part(found: list[str], among: dict) -> list[str]:
    """«name [shape]» of tensors; a part of the model (`decoder`, `linear_decoder`) of which all are named stands for them."""
    names = []
    for part in dict.fromkeys(name.partition(".")[0] for name in found):
        inside = [name for name in found if name.startswith(part + ".")]
        whole = len(inside) == sum(name.startswith(part + ".") for name in among)
        names += [f"all {len(inside)} tensors of {part}"] if whole and len(inside) > 2 else inside
    return names


def has_size(config: dict, name: str) -> bool:
    """Whether the encoder of `config` has the sizes that --model-size `name` makes."""
    sizes = model_config(name).to_dict()
    return all(config[field] == value for field, value in sizes.items() if "dropout" not in field)


def size_name(config: dict) -> str | None:
    """tiny, small or base; None for other sizes."""
    return next((name for name in MODEL_SIZES if has_size(config, name)), None)


def system_name(formatter: BlockyFormatter) -> str:
    """Name of the output columns: hisco, occ1950, or what the target columns have in common."""
    if formatter.kind != "gpf":
        return formatter.kind
    return os.path.commonprefix(formatter.target_cols).rstrip("_0123456789") or formatter.target_cols[0]


def initial_file(args: argparse.Namespace) -> str:
    """The file that --initial-checkpoint names. Raises UserError."""
    return find_weights(args.initial_checkpoint, f"--initial-checkpoint {args.initial_checkpoint}")


def find_weights(path: str, said: str) -> str:
    """The file of weights that `path` names: itself, the best or last of a run, the one in a published folder, or of a name on the hub.

    said: what a message begins with. Raises UserError.
    """
    file = checkpoint.find(path, (checkpoint.BEST, checkpoint.LAST)) or published.find_weights(path)
    if file is None and os.path.isdir(path):
        raise UserError(f"{said}: no checkpoint there (neither {checkpoint.BEST}, {checkpoint.LAST} nor "
                        f"{' nor '.join(published.WEIGHTS)})")
    if file is None and path.count("/") <= 1 and not path.startswith((".", "/", "~")) and not path.endswith((".bin", ".safetensors")):
        file = published.find_weights(published.from_hub(path))
    if file is None:
        raise UserError(f"{said}: no checkpoint there" + ("" if os.path.exists(path) else " (no such file or folder)"))
    return file


def first_weights(args: argparse.Namespace) -> dict:
    """model, key and config to start from: a checkpoint of histocc, or what others published. Raises UserError.

    A published mixer was trained with a decoder that looks at padding too; it keeps that unless --memory-mask.
    """
    file = initial_file(args)
    state = published.load_content(file)
    if state.get("format") == checkpoint.FORMAT:
        check_whole(file, state)
        return {"model": state["model"], "key": state["key"], "config": state["config"], "what": "a checkpoint of histocc"}
    with damage_is_said(file):
        found = published.read(file, state)
    config = {**found.config, "memory_mask": found.kind != "mixer", "max_len": 128}
    return {**found.as_checkpoint(), "config": config, "what": published.KINDS[found.kind]}
