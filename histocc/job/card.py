"""The model card of a run or an exported model, MODEL.md: what it learned from, how good it is, and what it
must not be used for. It is written from what the checkpoint and the folder of the run know.
"""

import json
import os
import shlex
from typing import Any

from histocc.job.config import FinetuneConfig, MixerConfig
from histocc.model.confidence import Confidence
from histocc.runtime import checkpoint
from histocc.runtime.config import OF_ONE_START, declarations, flag_of
from histocc.runtime.files import OwnFiles, atomic_write
from histocc.text import UNKNOWN_LANGUAGE
from histocc.trainer.log import LOG, read_numbers
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
    folder, config, made_by = os.path.dirname(file), state["config"], state.get("made_by", {})
    data = state.get("data")
    names = ", ".join(name for name in state["languages"] if name != UNKNOWN_LANGUAGE)
    spoken, codes = f" ({names})" * bool(names), f"{len(state['key']):,} codes of {state['system']}"
    parts = [f"a CANINE encoder of width {config['hidden_size']}"] * config.get("encoder", True)
    parts += ["n-grams of characters and words"] * bool(config.get("ngrams"))
    weights = sum(weight.numel() for weight in state["model"].values())
    built = f"a model of {' and '.join(parts)} ({weights:,} parameters)"
    program, training, rows, rare = f"histocc {made_by.get('histocc', '')}".strip(), [], "", ""
    if data:
        checksum = state["position"]["fingerprint"]
        files = f"Files: {', '.join(data['files'])}; checksum of content and settings: {checksum}"
        training += [*data["lines"], files]
        rows = f" on {data['rows']['train']:,} rows{spoken}"
        if prior := state.get("prior"):
            rows += f", on top of the answers of the model {prior['name']}"
            training.append(f"Prior: {prior['name']}, {len(prior['key']):,} codes of {prior['system']}")
        rare = f" ({data['rare_codes']:,} codes have fewer than 10 rows)"
    if os.path.exists(path := os.path.join(folder, ARGS)):
        with open(path, encoding="utf-8") as asked:
            training.append(f"Command: `{command(json.load(asked))}`")
    if made_by:
        seed, versions = state["rng"]["seed"], ", ".join(map(" ".join, made_by.items()))
        training.append(f"Made by {versions}; seed {seed}, step {state['step']:,}")
    figures = figures or [validation_figures(folder, state, data["rows"]["val"] if data else None)]
    confidence = Confidence.of(state)
    best, why = confidence.best_decoder(state.get("kind", "mixer"), bool(config.get("ngrams")))
    fitted = (
        f"fitted on {confidence.texts:,} texts" if confidence.texts else "not fitted to how often it is right"
    )
    sections: dict[str, list[str]] = {
        "Model": [f"Texts{spoken} to {codes}", f"A{built[1:]}", f"Decoder of `predict`: {best} ({why})"],
        "Training": training,
        "Figures": [*figures, f"Confidence: {fitted}"],
        "What it must not be used for": [
            f"Texts in other languages than those of its training{spoken}",
            "Other kinds of sources, unless `evaluate` has compared it with a sample that people have coded",
            "Statements or decisions about a single person: some codes are wrong, also with high confidence",
            f"Counts of rare codes, without a check{rare}",
        ],
        "How to cite": [f"{program}, with this card", PAPER, "The authors of the data and of the codes"],
    }
    lines = ["# Model card"]
    for title, content in sections.items():
        lines += ["", f"## {title}", "", *(f"- {line}" for line in content)] if content else []
    paragraph = (
        f"Descriptions were coded with {program} (Dahl, Johansen and Vedel, 2024), {built}, trained{rows} to"
    )
    lines += ["", "## Methods, for a paper", "", " ".join([paragraph, f"give {codes}.", *figures])]
    return "\n".join(lines) + "\n"


def validation_figures(folder: str, state: dict[str, Any], rows: int | None) -> str:
    """Return sentences on the accuracy of a checkpoint: on its validation rows, by the log of its run and,
    for a decoder that is not logged, by the texts of its confidence; without such rows on training texts
    that were left out in turn. rows: number of the validation rows, if known.
    """
    logged = read_numbers(os.path.join(folder, LOG))  # a fit's last row and its validation have one step
    row = next((x for x in reversed(logged) if x["step"] == state.get("step")), {})
    of_log, confidence = {"flat": row.get("flat_acc"), "greedy": row.get("seq_acc")}, Confidence.of(state)
    if confidence.left_out and not rows:
        share = 100 * confidence.accuracy["flat"]
        what = f"{share:.1f} % of {confidence.texts:,} texts got exactly their codes"
        unsure = ", if the prior has not seen them" * (state.get("prior", {}).get("source") == "published")
        return f"{what}, each from a model that was learned without it{unsure}."
    prior = state.get("prior", {})
    knows_texts = "trained" in prior  # see `Prior.seen` in histocc/job/few.py
    new = " that the prior has not seen" * knows_texts
    best, number = confidence.best, f"{rows:,} " if rows and not knows_texts else ""
    shares = [f"{100 * share:.1f} % ({name})" for name, share in of_log.items() if share is not None]
    if not shares:
        return "It has not been evaluated."
    found = [f"{', '.join(shares)} of the {number}validation rows{new} got exactly their codes."]
    if best in {*confidence.accuracy} - {*of_log}:
        share = f"{100 * confidence.accuracy[best]:.1f} % ({best})"
        found.insert(0, f"{share} of {confidence.texts:,} validation texts, and")
    if not confidence.left_out:
        found.append("Parts of the model were chosen on these rows, so the figures are optimistic.")
    return " ".join(found)


def write_card(file: str, figures: list[str] | None = None) -> None:
    """Write the card of a checkpoint into its folder, as `card_of` has it. Raises UserError, OSError."""
    text = card_of(file, checkpoint.load(file), figures)
    with atomic_write(OwnFiles(os.path.dirname(file)).claim(CARD)[0]) as target:
        target.write(text.encode("utf-8", "backslashreplace"))
