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
import json
import os
import sys
from collections.abc import Callable
from dataclasses import MISSING, dataclass
from typing import BinaryIO

import torch

from histocc.data.rows import key_reader
from histocc.formatter import BlockyFormatter, hisco_key
from histocc.job.config import Losses
from histocc.model.confidence import PUBLISHED
from histocc.predict.config import Published
from histocc.published import formats, models
from histocc.published.formats import MAX_LEN, SETTINGS, Given
from histocc.runtime import entrypoint
from histocc.runtime.checkpoint import BEST, CHECKSUM, FORMAT, LAST, find, with_checksum
from histocc.runtime.config import Parser, declarations, flag
from histocc.runtime.errors import UserError, in_words
from histocc.runtime.files import atomic_write, kind_of
from histocc.text import ASCII_LOWER

# Entries of a checkpoint that coding needs; those that a model does not have are left out.
CODING = (
    "kind",
    "formatter",
    "system",
    "languages",
    "thresholds",
    "linear_share",
    "confidence",
    "source",
    "hisco_numbers",
)
# Arguments of the training that an evaluation takes for its own where it is not told otherwise.
OF_TRAINING = ("input_col", "language", "language_col", "key", *declarations(Losses))


def settings_of(state: dict) -> dict:
    """What an exported file says beside weights and key, as plain types."""
    trained = {name: value for name, value in state.get("args", {}).items() if name in OF_TRAINING}
    return {
        "format": FORMAT,
        "kind": "mixer",
        "args": trained | {"key": bool(trained.get("key"))},
        "config": state["config"],
        **{name: state[name] for name in CODING if state.get(name) is not None},
    }


def differences(state: dict, formatter: BlockyFormatter) -> list[str]:
    """Why the published program would not code with this model as histocc does, and the flags to train with;
    [] where it does."""
    config, kind, codes = state["config"], state.get("kind", "mixer"), list(state["key"])
    writes = kind != "flat"
    found = [
        (
            not models.has_size(config, "base"),
            "its encoder has another size than google/canine-s: --model-size base",
        ),
        (
            config["max_len"] != MAX_LEN,
            f"it reads {config['max_len']} positions instead of {MAX_LEN}: leave --max-len out",
        ),
        (
            config["text"] != ASCII_LOWER,
            (f"it reads texts {config['text']}, and that program cleans them: --clean-text {ASCII_LOWER}"),
        ),
        (writes and config["memory_mask"], "its decoder leaves out padding of the text: --no-memory-mask"),
        (
            writes and config["target_mask"],
            "its decoder leaves out PAD among the codes: --published-target-mask",
        ),
        (
            writes and config["decoder_dim_feedforward"] != config["hidden_size"],
            (
                "its decoder has another feed-forward width than its encoder: leave"
                " --decoder-dim-feedforward out"
            ),
        ),
        (
            bool(config.get("ngrams")),
            "it has n-grams beside its encoder, of which that program knows nothing: --ngrams none",
        ),
    ]
    return [reason for wrong, reason in found + differences_of_codes(kind, codes, formatter) if wrong]


def differences_of_codes(kind: str, codes: list[str], formatter: BlockyFormatter) -> list[tuple[bool, str]]:
    """(whether it is so, reason) of what the key and the formatter make different there."""
    if formatter.kind == "hisco":
        reason = "its codes are not those of the HISCO key in their order: --key hisco"
        return [(kind != "seq2seq" and codes != list(hisco_key()), reason)]
    if formatter.kind != "gpf" or kind == "flat":
        what = "flat classifier" if kind == "flat" else "formatter"
        remedy = "" if kind == "flat" else ": --formatter gpf --block-size 3"
        return [(True, f"that program has no {what} for {formatter.kind}{remedy}")]
    lengths = models.code_lengths(codes, formatter.within_block_sep is not None)
    return [
        (
            bool(formatter.chars and formatter.within_block_sep),
            "it has its own tokens, and commas between them, and that program takes but one of both",
        ),
        (max(lengths) != formatter.block_size, f"no code fills its block: --block-size {max(lengths)}"),
        (
            formatter.within_block_sep is None and len(lengths) > 1,
            (
                "its codes differ in length, and that program fills them up with zeros:"
                " --use-within-block-sep keeps them"
            ),
        ),
    ]


def export(
    source: str, form: str, target: str, for_published_program: bool = False, given: Given = Given()
) -> list[str]:
    """Writes a model in a form that other tools read; returns what to tell.

    source: a run, a checkpoint, an exported or published model (given: what that does not say); form:
    "published", a `.bin`, or "safetensors"; for_published_program: only what that program codes equally.
    Raises UserError.
    """
    if find(source, (BEST, LAST)) is None and formats.find_weights(source) is None and os.path.exists(source):
        raise UserError(f"{source}: no checkpoint there (neither {BEST} nor {LAST})")
    if target.endswith(".safetensors") != (form == "safetensors"):
        raise UserError(
            f"{target}: the name must end with .safetensors for --to safetensors, and for that alone"
        )
    model, formatter, state = models.load_model(source, given=given)
    reasons, notes = differences(state, formatter), []
    if for_published_program:
        if reasons:
            raise UserError(
                "\n  ".join([f"{source}: the published program would code otherwise with it:", *reasons])
            )
        if state.get("thresholds") != PUBLISHED:
            notes.append(
                "Thresholds of the linear decoder: the published ones, as that program has no others"
            )
        state = {**state, "thresholds": PUBLISHED}
    elif reasons:
        notes.append(
            "\n  ".join(
                ["Note: for histocc alone. The published program would code otherwise with it:", *reasons]
            )
        )
    held = state["model"].keys()
    weights = {name: value.contiguous() for name, value in model.state_dict().items() if name in held}
    write = {"published": write_bin, "safetensors": write_safetensors}[form]
    files = write(target, weights, state, formatter, for_published_program)
    if for_published_program and formatter.kind == "gpf":
        notes.append(
            f"There: OccCANINE({target!r}, hf=False, system={state['system']!r}, "
            f"target_cols={formatter.target_cols}, "
            f"use_within_block_sep={formatter.within_block_sep is not None})"
        )
    return [f"Written: {' and '.join(files)}", *notes]


def refuse_existing(files: list[str]) -> None:
    for file in files:
        if kind := kind_of(file, follow_links=False):
            what = "exists" if kind == "a file" else f"is {kind}"
            raise UserError(f"{file} {what}; choose another {'name' if len(files) == 1 else 'folder'}")
    os.makedirs(os.path.dirname(files[0]) or ".", exist_ok=True)


def write_new(files: dict[str, Callable[[BinaryIO], object]]) -> list[str]:
    """Writes files of one folder, none if one fails, and returns their paths. Raises UserError."""
    try:
        with contextlib.ExitStack() as together:
            for path, write in files.items():
                file = together.enter_context(atomic_write(path, overwrite=False))
                write(file)
                file.flush()
        return list(files)
    except (OSError, RuntimeError) as error:
        raise UserError(in_words(error, getattr(error, "filename", None) or next(iter(files)))) from None


def chars_of(formatter: BlockyFormatter, name: str) -> dict[str, list[str]]:
    """The formatter's tokens under a name, where it has its own."""
    return {name: list(formatter.chars)} if formatter.chars else {}


def write_bin(
    target: str, weights: dict, state: dict, formatter: BlockyFormatter, for_published_program: bool
) -> list[str]:
    """A flat classifier for the published program is a dict of its tensors, which has no place for more."""
    refuse_existing([target])
    if for_published_program and state.get("kind") == "flat":
        content = {formats.flat_name(name, back=True): value for name, value in weights.items()}
    else:
        content = {
            "model": weights,
            "key": state["key"],
            "step": state.get("step") or 0,
            SETTINGS: settings_of(state),
        }
        content = with_checksum(content | chars_of(formatter, "chars"))
    return write_new({target: lambda out: torch.save(content, out)})


def write_safetensors(
    target: str, weights: dict, state: dict, formatter: BlockyFormatter, for_published_program: bool
) -> list[str]:
    try:
        from safetensors.torch import save
    except ImportError:
        raise UserError(
            "writing safetensors needs the safetensors package: pip install safetensors"
        ) from None
    flat = for_published_program and state.get("kind") == "flat"
    if flat:
        weights = {formats.flat_name(name, back=True): value for name, value in weights.items()}
    settings = settings_of(state)
    checked = with_checksum({**settings, "model": weights, "key": state["key"]})
    settings[CHECKSUM] = checked[CHECKSUM]
    config = {
        "model_type": "canine",
        "architectures": ["Seq2SeqMixerOccCANINE"],
        **settings["config"],
        SETTINGS: settings,
        "model_domain": "Multilingual_CANINE",
        "num_classes": formatter.num_classes,
        "num_classes_flat": len(state["key"]),
        "dropout_rate": 0,
    }
    if flat:
        config["n_classes"] = len(state["key"])
    beside = {
        "config.json": config,
        "key.json": state["key"],
        **chars_of(formatter, "chars.json"),
    }
    files = [target, *(os.path.join(os.path.dirname(target), name) for name in beside)]
    refuse_existing(files)
    said = {
        "key": state["key"],
        SETTINGS: settings,
        **chars_of(formatter, "chars"),
    }
    content = save(weights, {"format": "pt", **{name: json.dumps(value) for name, value in said.items()}})
    texts = {file: json.dumps(value, indent=1).encode() for file, value in zip(files[1:], beside.values())}
    return write_new(
        {
            target: lambda out: out.write(content),
            **{file: lambda out, text=text: out.write(text) for file, text in texts.items()},
        }
    )


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


def get_args_parser() -> Parser:
    return Parser(ExportConfig, "python -m histocc.export", "A model for other tools and machines.")


def run(argv: list[str] | None) -> None:
    """Raises UserError."""
    args = get_args_parser().parse_args(argv)
    given = Given(args.formatter, key_reader(args.key), args.target_cols, args.use_within_block_sep)
    print("\n".join(export(args.model, args.to, args.file, args.for_published_program, given)))


def main(argv: list[str] | None = None) -> int:
    return entrypoint.run_command(lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main())
