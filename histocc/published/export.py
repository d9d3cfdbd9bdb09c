"""Models for other tools, and for other machines: weights under the published names, with everything that
coding with them needs.

    python -m histocc.export ./output --to published model.bin
    python -m histocc.export ./output --to safetensors ./folder/model.safetensors
    python -m histocc.export ./output --to published --for-published-program model.bin

Either form is read back by every command of histocc, and codes as the run does. `.bin`: a dict of model, key
and step as the published trainer writes it, and an entry `histocc`: format, kind, config (sizes, masks,
padding width, text rule), formatter, system, languages, thresholds; and a checksum. Safetensors: the same
entries as JSON in the metadata, and config.json, key.json and chars.json beside it, as the published folders
have them.

The published program reads texts in lower-case ASCII, looks at padding, and brings its own HISCO key (its
package histocc; Dahl, Johansen, Vedel, 2024, arXiv 2402.13604). What was trained otherwise it would code
otherwise: that is said, and --for-published-program refuses it.
"""

import contextlib
import io
import json
import os
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
from histocc.runtime import entrypoint
from histocc.runtime.checkpoint import CHECKSUM, FORMAT, with_checksum
from histocc.runtime.config import Parser, declarations, flag
from histocc.runtime.errors import UserError, in_words, raise_if_any
from histocc.runtime.files import atomic_write, problems
from histocc.text import ASCII_LOWER

# Entries of a checkpoint that coding needs; those that a model does not have are left out.
CODING = ["kind", "formatter", "system", "languages", "thresholds", "linear_share", "confidence"]
CODING += ["source", "hisco_numbers"]
# Arguments of the training that an evaluation takes for its own if it is not told otherwise.
OF_TRAINING = ("input_col", "language", "language_col", "key", *declarations(Losses))


def differences(state: dict, formatter: BlockyFormatter) -> Iterator[str]:
    """Why the published program would not code with this model as histocc does, and the flags to train
    with.
    """
    config, kind, codes = state["config"], state.get("kind", "mixer"), list(state["key"])
    if not models.has_size(config, "base"):
        yield "its encoder has another size than google/canine-s: --model-size base"
    if config["max_len"] != MAX_LEN:
        yield f"it reads {config['max_len']} positions instead of {MAX_LEN}: leave --max-len out"
    if config["text"] != ASCII_LOWER:
        yield f"it reads texts {config['text']}, and that program cleans them: --clean-text {ASCII_LOWER}"
    if kind != "flat" and config["memory_mask"]:
        yield "its decoder leaves out padding of the text: --no-memory-mask"
    if kind != "flat" and config["target_mask"]:
        yield "its decoder leaves out PAD among the codes: --published-target-mask"
    if kind != "flat" and config["decoder_dim_feedforward"] != config["hidden_size"]:
        yield "its decoder is wider in its feed-forward than its encoder: leave --decoder-dim-feedforward out"
    if config.get("ngrams"):
        yield "it has n-grams beside its encoder, of which that program knows nothing: --ngrams none"
    if formatter.kind == "hisco":
        if kind != "seq2seq" and codes != list(hisco_key()):
            yield "its codes are not those of the HISCO key in their order: --key hisco"
    elif formatter.kind != "gpf" or kind == "flat":
        what = "flat classifier" if kind == "flat" else "formatter"
        yield f"that program has no {what} for {formatter.kind}: --formatter gpf --block-size 3"
    else:
        lengths = models.code_lengths(codes, formatter.within_block_sep is not None)
        if formatter.chars and formatter.within_block_sep:
            yield "it has its own tokens, and commas between them, and that program takes but one of both"
        if max(lengths) != formatter.block_size:
            yield f"no code fills its block: --block-size {max(lengths)}"
        if formatter.within_block_sep is None and len(lengths) > 1:
            yield (
                "its codes differ in length, and that program fills them up with zeros:"
                " --use-within-block-sep keeps them"
            )


def export(
    source: str,
    form: str,
    target: str,
    for_published_program: bool = False,
    given: Given = Given(),
    overwrite: bool = False,
) -> list[str]:
    """Writes a model in a form that other tools read; returns what to tell.

    Args:
        source: a run, a checkpoint, an exported or published model.
        form: "published", a `.bin`, or "safetensors".
        target: path of the file.
        for_published_program: writes only what that program codes equally.
        given: what a published model does not say.
        overwrite: whether files may be replaced.

    Raises UserError.
    """
    if target.endswith(".safetensors") != (form == "safetensors"):
        raise UserError(
            f"{target}: the name must end with .safetensors for --to safetensors, and for that alone"
        )
    model, formatter, state = models.load_model(source, given=given)
    reasons, notes = "".join(f"\n  {reason}" for reason in differences(state, formatter)), []
    if for_published_program and reasons:
        raise UserError(f"{source}: the published program would code otherwise with it:{reasons}")
    if reasons:
        notes.append(f"Note: for histocc alone. The published program would code otherwise with it:{reasons}")
    weights = {name: value for name, value in model.state_dict().items() if name in state["model"]}
    weights = {name: value.contiguous() for name, value in weights.items()}
    if for_published_program:
        if state.get("thresholds") != PUBLISHED:
            notes.append("Thresholds of the linear decoder: the published ones, which that program has")
        state = {**state, "thresholds": PUBLISHED}
        if formatter.kind == "gpf":
            notes.append(
                f"There: OccCANINE({target!r}, hf=False, system={state['system']!r}, "
                f"target_cols={formatter.target_cols}, "
                f"use_within_block_sep={formatter.within_block_sep is not None})"
            )
        if state.get("kind") == "flat":
            weights = {flat_name(name, back=True): value for name, value in weights.items()}
    trained = {name: value for name, value in state.get("args", {}).items() if name in OF_TRAINING}
    settings = {
        "format": FORMAT,
        "kind": "mixer",
        "args": trained | {"key": bool(trained.get("key"))},
        "config": state["config"],
        **{name: state[name] for name in CODING if state.get(name) is not None},
    }
    content = {"model": weights, "key": state["key"]}
    more = {"chars": list(formatter.chars)} if formatter.chars else {}
    if form == "safetensors":
        settings[CHECKSUM] = with_checksum(settings | content)[CHECKSUM]
        files = _safetensors(target, weights, {"key": state["key"], **more}, settings, formatter)
    else:
        content |= {"step": state.get("step") or 0, SETTINGS: settings, **more}
        # a flat classifier there is a dict of its tensors, which has no place for more
        flat_alone = for_published_program and state.get("kind") == "flat"
        torch.save(weights if flat_alone else with_checksum(content), buffer := io.BytesIO())
        files = {target: buffer.getbuffer()}
    raise_if_any(problems(files, dict.fromkeys(files_of(source), "the model"), overwrite))
    os.makedirs(os.path.dirname(target) or ".", exist_ok=True)
    try:
        with contextlib.ExitStack() as together:  # none is written if one fails
            for path, part in files.items():
                together.enter_context(atomic_write(path, overwrite)).write(part)
    except OSError as error:
        raise UserError(in_words(error, error.filename or target)) from None
    return [f"Written: {' and '.join(files)}", *notes]


def _safetensors(target: str, weights: dict, lists: dict, settings: dict, formatter: BlockyFormatter) -> dict:
    """Path → content of each file: the weights with key, tokens (lists) and settings in the metadata, and the
    same as JSON beside them.
    """
    try:
        from safetensors.torch import save
    except ImportError:
        raise UserError(
            "writing safetensors needs the safetensors package: pip install safetensors"
        ) from None
    metadata = {name: json.dumps(value) for name, value in {**lists, SETTINGS: settings}.items()}
    config = {
        "model_type": "canine",
        "architectures": ["Seq2SeqMixerOccCANINE"],
        **settings["config"],
        SETTINGS: settings,
        "model_domain": "Multilingual_CANINE",
        "num_classes": formatter.num_classes,
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
    return entrypoint.run_command(lambda: run(argv))
