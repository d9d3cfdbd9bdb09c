"""Models for other tools and machines: weights under the published names, with everything needed for coding:

    histocc export ./output --output model.bin
    histocc export ./output --output ./folder/model.safetensors

Every command of histocc reads either file and codes with it as with the run. If the published program (Dahl,
Johansen, Vedel, 2024, arXiv 2402.13604) would code differently, a note says so, and --for-published-program
refuses to write the file.
"""

import contextlib
import io
import json
import os
import re
import sys
from dataclasses import MISSING, dataclass

import torch

from histocc.figure import ENTRY, Figure
from histocc.formatter import BlockyFormatter, hisco_key
from histocc.job.card import CARD, card_of
from histocc.job.config import LossFlags
from histocc.model.confidence import PUBLISHED
from histocc.predict.config import PublishedFlags
from histocc.published import models
from histocc.published.formats import MAX_LEN, SETTINGS_ENTRY, model_files, without_tensors
from histocc.runtime.checkpoint import CHECKSUM, FORMAT, with_checksum
from histocc.runtime.config import Parser, declarations, flag
from histocc.runtime.errors import UserError, raise_if_any, run_command
from histocc.runtime.files import (
    OwnFiles,
    atomic_write,
    is_same,
    problems,
    remove_leftovers,
    save_path_problems,
)
from histocc.text import ASCII_LOWER

# Arguments of the training that are defaults of an evaluation or a fine-tuning.
OF_TRAINING = ("input_col", "language", "language_col", "key", "formatter", "code_separator")
OF_TRAINING += (*declarations(LossFlags),)


def differences(state: dict, formatter: BlockyFormatter) -> list[str]:
    """Return why the published program would code differently, and the flags to train with."""
    config, kind, codes = state["config"], state.get("kind", "mixer"), list(state["key"])
    writes, hisco = kind != "flat", formatter.kind == "hisco"
    gpf, separated = writes and formatter.kind == "gpf", formatter.within_block_sep is not None
    lengths = models.code_lengths(codes, separated)
    other_size, longest = not models.has_size(config, "base"), max(lengths)
    other_width = config["decoder_dim_feedforward"] != config["hidden_size"]
    other_codes = kind != "seq2seq" and codes != list(hisco_key())
    filled_up = not separated and len(lengths) > 1
    reasons = [
        (other_size, "its encoder has another size than google/canine-s: --model-size base"),
        (config["max_len"] != MAX_LEN, f"it does not read {MAX_LEN} positions: leave out --max-len"),
        (config["text"] != ASCII_LOWER, f"it does not clean texts: --clean-text {ASCII_LOWER}"),
        (writes and config["memory_mask"], "its decoder leaves out padding of the text: --no-memory-mask"),
        (writes and config["target_mask"], "its decoder leaves out PAD: --published-target-mask"),
        (writes and other_width, "its feed-forward width differs: leave out --decoder-dim-feedforward"),
        (config.get("ngrams"), "it has n-grams besides its encoder: --ngrams none"),
        (hisco and other_codes, "its codes are not those of the HISCO key in their order: --key hisco"),
        (not hisco and not gpf, f"it has no {kind} model for {formatter.kind}: --formatter gpf"),
        (gpf and separated and formatter.chars, "it takes custom tokens or commas between tokens, not both"),
        (gpf and longest != formatter.block_size, f"no code fills its block: --block-size {longest}"),
        (gpf and filled_up, "short codes are filled up with zeros there: --use-within-block-sep keeps them"),
    ]
    return [reason for holds, reason in reasons if holds]


@dataclass(frozen=True, kw_only=True)
class ExportConfig(PublishedFlags):
    """The flags of export."""

    model: str = flag(
        MISSING, "your run folder, a checkpoint or a published model", metavar="RUN", positional=True
    )
    output: str = flag(
        MISSING,
        "file to write: model.bin, or model.safetensors with JSON files next to it",
        metavar="FILE",
        positional="also",
    )
    to: str | None = flag(
        None,
        "kind of file: published (.bin) or safetensors (default: from the name)",
        choices=("published", "safetensors"),
    )
    for_published_program: bool = flag(
        False, "refuse a model that the published program would use differently"
    )
    target_cols: list[str] | None = flag(
        None, "code columns of a published general-purpose model", metavar="COL"
    )
    overwrite: bool = flag(False, "replace files that exist")


def export(args: ExportConfig) -> list[str]:
    """Write a model for other tools and return lines for the user. Raises UserError, OSError."""
    source, target = args.model, args.output
    form = args.to or ("safetensors" if target.endswith(".safetensors") else "published")
    if target.endswith(".safetensors") != (form == "safetensors"):
        name = f"{os.path.splitext(target)[0]}{'.safetensors' if form == 'safetensors' else '.bin'}"
        raise UserError(f"{target}: --to {form} writes another kind of file: name it {name}, or omit --to")
    inputs: dict[str | None, str] = dict.fromkeys(model_files(source), "the model")
    raise_if_any(
        problems([target], inputs, args.overwrite) + save_path_problems(os.path.dirname(target) or ".")
    )
    model, formatter, state = models.load_model(source, given=args.given(args.target_cols))
    reasons = "".join(f"\n  {reason}" for reason in differences(state, formatter))
    said = f"the published program would code differently with this model:{reasons}"
    if args.for_published_program and reasons:
        raise UserError(f"{source}: {said}")
    named = model.state_dict().items()
    weights = {name: value.contiguous() for name, value in named if name in state["model"]}
    state = {**state, "thresholds": PUBLISHED} if args.for_published_program else state
    trained = {name: value for name, value in state.get("args", {}).items() if name in OF_TRAINING}
    notes, weights_file = [f"Note: {said}"] if reasons else [], models.find_weights(source, source)
    of_run, card = (os.path.join(os.path.dirname(path), CARD) for path in (weights_file, target))
    if figure := Figure.of(state, os.path.dirname(weights_file)):  # perhaps from a test
        state = {**state, ENTRY: figure._asdict()}
    settings = {
        "format": FORMAT,
        "args": trained | {"key": bool(trained.get("key"))},
        **{name: state[name] for name in models.CODING if name != "key" and state.get(name) is not None},
    }
    lists = {"key": state["key"], **({"chars": list(formatter.chars)} if formatter.chars else {})}
    if form == "safetensors":
        files = safetensors_files(target, weights, lists, settings, formatter)
    else:
        content = with_checksum(
            {"model": weights, **lists, "step": state.get("step") or 0, SETTINGS_ENTRY: settings}
        )
        if args.for_published_program and state.get("kind") == "flat":  # its file is a dict of tensors
            bare = {name.replace("linear_decoder.", "out."): value for name, value in weights.items()}
            content = {re.sub("^encoder", "basemodel", name): value for name, value in bare.items()}
        torch.save(content, file := io.BytesIO())
        files = {target: file.getbuffer()}
    if args.overwrite or not os.path.lexists(card):
        text = card_of(weights_file, state).encode("utf-8", "backslashreplace")
        if OwnFiles(os.path.dirname(weights_file)).holds(of_run):  # it may hold a test's figures
            with open(of_run, "rb") as content:
                text = content.read()
        files[card] = memoryview(text)
    elif not is_same(card, of_run):
        notes.append(f"Note: {card} existed and was kept; use --overwrite to replace it by this model's")
    raise_if_any(problems(files, inputs, args.overwrite))
    os.makedirs(os.path.dirname(target) or ".", exist_ok=True)
    with contextlib.ExitStack() as together:  # writes all files or none
        for path, part in files.items():
            remove_leftovers(path)
            together.enter_context(atomic_write(path, args.overwrite)).write(part)
    return [f"Written: {' and '.join(files)}", *notes]


def safetensors_files(
    target: str, weights: dict[str, torch.Tensor], lists: dict, settings: dict, formatter: BlockyFormatter
) -> dict[str, bytes | memoryview]:
    """Return the content of a .safetensors file and of the JSON files next to it, by path. lists: key and
    chars, which the published program reads from separate files. Raises UserError.
    """
    try:
        from safetensors.torch import save
    except ImportError:
        raise UserError("--to safetensors needs a package: pip install safetensors") from None
    settings |= {CHECKSUM: with_checksum({"model": weights, "key": lists["key"], **settings})[CHECKSUM]}
    weights = dict(weights)
    settings = without_tensors(settings, SETTINGS_ENTRY, weights)
    config = {
        "model_type": "canine",
        **settings["config"],
        SETTINGS_ENTRY: settings,
        "model_domain": "Multilingual_CANINE",  # this and the rest are for the published program
        "num_classes": formatter.num_classes,
        "num_classes_flat": len(lists["key"]),
        "n_classes": len(lists["key"]),
        "dropout_rate": 0,
    }
    metadata = {name: json.dumps(value) for name, value in {**lists, SETTINGS_ENTRY: settings}.items()}
    files: dict[str, bytes | memoryview] = {target: save(weights, {"format": "pt", **metadata})}
    for name, value in {"config": config, **lists}.items():
        path = os.path.join(os.path.dirname(target), f"{name}.json")
        files[path] = json.dumps(value, indent=1).encode()
    return files


def get_args_parser() -> Parser:
    what = "Write a model as one file with everything that coding needs, for other tools and machines."
    examples = "./output --output model.bin", "./output --output ./folder/model.safetensors"
    return Parser(ExportConfig, "python -m histocc.export", what, *examples)


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: print(*export(get_args_parser().parse_args(argv)), sep="\n"))


if __name__ == "__main__":
    sys.exit(main())
