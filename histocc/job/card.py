"""The model card of a run or an exported model, MODEL.md: what it learned from, how good it is, and what it
must not be used for. It is written from the checkpoint and the run folder.
"""

import json
import os
import shlex
from collections.abc import Callable, Sequence
from typing import Any

from histocc import __version__
from histocc.data.config import text_columns, text_flags
from histocc.data.rows import english_name
from histocc.figure import NOT_EVALUATED, Figure, keep, may_have_seen
from histocc.job.config import FinetuneConfig, MixerConfig
from histocc.model.confidence import Confidence
from histocc.runtime import checkpoint
from histocc.runtime.config import declarations, flag_of, flags_that
from histocc.runtime.files import OwnFiles, atomic_write
from histocc.runtime.log import at_step, counted, highlighted
from histocc.text import UNKNOWN_LANGUAGE, in_markdown
from histocc.trainer.script import ARGS

CARD = "MODEL.md"
PAPER = (
    "Dahl, C. M., Johansen, T., & Vedel, C. (2024). Breaking the HISCO Barrier: Automatic Occupational"
    " Standardization with OccCANINE. arXiv:2402.13604. https://arxiv.org/abs/2402.13604"
)
HISCO = (
    "Van Leeuwen, M. H. D., Maas, I., & Miles, A. (2002). HISCO: Historical International Standard"
    " Classification of Occupations. Leuven University Press."
)


def command(asked: dict[str, Any]) -> str:
    """Return the command of a run from its args.json, with the flags that differ from their defaults."""
    kind, script = (
        (MixerConfig, "train_mixer.py") if "train_data" in asked else (FinetuneConfig, "finetune.py")
    )
    words = ["python", script]
    of_start = flags_that(kind, "of_start")
    for name in declarations(kind):
        value = asked.get(name)
        if value not in (None, kind.__dataclass_fields__[name].default) and name not in of_start:
            flag = flag_of(name) if value is not False else f"--no-{flag_of(name)[2:]}"
            values = value if isinstance(value, list) else [] if isinstance(value, bool) else [value]
            words += [flag, *map(str, values)]
    return shlex.join(words)


def training_lines(state: dict[str, Any], folder: str) -> list[str]:
    """Return what a checkpoint and its folder say about the training: data, prior, command and versions."""
    data, prior, made_by = (state.get(name) for name in ("data", "prior", "made_by"))
    lines: list[str] = []
    if data:
        checksum = state["position"]["fingerprint"]
        files = f"Files: {', '.join(data['files'])}; checksum of content and settings: {checksum}"
        lines += map(in_markdown, [*data["lines"], files])
        if prior:
            name = in_markdown(prior["name"])
            lines.append(f"Prior: {name}, {len(prior['key']):,} codes of {prior['system']}")
    if os.path.exists(path := os.path.join(folder, ARGS)):
        with open(path, encoding="utf-8") as asked:
            lines.append(f"Command: `{command(json.load(asked))}`")
    if made_by:
        seed, versions = state["rng"]["seed"], ", ".join(map(" ".join, made_by.items()))
        lines.append(f"Made by {versions}; seed {seed}{at_step(state['step'])}")
    return lines


def card_of(file: str, state: dict[str, Any], figure: Figure | None = None, more: Sequence[str] = ()) -> str:
    """Return the text of a model's card. file: its checkpoint, perhaps in the folder of its run. figure: the
    figure of an evaluation, or None for the model's own. more: further sentences of the evaluation.
    """
    folder, config = os.path.dirname(file), state["config"]
    data, prior = state.get("data"), state.get("prior")
    names = ", ".join(english_name(name) for name in state["languages"] if name != UNKNOWN_LANGUAGE)
    spoken = f" ({in_markdown(names)})" * bool(names)
    system = "HISCO" if state["system"] == "hisco" else in_markdown(str(state["system"]))
    codes = counted(len(state["key"]), f"{system} code")
    parts = [f"a CANINE encoder of width {config['hidden_size']}"] * config.get("encoder", True)
    parts += ["n-grams of characters and words"] * bool(config.get("ngrams"))
    weights = [*state["model"].items(), *(prior["model"].items() if prior else ())]
    weights = [x.numel() for name, x in weights if x.is_floating_point() and name != "ngrams.idf"]
    built = f"a model of {' and '.join(parts)}"
    if prior:
        built += f", trained on top of the answers of the model {in_markdown(prior['name'])}"
    built += f" ({sum(weights):,} parameters{' with it' * bool(prior)})"
    version, learned, rare = state.get("made_by", {}).get("histocc", __version__), "", ""
    if data:
        texts, rows = data.get("texts"), data["rows"]["train"]
        of_what = counted(texts, "distinct text") if texts else counted(rows, "row")
        learned = f" It was trained on {of_what}{spoken}."
        rare = f" (codes with fewer than 10 rows: {data['rare_codes']:,})"
    figure = figure or Figure.of(state, folder)
    measured = [f"{figure}." if figure else NOT_EVALUATED, *more]
    confidence = Confidence.of(state)
    best, why = confidence.best_decoder(state.get("kind", "mixer"), bool(config.get("ngrams")))
    number = confidence.texts
    fitted = f"fitted on {number:,} texts" if number else "not fitted to how often it is right"
    cited = [f"The histocc contributors. histocc (version {version}), with this card"]
    cited += [PAPER] * bool(may_have_seen(state))  # built on published weights
    cited += [HISCO if state["system"] == "hisco" else "The authors of the codes", "The authors of the data"]
    sections: dict[str, list[str]] = {
        "Model": [
            f"Texts{spoken} to {codes}",
            built[0].upper() + built[1:],
            f"Decoder of `predict`: {best} ({why})",
        ],
        "Training": training_lines(state, folder),
        "Figures": [*measured, f"Confidence: {fitted}"],
        "What it must not be used for": [
            f"Texts in other languages than those of its training{spoken}",
            "Other kinds of sources, unless `evaluate` has compared it with a sample coded by people",
            "Statements or decisions about a single person: some codes are wrong, even at high confidence",
            f"Counts of rare codes, without a check{rare}",
        ],
        "How to cite": cited,
    }
    lines = ["# Model card"]
    for title, content in sections.items():
        lines += ["", f"## {title}", "", *(f"- {line}" for line in content)] if content else []
    paper = " (Dahl, Johansen and Vedel, 2024)" * bool(may_have_seen(state))
    said = f"Descriptions were coded with histocc (version {version}), {built}{paper}, to {codes}.{learned}"
    lines += ["", "## Methods, for a paper", "", f"{said} {measured[0]}"]
    return "\n".join(lines) + "\n"


def write_card(
    file: str,
    state: dict[str, Any],
    figure: Figure | None = None,
    more: Sequence[str] = (),
    overwrite: bool = False,
) -> None:
    """Write the card of a checkpoint into its folder, and keep the figure there. overwrite: replace a file
    that another program wrote. Raises OSError.
    """
    folder = os.path.dirname(file)
    if figure:
        keep(folder, figure, state["step"])
    with atomic_write(OwnFiles(folder, overwrite).claim(CARD)[0]) as target:
        target.write(card_of(file, state, figure, more).encode("utf-8", "backslashreplace"))


def finish_run(file: str, say: Callable[[str], None], *more: str, overwrite: bool = False) -> None:
    """Write the card of a finished run, and print how good its best model is and what to type next. more,
    overwrite: as in `write_card`. Rank 0 only. Raises UserError, OSError.
    """
    state, folder = checkpoint.load(file), os.path.dirname(file)
    figure, model = Figure.of(state), shlex.quote(folder)
    write_card(file, state, figure, more, overwrite)
    columns = text_flags(text_columns(state["args"].get("input_col")))
    of_codes = ["--key", os.path.join(folder, "key.csv")] * (state["formatter"]["kind"] != "hisco")
    review = shlex.join(["serve", "coded.csv", *columns, *of_codes])
    found = highlighted(f"{figure}.") if figure else NOT_EVALUATED
    say(
        f"\n{found}\nThe best model is {file}, described in {CARD}.\n\nNext:\n"
        f"  histocc predict NEW.csv --model {model} --output coded.csv\n"
        f"  histocc review {review}\n"
        f"  histocc evaluate CODED_BY_PEOPLE.csv --model {model}"
    )
