"""The model card of a run or an exported model, MODEL.md: what it learned from, how good it is, and what it
must not be used for. It is written from what the checkpoint and the folder of the run know.
"""

import json
import os
import shlex
from typing import Any

from histocc.data.report import report_lines
from histocc.job.config import FinetuneConfig, MixerConfig
from histocc.model.confidence import Confidence
from histocc.predict.coder import training_data
from histocc.runtime import checkpoint
from histocc.runtime.config import OF_ONE_START, declarations, flag_of
from histocc.runtime.files import OwnFiles, atomic_write
from histocc.text import UNKNOWN_LANGUAGE
from histocc.trainer.script import ARGS

CARD = "MODEL.md"
PAPER = (
    "Dahl, C. M., Johansen, T., & Vedel, C. (2024). Breaking the HISCO Barrier: Automatic Occupational"
    " Standardization with OccCANINE. arXiv:2402.13604. https://arxiv.org/abs/2402.13604"
)


def command(asked: dict[str, Any]) -> str:
    """Return the command of a run by its args.json: the flags that differ from their defaults."""
    kind, script = (
        (MixerConfig, "train_mixer.py") if "train_data" in asked else (FinetuneConfig, "finetune.py")
    )
    words = ["python", script]
    for name in declarations(kind):
        value = asked.get(name)
        if value not in (None, kind.__dataclass_fields__[name].default) and name not in OF_ONE_START:
            flag = flag_of(name) if value is not False else f"--no-{flag_of(name)[2:]}"
            values = value if isinstance(value, list) else [] if isinstance(value, bool) else [value]
            words += [flag, *map(str, values)]
    return shlex.join(words)


def card_of(file: str, state: dict[str, Any], figures: list[str] | None = None) -> str:
    """Return the text of the card of a model.

    Args:
        file: its weights, beside which the rows and the arguments of its training may be.
        state: its checkpoint.
        figures: sentences on its accuracy on rows that chose nothing; None: it is that of validation.
    """
    data = training_data(file, str(state.get("position", {}).get("fingerprint")))
    report, confidence, config = data.report if data else {}, Confidence.of(state), state["config"]
    best, why = confidence.best_decoder(state.get("kind", "mixer"), bool(config.get("ngrams")))
    names = ", ".join(name for name in state["languages"] if name != UNKNOWN_LANGUAGE)
    spoken, codes = f" ({names})" if names else "", f"{len(state['key']):,} codes of {state['system']}"
    size = f"a CANINE encoder of width {config['hidden_size']} with {config['num_hidden_layers']} layers"
    parts = [size] * config.get("encoder", True) + ["n-grams of characters and words"] * bool(
        config.get("ngrams")
    )
    weights = sum(weight.numel() for weight in state["model"].values())
    built = f"a model of {' and '.join(parts)} ({weights:,} parameters)"
    made_by = state.get("made_by", {})
    program = f"histocc {made_by.get('histocc', '')}".strip()
    training = [line for line in report_lines(report) if line[:4] not in ("Note", "    ")] if data else []
    if data:
        files = ", ".join(each["path"] for each in report["files"])
        training.append(
            f"Files: {files}; checksum of their content and how they were read: {data.fingerprint}"
        )
    if os.path.exists(path := os.path.join(os.path.dirname(file), ARGS)):
        with open(path, encoding="utf-8") as asked:
            training.append(f"Command: `{command(json.load(asked))}`")
    if made_by:
        seed, versions = state.get("rng", {}).get("seed"), ", ".join(map(" ".join, made_by.items()))
        training.append(f"Made by {versions}; seed {seed}, step {state['step']:,}")
    figures = figures or [
        f"On validation texts, by which parts of the model were chosen, so this flatters: {why}."
    ]
    fitted = (
        f"It was fitted on {confidence.texts:,} texts: about eight in ten answers with a `conf` of 0.8 are"
    )
    fitted += " right, if the texts are similar."
    not_fitted = "It was not fitted: `conf` does not say how often answers are right."
    against = [
        f"texts in other languages than those of its training{spoken}",
        "other kinds of sources, unless `evaluate` has compared it with a sample that people have coded",
        "statements or decisions about a single person: some codes are wrong, also with high confidence",
    ]
    if rare := len(report.get("rare_codes", ())):
        against.append(f"counts of the {rare:,} codes that fewer than 10 rows have, without a check")
    cite = [f"{program}, with this card", PAPER, "the authors of the data and of the codes"]
    paragraph = [f"Descriptions were coded with {program} (Dahl, Johansen and Vedel, 2024), {built},"]
    paragraph += [f"trained on {report['train_rows']:,} rows{spoken}"] if data else []
    paragraph += [f"to give {codes}.", *figures]
    sections: dict[str, list[str]] = {
        "Model": [f"texts{spoken} to {codes}", built, f"decoder of `predict`: {best} ({why})"],
        "Training": training,
        "Figures": figures,
        "Confidence": [fitted if confidence.texts else not_fitted],
        "What it must not be used for": against,
        "How to cite": cite,
    }
    lines = ["# Model card"]
    for title, content in sections.items():
        lines += ["", f"## {title}", "", *(f"- {line}" for line in content)] if content else []
    return "\n".join([*lines, "", "## Methods, for a paper", "", " ".join(paragraph)]) + "\n"


def write_card(file: str, figures: list[str] | None = None) -> None:
    """Write the card of a checkpoint into its folder, as `card_of` has it. Raises UserError, OSError."""
    text = card_of(file, checkpoint.load(file), figures)
    with atomic_write(OwnFiles(os.path.dirname(file)).claim(CARD)[0]) as target:
        target.write(text.encode("utf-8", "backslashreplace"))
