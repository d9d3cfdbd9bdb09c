"""Models for other tools, and for other machines: weights under the published names, with everything that
coding with them needs.

    python -m histocc.export ./output --to published model.bin
    python -m histocc.export ./output --to safetensors ./folder/model.safetensors
    python -m histocc.export ./output --to published --for-published-program model.bin

Either form is read back by every command of histocc, and codes as the run does. `.bin`: a dict of model, key
and step as the published trainer writes it, an entry `histocc` with all else, and a checksum. Safetensors:
the same entries as JSON in the metadata, and config.json, key.json and chars.json beside it.

The published program (Dahl, Johansen, Vedel, 2024, arXiv 2402.13604) reads lower-case ASCII, looks at
padding, and brings its own HISCO key and thresholds. What it would code otherwise is said, with the flags to
train with, and --for-published-program refuses it.
"""

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import MISSING, dataclass

import torch

from histocc.data.rows import key_reader
from histocc.formatter import BlockyFormatter, hisco_key
from histocc.job.config import Losses
from histocc.model.confidence import PUBLISHED
from histocc.predict.config import Published
from histocc.published import models
from histocc.published.formats import MAX_LEN, SETTINGS, Given, files_of, flat_name
from histocc.runtime.checkpoint import CHECKSUM, FORMAT, with_checksum
from histocc.runtime.config import Parser, declarations, flag
from histocc.runtime.errors import UserError, raise_if_any
from histocc.runtime.files import atomic_write, problems
from histocc.runtime.world import run_command
from histocc.text import ASCII_LOWER

# Entries of a checkpoint that coding needs, as far as a model has them.
CODING = ["kind", "formatter", "system", "languages", "thresholds", "linear_share", "confidence"]
CODING += ["source", "hisco_numbers"]
# Arguments of the training that an evaluation takes for its own if it is not told otherwise.
OF_TRAINING = ("input_col", "language", "language_col", "key", *declarations(Losses))


def differences(state: dict, formatter: BlockyFormatter) -> Iterator[str]:
    """Why the published program would code otherwise with this model, and the flags to train with."""
    config, kind, codes = state["config"], state.get("kind", "mixer"), list(state["key"])
    if not models.has_size(config, "base"):
        yield "its encoder has another size than google/canine-s: --model-size base"
    if config["max_len"] != MAX_LEN:
        yield f"it does not read {MAX_LEN} positions: leave --max-len out"
    if config["text"] != ASCII_LOWER:
        yield f"it does not clean texts: --clean-text {ASCII_LOWER}"
    if kind != "flat" and config["memory_mask"]:
        yield "its decoder leaves out padding of the text: --no-memory-mask"
    if kind != "flat" and config["target_mask"]:
        yield "its decoder leaves out PAD among the codes: --published-target-mask"
    if kind != "flat" and config["decoder_dim_feedforward"] != config["hidden_size"]:
        yield "its decoder has another feed-forward width: leave --decoder-dim-feedforward out"
    if config.get("ngrams"):
        yield "it has n-grams beside its encoder: --ngrams none"
    if formatter.kind == "hisco":
        if kind != "seq2seq" and codes != list(hisco_key()):
            yield "its codes are not those of the HISCO key in their order: --key hisco"
    elif formatter.kind != "gpf" or kind == "flat":
        yield f"that program has no {kind} model for {formatter.kind}: --formatter gpf"
    else:
        separated = formatter.within_block_sep is not None
        lengths = models.code_lengths(codes, separated)
        if separated and formatter.chars:
            yield "it has its own tokens, and commas between them, and that program takes but one of both"
        if max(lengths) != formatter.block_size:
            yield f"no code fills its block: --block-size {max(lengths)}"
        if not separated and len(lengths) > 1:
            yield "its short codes are filled up with zeros there: --use-within-block-sep keeps them"


def export(
    source: str,
    form: str,
    target: str,
    for_published_program: bool = False,
    given: Given = Given(),
    overwrite: bool = False,
) -> list[str]:
    """Writes a model in a form that other tools read; returns what to tell. Raises UserError, OSError.

    Args:
        source: a run, a checkpoint, an exported or published model.
        form: "published", a `.bin`, or "safetensors".
        target: path of the file.
        for_published_program: writes only what that program codes equally, with its own thresholds.
        given: what a published model does not say.
    """
    if target.endswith(".safetensors") != (form == "safetensors"):
        raise UserError(f"{target}: ends with .safetensors for --to safetensors, and for that alone")
    model, formatter, state = models.load_model(source, given=given)
    reasons = "".join(f"\n  {reason}" for reason in differences(state, formatter))
    said = f"the published program would code otherwise with it:{reasons}"
    if for_published_program and reasons:
        raise UserError(f"{source}: {said}")
    named = model.state_dict()
    weights = {name: named[name].contiguous() for name in named if name in state["model"]}
    state = {**state, "thresholds": PUBLISHED} if for_published_program else state
    trained = {name: value for name, value in state.get("args", {}).items() if name in OF_TRAINING}
    settings = {
        "format": FORMAT,
        "kind": "mixer",
        "args": trained | {"key": bool(trained.get("key"))},
        "config": state["config"],
        **{name: state[name] for name in CODING if state.get(name) is not None},
    }
    lists = {"key": state["key"], **({"chars": list(formatter.chars)} if formatter.chars else {})}
    if form == "safetensors":
        content = {"model": weights, "key": state["key"], **settings}
        settings[CHECKSUM] = with_checksum(content)[CHECKSUM]
        files = _safetensors(target, weights, lists, settings, formatter.num_classes)
    else:
        content = {"model": weights, **lists, "step": state.get("step") or 0, SETTINGS: settings}
        content = with_checksum(content)
        if for_published_program and state.get("kind") == "flat":  # there a dict of its tensors alone
            content = {flat_name(name, back=True): value for name, value in weights.items()}
        torch.save(content, file := io.BytesIO())
        files = {target: file.getbuffer()}
    raise_if_any(problems(files, dict.fromkeys(files_of(source), "the model"), overwrite))
    os.makedirs(os.path.dirname(target) or ".", exist_ok=True)
    with contextlib.ExitStack() as together:  # none is written if one fails
        for path, part in files.items():
            together.enter_context(atomic_write(path, overwrite)).write(part)
    return [f"Written: {' and '.join(files)}", *([f"Note: {said}"] if reasons else [])]


def _safetensors(target: str, weights: dict, lists: dict, settings: dict, num_classes: list[int]) -> dict:
    """Path → content of each file: the weights with `lists` and settings as metadata, and these as JSON."""
    try:
        from safetensors.torch import save
    except ImportError:
        raise UserError("--to safetensors needs a package: pip install safetensors") from None
    metadata = {name: json.dumps(value) for name, value in {**lists, SETTINGS: settings}.items()}
    config = {
        "model_type": "canine",
        "architectures": ["Seq2SeqMixerOccCANINE"],
        **settings["config"],
        SETTINGS: settings,
        "model_domain": "Multilingual_CANINE",
        "num_classes": num_classes,
        "num_classes_flat": len(lists["key"]),
        "n_classes": len(lists["key"]),
        "dropout_rate": 0,
    }
    files: dict[str, bytes] = {target: save(weights, {"format": "pt", **metadata})}
    for name, value in {"config": config, **lists}.items():
        files[os.path.join(os.path.dirname(target), f"{name}.json")] = json.dumps(value, indent=1).encode()
    return files


@dataclass(frozen=True, kw_only=True)
class ExportConfig(Published):
    """What export takes."""

    model: str = flag(
        MISSING,
        "save folder of a run, a checkpoint, an exported or published model",
        metavar="RUN_OR_FILE",
        positional=True,
    )
    to: str = flag(
        MISSING, "a .bin, or safetensors with JSON files beside it", choices=("published", "safetensors")
    )
    file: str = flag(MISSING, "file to write", metavar="FILE", positional=True)
    for_published_program: bool = flag(
        False, "write only what the published program codes equally, or refuse"
    )
    target_cols: list[str] | None = flag(None, "of a published general-purpose model", metavar="COL")
    overwrite: bool = flag(False, "replace files that are there")


def get_args_parser() -> Parser:
    return Parser(ExportConfig, "python -m histocc.export", "A model for other tools and machines.")


def run(argv: list[str] | None) -> None:
    """Raises UserError."""
    args = get_args_parser().parse_args(argv)
    given = Given(args.formatter, key_reader(args.key), args.target_cols, args.use_within_block_sep)
    lines = export(args.model, args.to, args.file, args.for_published_program, given, args.overwrite)
    print("\n".join(lines))


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main())
