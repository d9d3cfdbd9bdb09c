"""Write the reference of docs/ from the program: python scripts/reference.py [FOLDER]

The flags come from the parsers. tests/test_reference.py compares files and columns with those of a run.
"""

import argparse
import importlib
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from histocc.__main__ import COMMANDS
from histocc.data.rows import NOTES
from histocc.review.__main__ import ABOUT
from histocc.runtime.config import AS_WORDS

Table = dict[str, str]  # name → what it is; "(…)" at the end says when it is there, if not always

RUN_FOLDER: Table = {
    "best.bin": "The best checkpoint. From scratch it has the highest accuracy, from trained weights the lowest validation loss (`--best-by`).",
    "last.bin": "The newest checkpoint, from which the same command resumes.",
    "MODEL.md": "The model card: data, command, versions, figures, limits, how to cite.",
    "args.json": "The flags as they were given. `--config args.json` takes them again.",
    "key.csv": "The codes and the numbers of their outputs.",
    "logs.csv": "Losses, accuracies and speed. A row for each step that was logged or validated.",
    "data_report.json": "Counts and problems of the table, see below.",
    "rejected_rows.csv": "Rows that are not used, with the reason.",
    "conflicts.csv": "Texts that are coded differently in different rows.",
    "status.json": "The step, the last note and the figure, for `histocc watch`.",
    "histocc.json": "The list of files that the run has written. Other files are never replaced or removed.",
    "prepared/": "The checked data in a form that processes map into memory.",
    "learning_curve.csv": "Accuracy by the number of texts learned from. (models without encoder, few labels)",
    "{step}.bin": "Earlier checkpoints. (`--save-interval`, `--keep-checkpoints`)",
    "epoch_{n}.bin": "The checkpoint of each epoch. (`--save-each-epoch`)",
    "prior_answers.bin": "The answers of a `--prior` that has an encoder. (such a prior)",
    "training_vectors.bin": "The vectors of the training texts. (`histocc predict --explain`)",
    "confidence_of_topk.bin": "The fitted confidence of a decoder that a run does not fit itself. (`--decoder topk` or `full`)",
    "curves.png": "The curves as a picture, also as `curves.svg`. (matplotlib, or `histocc plot`)",
    "tensorboard/": "Logs for TensorBoard, and `wandb/` those for Weights & Biases. (`--tensorboard`, `--wandb`)",
    "profile.txt": "Where the time goes, with `trace.json` for a trace viewer. (`--profile`)",
    "stacks-rank0.txt": "What each thread was doing. (a process was late, or got SIGUSR2)",
    "run.lock": "The job that has the folder. (while it runs)",
    "evaluation/": "The report of `histocc evaluate`. (no `--output` named another folder)",
}
EVALUATION: Table = {
    "report.md": "The report to read.",
    "report.json": "All figures, see below.",
    "by_code.csv": "One row per code.",
    "answers.csv": "One row per text as the model reads it, language and codes.",
    "rejected_rows.csv": "Rows that could not be used, with the reason.",
    "histocc.json": "The list of files that the command has written.",
    "prepared/": "The checked data.",
}
COLUMNS: dict[str, Table] = {
    "key.csv": {
        "system_code": "The code.",
        "code": "The number of its output.",
        "source": "`data` or `prior`. (codes of a prior)",
    },
    "logs.csv": {
        "step": "Optimizer steps. Those of the fit of n-grams are negative and count up to 0.",
        "epoch": "Passes over the training rows. The first is 0.",
        "samples": "Rows seen by all processes together.",
        "train_loss": "Mean loss since the previous row.",
        "train_loss_linear": "The part of the linear decoder.",
        "train_loss_seq2seq": "The part of the digit-by-digit decoder.",
        "grad_norm": "Norm of the gradient before it is clipped at 1.",
        "lr": "Learning rate.",
        "samples_per_sec": "Rows per second of all processes together.",
        "seconds_data": "Seconds spent waiting for data.",
        "val_loss": "Loss over all validation rows.",
        "val_loss_linear": "The part of the linear decoder.",
        "val_loss_seq2seq": "The part of the digit-by-digit decoder.",
        "flat_acc": "Share of rows that the linear decoder codes completely right.",
        "seq_acc": "Share of rows that the digit-by-digit decoder codes completely right. (the model has this decoder)",
        "token_acc": "Share of right tokens, given the right tokens before. (the model has this decoder)",
        "skipped_steps": "Steps without effect since the previous row, because their gradient was not finite.",
        "model_flops_per_sec": "Floating point operations per second of the model, all processes together.",
        "mfu": "Their share of what the devices reach in matrix products.",
    },
    "learning_curve.csv": {
        "texts": "Distinct texts that the model learned from.",
        "accuracy": "Share of the left-out texts that are coded completely right.",
        "low": "Lower end of the 95 % interval.",
        "high": "Upper end of the 95 % interval.",
        "measured_on": "Number of left-out texts.",
    },
    "rejected_rows.csv": {
        "file": "The table.",
        "line": "The line in it. The names of the columns are line 1.",
        "column": "The column with the problem.",
        "value": "What the cell holds.",
        "reason": "Why the row is not used.",
    },
    "conflicts.csv": {
        "text": "The text.",
        "language": "Its language.",
        "codes": "One of its codings.",
        "rows": "How many rows have it.",
        "file": "The table with the first of them.",
        "line": "The line there.",
    },
    "answers.csv": {
        "text": "The text.",
        "language": "Its language.",
        "codes": "The codes of the table.",
        "predicted": "The codes of the model.",
        "conf": "The model's probability that they are all right.",
        "rows": "How many rows it stands for.",
        "learned": "1 if the model was trained on the text.",
        "column NAME": "The value of the column. (`--by NAME`)",
    },
    "by_code.csv": {
        "code": "The code.",
        "title": "Its title.",
        "rows": "Rows with this code.",
        "missed": "Those where the model did not give it.",
        "wrongly_given": "Rows where the model gave it wrongly.",
        "precision": "Share of right answers among rows that got the code.",
        "recall": "Share of found rows among those that have the code.",
        "f1": "Harmonic mean of precision and recall.",
        "most_frequent_mistake": "The code that was given instead most often.",
        "title_of_mistake": "Its title.",
    },
}
CODED: Table = {
    "hisco_1": "The first code, then `hisco_2` and so on. Other systems have the name of their columns.",
    "title_1": "Its title. (HISCO, without `--no-titles`)",
    "prob_1": "Its probability.",
    "source": "`trained` for texts of the training, `known` for those of `--known` or that a person has decided, `list` for titles of histocc's lists, else `model`. (models without encoder, or `--known`)",
    "level_code": "The answer at a level. (`--level`)",
    "level": "Its number of digits. (`--level`)",
    "level_conf": "The probability that it is right. (`--level`)",
    "conf": "The probability that all codes of the row together are right.",
    "conf_fitted": "1 if `conf` was fitted to how often answers are right.",
    "needs_review": "1 if a person should look: `conf` is below `--min-prob`, there is no code, or the code was never learned.",
    "hisclass_1": "The class of each code, `hisclass_5_1`, `socpo_1`, `hiscam_1` for the others. (`--classes`)",
    "draw_1": "Codes drawn by their probabilities. (`--draws`)",
    "expected_hiscam": "Mean HISCAM over the probabilities of the codes. (`--draws`, HISCO)",
    "prob_hisclass_1": "Probability of each value of a class. (`--draws` with `--classes`)",
    "similar_text_1": "The training texts nearest to the text. (`--explain`)",
    "similar_codes_1": "Their codes. (`--explain`)",
    "choice_1": "The most probable codes, for a person to choose from. (`--choices`)",
    "choice_prob_1": "Their probabilities. (`--choices`)",
    "choice_title_1": "Their titles. (`--choices`)",
    "desc_1": "Titles from a table of yours. (`--descriptions`)",
    "decided_by": "`model`, `guess`, or the person who decided the codes. (`histocc review apply`)",
}
DATA_REPORT: Table = {
    "read": "Which columns were read.",
    "rows": "Rows read and used.",
    "train_rows": "Training rows.",
    "val_rows": "Validation rows.",
    "test_rows": "Rows of the test part.",
    "rows_outside_key": "Rows with a code that the key lacks, by part.",
    "rejected_rows": "Rows that are not used.",
    "rejected": "The same by reason.",
    "unusable_rows": "Rejected rows that stop a run.",
    **{kind: f"{text[0].upper()}{text[1:]}." for kind, text in NOTES.items()},
    "distinct_texts": "Distinct texts.",
    "duplicates": "Rows that repeat an earlier one.",
    "most_rows_of_a_text": "Rows of the most frequent text.",
    "conflicts": "Texts with different codes in different rows.",
    "val_rows_seen_in_training": "Validation rows whose text is also a training text.",
    "languages": "Rows by language.",
    "codes": "Codes of the key.",
    "codes_used": "Those that some row has.",
    "codes_per_row": "Rows by their number of codes.",
    "rare_codes": "Codes of fewer than 10 rows.",
    "codes_only_in_validation": "Codes that no training row has.",
    "length": "Characters of the texts: mean, median, longest.",
    "longest": "Characters of the longest text, and how many of them the model reads.",
    "files": "Each table with its rows, encoding, delimiter and columns.",
    "problems": "Each finding with its first lines.",
}
REPORT: Table = {
    "model.name": "The run folder or file.",
    "model.file": "The checkpoint.",
    "model.step": "Its step.",
    "model.system": "The system of codes.",
    "model.codes": "How many codes the model knows.",
    "model.confidence_texts": "Texts on which `conf` was fitted. 0: it was not.",
    "model.decoder": "The decoder that `histocc predict` takes.",
    "data.files": "The tables.",
    "data.rows_read": "Rows of the tables.",
    "data.rows": "Rows that count.",
    "data.texts": "Their distinct texts, whatever their language, case and blanks.",
    "data.share_val": "The share of `--share-val`, if validation rows are measured.",
    "data.test_part": "Whether these are the rows that the training set aside for a test.",
    "data.other_part_rows": "Rows of the other part, which do not count.",
    "data.learned_rows": "Rows whose text the model was trained on, which do not count.",
    "data.rejected": "Rows that cannot be used, by reason.",
    "data.rows_outside_key": "Rows with a code that the model does not know.",
    "data.unknown_languages": "Rows by language that the model was not trained on.",
    "data.texts_trained_on": "Texts of the table that the model was trained on.",
    "data.texts_validated_on": "Texts of the table that settings were chosen on.",
    "figure.share": "Share of distinct texts that are coded completely right: the figure of the model.",
    "figure.texts": "How many texts it counts.",
    "figure.share_of_rows": "The same share of rows.",
    "figure.rows": "How many rows it counts.",
    "figure.source": "What the texts are: test part, validation texts, texts of other data.",
    "figure.decoder": "The decoder that coded them.",
    "figure.unsure": "Why the figure may be too good, or empty.",
    "levels": "What the levels count: `digits`, or what separates the parts of codes.",
    "decoders.*.right_rows": "Rows that are completely right. `*` is `linear`, `seq2seq` or `both`.",
    "decoders.*.accuracy": "Their share.",
    "decoders.*.accuracy_with_rows_outside_key": "The same if codes that the model does not know count as wrong.",
    "decoders.*.by_language": "Figures by language.",
    "decoders.*.by_codes": "By the number of codes of the row.",
    "decoders.*.by_major_group": "By the first level of the code.",
    "decoders.*.by_frequency": "By how many training rows have the rarest code of the row.",
    "decoders.*.by_training": "By whether text and codes were seen in training.",
    "decoders.*.by_column NAME": "By the values of a column. (`--by NAME`)",
    "decoders.*.by_digits": "With codes cut to one digit, two digits and so on.",
    "decoders.*.by_class": "With codes replaced by their classes. (HISCO)",
    "decoders.*.hiscam": "Mean error and mean absolute error of HISCAM. (HISCO)",
    "decoders.*.by_code": "The rows of `by_code.csv`.",
    "decoders.*.automatic": "What can be accepted unseen if 5 or 10 % may be wrong, and from which `conf` on.",
    "decoders.*.calibration": "How often answers of each `conf` are right.",
    "decoders.*.coverage": "Lowest `conf`, share of texts accepted, share of these that are right.",
    "decoders.*.confusions": "Which codes were taken for which others.",
    "decoders.*.codes_above": "The probability from which a second code counts. (linear decoder)",
    "decoders.*.first_five": "How often all true codes are among the five most probable. (linear decoder)",
    "made_by.histocc": "Version of histocc.",
    "made_by.torch": "Version of torch.",
    "made_by.python": "Version of Python.",
    "made_by.date": "When.",
}
EXIT_CODES: Table = {
    "0": "The command ended, or a run was asked to stop (SIGTERM, SIGUSR1) and saved its state.",
    "1": "A run that cannot continue. Also: the output is complete except for rows that could not be read, which a file `….rejected.csv` lists.",
    "2": "A mistake that you can fix. The message says what it is and what to do.",
    "130": "Ctrl-C. A training has saved its state.",
}
GLOSSARY: Table = {
    "accuracy": "The share of texts, or of rows, whose codes are all right.",
    "batch": "The rows that a model sees before it is changed once.",
    "built-in model": "The HISCO model that histocc makes from its own lists of titles; it needs no coded rows of yours.",
    "CANINE": "A published model that reads a text letter by letter; histocc's encoder has its design.",
    "character n-gram": "A sequence of two to five letters, as `smi` in `blacksmith`; misspelled words still share most of them.",
    "checkpoint": "A file with everything that a training has learned so far, such as `best.bin`.",
    "code": "The number of an occupation in a system such as HISCO, written as text because zeros in front count.",
    "conf": "The model's estimate of the probability that all codes of a row are right.",
    "coverage": "The share of rows that you accept without a look.",
    "decoder": "The part of a model that turns what it has read into codes; models have a linear one, some also one that writes digit by digit.",
    "draw": "A code taken at random with the probabilities of the model, for analyses that take codes as uncertain.",
    "encoder": "The part of a model that reads the letters of a text; it takes the most time and needs many labels.",
    "epoch": "One pass of a training over all its rows.",
    "evaluation": "Coding rows whose codes a person has given, and counting how many agree.",
    "fine-tuning": "Training a model further, on your rows, from the weights of an earlier training.",
    "fit": "A computation that finds the best values at once or in a few passes, such as those of `conf` or of n-grams.",
    "GPU": "A graphics card, on which models with an encoder train many times as fast as on a processor.",
    "HISCAM": "A scale that gives each HISCO code a social status between 0 and 99.",
    "HISCLASS": "Twelve social classes of HISCO codes; a thirteenth is for codes that have no other class.",
    "HISCO": "The Historical International Standard Classification of Occupations, with codes of five digits.",
    "key": "The list of codes that a model can give.",
    "label": "A distinct text with its codes, as an example to learn from.",
    "learning curve": "Accuracy by the number of labels; it shows whether more labels would help.",
    "linear decoder": "The decoder that gives each code of the key a probability of its own.",
    "loss": "The number that a training makes smaller: how improbable the right codes are for the model.",
    "macro-F1": "The mean over codes of how well each one is found; rare codes count as much as frequent ones.",
    "needs_review": "The column that is 1 in rows that a person should look at.",
    "OCC1950": "The occupations of the United States census of 1950, with codes of three digits.",
    "prior": "What a model starts from before it learns your labels, such as the answers of the built-in model.",
    "process": "A running copy of the program; several of them share the work of one job.",
    "rank": "The number of a process in a job, from 0.",
    "register": "A historical source of many entries, such as a census, a parish book or a tax list.",
    "run folder": "The folder that a training writes, such as `./output`; other commands read it with `--model`.",
    "seed": "A number that fixes all random choices, so that the same command gives the same result.",
    "seq2seq decoder": "The decoder that writes codes digit by digit.",
    "SLURM": "A program that gives out the machines of a cluster to jobs.",
    "step": "One change of the model, after one batch.",
    "SVM": "A common, fast method of text classification; benchmarks compare histocc with it.",
    "test rows": "Rows that nothing was trained or chosen on; only figures on them are honest.",
    "threshold": "The probability from which a second code counts, or below which a row needs review.",
    "torchrun": "The command of PyTorch that starts several processes of a job.",
    "validation rows": "Rows that are not trained on, on which settings are chosen; figures on them are a little too good.",
    "weights": "The numbers inside a model that a training changes.",
}


def cell(text: str) -> str:
    """Return a text for a cell of a table."""
    for mark, instead in {"|": "\\|", "<": "&lt;", "*": "\\*"}.items():
        text = text.replace(mark, instead)
    return " ".join(text.split())


def flags_of(parser: argparse.ArgumentParser) -> list[str]:
    """Return the tables of a command's words and flags, in its groups."""
    layout, lines = parser._get_formatter(), []
    spellings: dict[int, list[str]] = {}
    for name, action in parser._option_string_actions.items():
        spellings.setdefault(id(action), []).append(name)
    flag_of_word = {action.dest: spellings.get(id(action), []) for action in parser._actions}
    for group in parser._action_groups:
        rows = []
        for action in group._group_actions:
            if action.help == argparse.SUPPRESS or "--help" in action.option_strings:
                continue
            name = layout._format_action_invocation(action).replace("|", "\\|")
            if action.option_strings:
                also = [each for each in spellings[id(action)] if each != action.option_strings[0]]
            else:
                also = flag_of_word.get(action.dest.removesuffix(AS_WORDS), [])
            what = cell(layout._expand_help(action))
            rows.append(f"| `{name}` | {what} | {' '.join(f'`{each}`' for each in also)} |")
        if rows:
            lines += [
                f"**{group.title}**",
                "",
                "| | what it does | also accepted |",
                "|---|---|---|",
                *rows,
                "",
            ]
    return lines


def parser_of(name: str, action: str = "") -> argparse.ArgumentParser:
    """Return the parser of a command, or of an action of `review`, as `histocc` has it."""
    before, sys.argv[0] = sys.argv[0], f"histocc {name}"
    try:
        module = importlib.import_module(COMMANDS[name][0])
        return module.get_args_parser(action) if action else module.get_args_parser()
    finally:
        sys.argv[0] = before


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command by its name, such as "review make"."""
    found = {}
    for name in COMMANDS:
        for action in ABOUT if name == "review" else [""]:
            found[f"{name} {action}".strip()] = parser_of(name, action)
    return found


def commands() -> str:
    lines = [
        "# Commands and flags",
        "",
        "*For readers who look up a flag. 2 minutes.*",
        "",
        "Flags can be written with hyphens or underscores. A command shows them with `--help`, and all with",
        "`--help all`. Where a flag takes a default from the data or from the run, its text says so.",
        "",
    ]
    for name, parser in parsers().items():
        what, _, examples = str(parser.description).partition("\n\n")
        lines += [f"## histocc {name}", "", " ".join(what.split()), ""]
        lines += (
            ["```", *(line.strip() for line in examples.splitlines()), "```", ""] if examples.strip() else []
        )
        lines += flags_of(parser)
    return "\n".join(lines)


def table(names: Table, first: str) -> list[str]:
    rows = [f"| `{name}` | {cell(what)} |" for name, what in names.items()]
    return [f"| {first} | |", "|---|---|", *rows, ""]


def reference_of_files() -> str:
    lines = [
        "# Files, columns and exit codes",
        "",
        "*For readers who look up a file or a column. 2 minutes.*",
        "",
        "What stands in brackets at the end of a line says when a file or column is there, if it is not always.",
        "",
        *(
            "## Run folder",
            "",
            "Written by `histocc train` and `histocc mix`.",
            "",
            *table(RUN_FOLDER, "file"),
        ),
        *(
            "## Coded file",
            "",
            "`histocc predict` adds these columns to the table.",
            "",
            *table(CODED, "column"),
        ),
        *("## Evaluation", "", "Written by `histocc evaluate`.", "", *table(EVALUATION, "file")),
    ]
    for name, names in COLUMNS.items():
        lines += [f"## {name}", "", *table(names, "column")]
    prepared = "Written by `histocc prepare` and trainings. Numbers count rows or cells."
    lines += ["## data_report.json", "", prepared, "", *table(DATA_REPORT, "field")]
    lines += ["## report.json", "", "Written by `histocc evaluate`.", "", *table(REPORT, "field")]
    lines += ["## Exit codes", "", *table(EXIT_CODES, "code")]
    return "\n".join(lines)


def glossary() -> str:
    lines = ["# Glossary", "", "*For readers who meet an unknown word. 5 minutes.*", ""]
    rows = [f"| **{word}** | {cell(what)} |" for word, what in GLOSSARY.items()]
    return "\n".join([*lines, "| word | |", "|---|---|", *rows, ""])


def pages() -> dict[str, str]:
    made = {"reference-commands.md": commands(), "reference-files.md": reference_of_files()}
    return {name: text.rstrip("\n") + "\n" for name, text in {**made, "glossary.md": glossary()}.items()}


if __name__ == "__main__":
    for name, text in pages().items():
        (Path(sys.argv[1] if len(sys.argv) > 1 else REPO / "docs") / name).write_text(text, encoding="utf-8")
