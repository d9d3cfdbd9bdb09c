"""Evaluate a model on data with known codes: accuracy, precision, recall, calibration and confusions of each
decoder.

    histocc evaluate test.csv --model ./output

The command writes report.md, report.json and rejected_rows.csv into --output. The accuracies of the decoders
are the `seq_acc` and `flat_acc` that a validation in training would log for the same rows.
"""

from histocc.runtime import signals

if __name__ == "__main__":
    signals.start_listening()  # handles signals while torch is still being imported (seconds)

import contextlib
import importlib.util
import os
import tempfile
from collections import Counter
from dataclasses import MISSING, dataclass
from typing import Annotated, Any

import numpy as np
import torch

from histocc.data import prepare as preparing
from histocc.data.arrays import PreparedData, RowSet, SomeRows
from histocc.data.config import (
    AUTO,
    Column,
    PrepareSettings,
    RowFlags,
    code_problems,
    file_problems,
    problems_of_columns,
    text_columns,
)
from histocc.data.descriptions import TitleFlags, read_descriptions
from histocc.data.report import report_lines
from histocc.data.rows import OUTSIDE_KEY, hold_numbers, language_name, read_key
from histocc.data.tables import parts_of, table_format, unique_names
from histocc.evaluate import baseline
from histocc.evaluate import report as report_of
from histocc.figure import ENTRY, OTHER, OTHERS, TEST, VALIDATION, Figure, may_have_seen
from histocc.formatter import BlockyFormatter, cut, hisco_key, levels_of
from histocc.job.card import CARD, write_card
from histocc.job.model import load_on_all
from histocc.model.confidence import Thresholds
from histocc.predict.coder import Coded, Coder, training_data
from histocc.predict.config import CoreFlags, PublishedFlags
from histocc.predict.decoders import DECODERS, MEASURED, RANKED
from histocc.predict.fitting import fit_confidence, rows_right
from histocc.published import models
from histocc.published.formats import MODEL_KINDS, SETTINGS_ENTRY, WEIGHT_FILES, load_content, model_files
from histocc.runtime import checkpoint, files
from histocc.runtime.config import Count, CountOrZero, Parser, ProcessFlags, flag, number
from histocc.runtime.device import Precision, device_of, settings_of_torch
from histocc.runtime.errors import UserError, raise_if_any
from histocc.runtime.forked import Forked, choose_processes
from histocc.runtime.frame import start
from histocc.runtime.log import highlighted
from histocc.runtime.world import World
from histocc.text import UNKNOWN_LANGUAGE

Share = Annotated[float, number(float, lambda value: 0 < value <= 1, "a number above 0 and at most 1")]
Level = Annotated[
    str,
    number(str, lambda text: text.isdecimal() or len(text) == 1, "a number, or the character between parts"),
]
FITTED = WEIGHT_FILES[1]  # a copy of a shared model with what was fitted, in the report's folder
OF_TEST = ("share_test", "split_col", "leave_out")  # flags of a training that may have a test part
# flags that decide texts and codes
OF_READING = ("code_separator", "recode", "ditto", "empty_text", "repair_text")
MAX_VALUES = 50  # most values of a column, the most frequent
TEXTS_AT_ONCE = 512  # distinct texts that one process codes at a time
BEST_OUTPUTS = 50  # outputs of the linear decoder for a text. Answers with more codes are always wrong


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(RowFlags, TitleFlags, PublishedFlags, ProcessFlags, CoreFlags):
    """The flags of evaluate."""

    usual = (
        *("data", "model", "output", "overwrite", "input_col", "language_col", "language", "target_cols"),
        *("by", "levels", "share_val", "baseline", "fit_confidence", "processes", "distributed"),
    )
    model: str = flag(MISSING, "your run folder, a checkpoint, a published model, or built-in", metavar="RUN")
    data: list[str] = flag(
        MISSING,
        "coded table, or several, or a folder of parts",
        "--dataset",
        metavar="FILE.csv",
        positional=True,
    )
    output: str = flag(
        None,
        "folder for the report (default: evaluation, in the run folder). What is fitted to a model"
        " outside a run folder (built-in, from the hub) is stored there too",
        metavar="FOLDER",
    )
    fit_thresholds: bool = flag(
        False, "find the best thresholds of the linear decoder on new texts, and store them in the model"
    )
    fit_confidence: bool = flag(
        False,
        "measure on new texts how often answers are right, and store it in the model for conf;"
        " this report shows conf as it was before",
    )
    raw_confidence: bool = flag(False, "report on the decoders' own probabilities instead of the fitted ones")
    baseline: bool = flag(
        False, "also compare with a linear support vector machine on n-grams (needs scikit-learn)"
    )
    overwrite: bool = flag(False, "replace an existing report")
    target_cols: list[Column] | None = flag(
        None, "columns with the codes (default: as in training)", metavar="COL"
    )
    missing_code: str | None = flag(
        None, "code of rows that lack one (default: such rows are left out)", metavar="CODE"
    )
    share_val: Share | None = flag(
        None,
        "evaluate only the texts that a training with this --share-val validates on; 1: all rows"
        " (default: the test part of the training rows if there is one, else all)",
    )
    by: list[Column] | None = flag(
        None, "also report accuracy for each value of these columns, such as source or decade", metavar="COL"
    )
    levels: list[Level] | None = flag(
        None,
        "also report accuracy for codes cut to these numbers of digits, such as 1 2 3, or at a"
        " character between parts, such as . (default: each digit or part)",
        metavar="N",
    )
    batch_size: Count = flag(256, "rows that a process codes at a time")
    seed: CountOrZero = flag(
        1, "seed of the sample that --baseline learns from if there are 500,000 training rows or more"
    )


def get_args_parser() -> Parser:
    what = "Measure how often a model is right on coded rows, and write a report."
    examples = "data.csv --model ./output", "data.csv --model built-in --output ./evaluation --by source"
    return Parser(EvaluateConfig, "python -m histocc.evaluate", what, *examples)


def load_evaluated(args: EvaluateConfig, file: str) -> models.Loaded:
    """Return the model in `file`. Raises UserError."""
    content = load_content(file)
    own = models.brings_settings(content)
    given = args.given(args.target_cols)
    if own:  # then --key is for numbers in the code columns
        given = given._replace(key=None)
    model, formatter, state = models.model_of_content(file, content, given)
    if own and args.key and not hold_numbers(args.target_cols or formatter.target_cols):
        raise UserError(f"{file}: has its own key; leave out --key")
    if (args.fit_thresholds or args.fit_confidence) and (not own or file.endswith(".safetensors")):
        raise UserError(f"{file} is not a .bin of histocc; make one with histocc export")
    if args.fit_thresholds and state.get("kind") == "seq2seq":
        raise UserError(f"--fit-thresholds: {args.model} has no linear decoder")
    prior = state.get("prior") or {}
    if "trained" in state and "trained" in prior:
        state["trained"] = torch.cat([state["trained"], prior["trained"]]).unique()
    return model, formatter, state


def prepare_settings(args: EvaluateConfig, state: dict, formatter: BlockyFormatter) -> PrepareSettings:
    """Return the settings to read the data with the model's codes in their order. Flags of OF_READING,
    columns and language default to those of the training. Raises one UserError.
    """
    trained, columns = state.get("args", {}), args.target_cols or formatter.target_cols
    texts = args.input_col or text_columns(trained.get("input_col"))
    there = {name for path in args.data for name in unique_names(table_format(path, *args.how(texts)).names)}
    if not args.target_cols:  # the data may have fewer code columns than the training data
        columns = [name for name in columns if name in there] if there.intersection(columns[:1]) else columns
    language, language_col = args.language, args.language_col
    if language is None and language_col is None:
        language, language_col = trained.get("language"), trained.get("language_col")
        language = None if language_col else language
    args = args.with_decided(
        input_col=texts,
        target_cols=columns,
        language=language_name(language or UNKNOWN_LANGUAGE),
        language_col=language_col,
        weight_col=args.weight_col or (weights if (weights := trained.get("weight_col")) in there else None),
        fill_down=args.fill_down or [name for name in trained.get("fill_down") or () if name in there],
        **{name: getattr(args, name) or trained.get(name) or None for name in OF_READING},
    )
    problems, most = list(problems_of_columns(args)), formatter.max_num_codes
    if len(columns) > most:
        problems.append(
            f"--target-cols names {len(columns)} columns of codes, but the model writes at most {most}"
        )
        columns = columns[:most]
    # cells hold numbers of --key, of the training's --key or of the HISCO key
    numbers, by_number = None, hold_numbers(formatter.target_cols) and "args" in state
    key_of_training = trained.get("key") if by_number else None
    if hold_numbers(columns) and (args.key or key_of_training or state.get("hisco_numbers") or not by_number):
        if args.key:
            numbers = [formatter.repair(code)[0] for code in read_key(args.key)]
        elif not key_of_training and formatter.kind != "hisco":
            raise UserError(f"--target-cols {' '.join(columns)} hold numbers of a key: add --key FILE")
        else:
            numbers = list(state["key"] if key_of_training else hisco_key())
    of_columns = BlockyFormatter.from_dict({**formatter.to_dict(), "target_cols": columns})
    if AUTO in (trained.get("formatter"), formatter.kind.replace("classes", AUTO)):
        of_columns = BlockyFormatter("classes", columns, max_codes=most)  # other texts are outside the key
    settings = PrepareSettings.of(
        args,
        train_files=args.data,
        formatter=of_columns.to_dict(),
        target_cols=columns,
        share_val=None if args.share_val == 1 else args.share_val,  # 1 means all rows
        max_len=state["config"]["max_len"],
        drop_bad_labels=True,
        fixed_codes=sorted(state["key"], key=state["key"].get),
        clean_text=state["config"]["text"],
        number_codes=numbers,
    )
    raise_if_any([*problems, *file_problems(settings), *code_problems(of_columns, settings)])
    return settings


def prepare_rows(
    args: EvaluateConfig, file: str, loaded: models.Loaded, world: World
) -> tuple[PrepareSettings, str, str]:
    """Return the settings to read the data, the folder of the report, and the folder of the arrays in it. The
    last is "" if there is no model yet (file is ""). Rank 0 only. Raises UserError if no report can be made.
    """
    shared = models.is_shared(args.model)
    output = args.output or os.path.join("" if shared else os.path.dirname(file), "evaluation")
    if checkpoint.exists_in(output):
        raise UserError(f"--output {output} holds a run: choose another folder for the report")
    inputs = dict.fromkeys(args.data, "a file of the data") | dict.fromkeys(model_files(file), "the model")
    raise_if_any(files.save_path_problems(output))
    own = files.OwnFiles(output, args.overwrite)
    fitted = [FITTED] * (shared and (args.fit_confidence or args.fit_thresholds))
    paths = [own.path(name) for name in (*report_of.REPORT_FILES, *fitted)]
    unfinished = None if os.path.lexists(own.path(report_of.JSON)) else own  # its files may be replaced
    inputs |= {args.key: "the file of --key"}
    raise_if_any(files.problems(paths, inputs, args.overwrite, unfinished))
    settings = prepare_settings(args, loaded[2], loaded[1])
    if not file:
        return settings, output, ""
    if args.baseline and importlib.util.find_spec("sklearn") is None:
        raise UserError("--baseline needs scikit-learn: pip install 'histocc[baseline]'")
    if args.baseline and training_data(file, str(loaded[2].get("position", {}).get("fingerprint"))) is None:
        what = "--baseline: the model's folder does not hold the training rows"
        raise UserError(f"{what}; repeat the training command with --prepare-only to prepare them again")
    try:
        folder = preparing.prepare(settings, output, preparing.nothing, check=world.give_up_if_asked)
        return settings, output, folder
    except preparing.UnusableData as error:
        rejected, left, aside = (error.report[name] for name in ("rejected", "train_rows", "val_rows"))
    kinds = [f"{rows:,} × {kind}" for kind, rows in rejected.items()]
    takes = f"--share-val takes {aside:,} of {aside + left:,}; --share-val 1 takes all"
    kinds += [takes] * bool(aside + left)
    hint = "\n  The model knows other codes than these. Is it the right model for these columns?"
    hint *= OUTSIDE_KEY in rejected
    raise UserError(f"{', '.join(args.data)}: no row can be evaluated ({'; '.join(kinds)}){hint}")


def data_facts(
    settings: PrepareSettings, state: dict, data: PreparedData, rows: SomeRows, is_test: bool
) -> dict:
    """Return the facts about the data: how many rows are evaluated and how many not, and how many of the
    texts the model was trained and validated on (None if unknown).
    """
    number, texts = np.bincount(rows.language, minlength=len(data.languages)), np.unique(rows.text_hash)

    def known(name: str) -> int | None:
        return int(np.isin(texts.view(np.int64), state[name]).sum()) if name in state else None

    return {
        "files": settings.train_files,
        "rows_read": data.report["rows"],
        "rows": len(rows),
        "texts": len(texts),
        "share_val": settings.share_val,
        "test_part": is_test,
        "other_part_rows": len(data.train) + len(data.val) - (len(rows) if is_test else len(rows.rows)),
        "learned_rows": 0 if is_test else len(rows.rows) - len(rows),
        "rejected": data.report["rejected"],
        "rows_outside_key": data.report["rows_outside_key"][rows.rows.part],
        "unknown_languages": {
            name: int(count)
            for name, count in zip(data.languages, number)
            if count and name not in state["languages"] and name != UNKNOWN_LANGUAGE
        },
        "texts_trained_on": known("trained"),
        "texts_validated_on": known("validated"),
    }


def chosen_rows(args: EvaluateConfig, data: PreparedData, state: dict) -> tuple[SomeRows, bool]:
    """Return the rows to evaluate, and whether they are the test part of the training. They are what
    --share-val takes, or all, without texts that the model was trained on. --share-val 1 takes all rows. In a
    table with at least 3/4 of the training table's share of known texts, they are its test part, if any.
    """
    share = args.share_val
    rows = data.train if share in (None, 1) else data.val
    if share == 1 or "trained" not in state:
        return SomeRows(rows, np.arange(len(rows))), False
    learned, is_test = state["trained"], False
    if share is None and any(state["args"].get(name) for name in OF_TEST):
        both, parts = np.concatenate([learned, state["validated"]]), state["data"]["rows"]
        known = np.unique(rows.text_hash[np.isin(rows.text_hash.view(np.int64), both)])
        least = 0.75 * (1 - parts["test"] / sum(parts.values())) * len(np.unique(rows.text_hash))
        is_test = len(known) >= least
        learned = both if is_test else learned
    is_learned = np.isin(rows.text_hash.view(np.int64), learned)
    return SomeRows(rows, np.flatnonzero(~is_learned)), is_test


def new_rows(args: EvaluateConfig, rows: RowSet, state: dict) -> np.ndarray:
    """Return which rows have texts that the model is not known to be trained on, bool [N]. Raises UserError
    if there are none, unless --share-val is 1: figures on learned texts say nothing about others.
    """
    is_new = ~np.isin(rows.text_hash.view(np.int64), state.get("trained", []))
    fits, share = args.fit_thresholds or args.fit_confidence, args.share_val
    if not is_new.any() and (fits or share != 1):
        what = f"the model was trained on all texts of {', '.join(args.data)}"
        what += f" that --share-val {share:g} takes" if share else ""
        ways = "evaluate other texts, such as those set aside by --share-test (without --share-val here)"
        ways += "" if fits else "; or evaluate all rows with --share-val 1 (the report says so)"
        raise UserError(f"{what}, so it is more often right there than elsewhere: {ways}")
    return is_new


def code_texts(
    world: World, coder: Coder, rows: RowSet, languages: list[str], forked: Forked
) -> dict[str, Any] | None:
    """Code each distinct text of the rows with each decoder. All ranks. Returns None except on rank 0.

    Returns:
        {"greedy", "flat", …: Coded of each text for each decoder of the model, "outputs": (logits, numbers)
        of the linear decoder's most probable outputs, "of_row": int64 [N], the text of each row}.
    """
    names = [languages[number] for number in rows.language.tolist()]
    pairs = list(zip(rows.strings(np.arange(len(rows))), names))
    numbers = {pair: i for i, pair in enumerate(dict.fromkeys(pairs))}
    distinct, width = list(numbers), min(BEST_OUTPUTS, len(coder.codes))
    pieces = [distinct[i : i + TEXTS_AT_ONCE] for i in range(0, len(distinct), TEXTS_AT_ONCE)]
    decoders = [name for name in coder.decoders if name in MEASURED]
    most = dict.fromkeys(decoders, coder.formatter.max_num_codes) | {"flat": BEST_OUTPUTS}

    def work(part: int) -> list[dict[str, list]]:
        coded = []
        for piece in pieces[world.share(part, forked.number)]:
            texts, names = map(list, zip(*piece))
            levels = coder.fitted_levels
            coded.append(
                {each: coder.code(texts, names, each, most[each], levels=levels) for each in decoders}
            )
            if "flat" in decoders:
                logits = torch.from_numpy(coder.probabilities(texts, names, logits=True))  # [texts, codes]
                coded[-1]["outputs"] = list(zip(*(each.numpy() for each in logits.topk(width))))
        return coded

    shares = world.gather(forked.each(work), main_alone=True)
    parts = [part for share in shares for part in share]
    if not parts:
        return None
    coded = [parts[i % len(parts)][i // len(parts)] for i in range(len(pieces))]
    collected = {name: [one for piece in coded for one in piece[name]] for name in coded[0]}
    return collected | {"of_row": np.array([numbers[pair] for pair in pairs], dtype=np.int64)}


def run(args: EvaluateConfig, world: World) -> None:
    """Evaluate the model and write the report. All ranks."""
    args = args.with_decided(data=[part.path for name in args.data for part in parts_of(name)])

    def find() -> str:
        if outline := models.outline(args.model):  # names are checked before a model is made
            prepare_rows(args, "", outline, world)
        return models.find_weights(args.model, args.model)

    file = world.run_on_main(find)
    model, formatter, state = loaded = load_on_all(world, lambda: load_evaluated(args, file))
    model.to(world.device)
    kind = state.get("kind", "mixer")
    if kind != "mixer":
        world.print(f"{args.model}: {MODEL_KINDS[kind]}: the report covers its only decoder")
    settings, output, folder = world.run_on_main(lambda: prepare_rows(args, file, loaded, world))
    shared = models.is_shared(args.model)
    target = os.path.join(output, FITTED) if shared else file  # for what is fitted
    data = preparing.on_every_node(settings, output, folder, world, world.give_up_if_asked)
    rows, is_test = chosen_rows(args, data, state)
    is_new = new_rows(args, rows, state)
    facts = data_facts(settings, state, data, rows, is_test)
    world.print(*report_lines(data.report)[:1], *report_of.data_lines(facts), sep="\n")
    precision = Precision("float32", world.device)  # as in training
    precision.use()
    processes = choose_processes(args.processes, world, -(-len(rows) // args.batch_size))
    forked = Forked(processes, world.give_up_if_asked, world.time_limit)
    how = {"batch_size": args.batch_size, "precision": precision, "raw_confidence": args.raw_confidence}
    coder = Coder(*loaded, check=forked.check, **how)
    world.print(f"Predict codes with decoder {coder.best_decoder} ({coder.why_best})")
    if kind != "flat":
        coder.search()  # once, before processes are forked
    coded = code_texts(world, coder, rows, data.languages, forked)
    stored: dict[str, Any] = {}  # entries for the checkpoint
    if coded is not None:  # rank 0
        what = {"name": args.model if shared else os.path.abspath(args.model), "file": file}
        what |= {"step": state.get("step"), "system": state["system"], "codes": len(state["key"])}
        what["confidence_texts"] = coder.confidence.texts
        what["decoder"] = DECODERS[coder.best_decoder].in_report
        levels = levels_of(data.codes, formatter.within_block_sep, args.levels or [])
        groups = groups_of(settings, levels, data, rows, state)
        titles = read_descriptions(args.descriptions, data.codes, formatter)
        how = data, rows, groups, levels, titles
        seen = facts["texts_validated_on"] == facts["texts"]
        source = TEST if facts["test_part"] else VALIDATION if seen else OTHER
        unsure = may_have_seen(state) or "model" * ("trained" not in state)
        answers = [coded[coder.best_decoder][text] for text in coded["of_row"].tolist()]
        right, texts = rows_right(answers, rows, data), rows.text_hash
        figure = Figure.measured(right[is_new], texts[is_new], source, coder.best_decoder, unsure)
        report = {"model": what, "data": facts, ENTRY: figure and figure._asdict()}
        report["levels"] = f"{report_of.PARTS_BETWEEN}{levels[0]}" if levels[0] else report_of.DIGITS
        report["decoders"] = decoder_figures(args, coder, coded, how, is_new)
        report["made_by"] = checkpoint.made_by()
        if args.baseline and (trained := training_data(file, coder.data_fingerprint)):
            world.print("Baseline: fitting a linear support vector machine to the training rows")
            svm, answers = baseline.compared(trained, data, rows, args.seed, forked.check)
            sets, where = [Coded(sorted(codes), [], None) for codes in answers], np.arange(len(answers))
            figures = report_of.decoder_report(coder, sets, where, data, rows, {}, levels, titles)
            report["baseline"] = svm | {"by_digits": figures["by_digits"]}
        table = report_of.answers_csv(coded[coder.best_decoder], coded["of_row"], data, rows, groups)
        report_of.write_report(report, table, data.folder, files.OwnFiles(output, args.overwrite))
        if not shared and is_for_card(file, state, facts, figure):
            write_card(file, checkpoint.load(file), figure, report_of.card_figures(report))
            card = os.path.join(os.path.dirname(file), CARD)
            world.print(f"This figure is now the figure of the run, in {card}, watch and plot")
        lines = [highlighted(report_of.figure_line(report)), *report_of.decoder_lines(report)]
        world.print(*lines, f"Report: {os.path.join(output, report_of.MARKDOWN)}", sep="\n")
        if args.fit_thresholds:
            found = {x: y["threshold_f1"] for x, y in report["decoders"]["linear"]["thresholds"].items()}
            of_languages = {name: found[name] for name in found if name in state["languages"]}
            fitted = {"default": found["all"], "source": "fitted", "by_language": of_languages}
            stored["thresholds"] = (state.get("thresholds") or {}) | fitted
    if args.fit_confidence:
        stored = world.run_on_main(lambda: stored)
        loaded = model, formatter, state | stored
        how = world, args.batch_size, precision
        found = fit_confidence(target, loaded, [*MEASURED, RANKED], rows, is_new, data, *how)
        if found and world.is_main:
            stored |= {**found, ENTRY: state.get(ENTRY) or report[ENTRY]}
    if stored and world.is_main:
        if shared:
            files.OwnFiles(output, args.overwrite).claim(FITTED)
            world.print(f"{args.model} is unchanged: use --model {target}, which holds what was fitted")
        store(file, target, stored)
        if "thresholds" in stored:
            world.print(f"Thresholds stored in {target}: {Thresholds.of(stored)}")
        if is_new.sum() < report_of.MIN_ROWS:
            least = f"use {report_of.MIN_ROWS} or more"
            world.print(f"WARNING: they are fitted on few rows ({is_new.sum():,}); {least}")


def is_for_card(file: str, state: dict, facts: dict, figure: Figure | None) -> bool:
    """Return whether the figures belong on the model card of the run: figures on its test part or, without
    one, on texts that chose nothing, except on few texts if there is a figure on more.
    """
    folder = os.path.dirname(file)
    kept = Figure.of(state, folder)
    if kept and not facts["test_part"] and (not figure or figure.texts < min(kept.texts, report_of.MIN_ROWS)):
        return False
    seen = facts["texts_trained_on"], facts["texts_validated_on"]
    is_new = seen == (0, 0) and not any(state["args"].get(name) for name in OF_TEST)
    return files.OwnFiles(folder).holds(os.path.join(folder, CARD)) and (facts["test_part"] or is_new)


def groups_of(
    settings: PrepareSettings, levels: report_of.Cuts, data: PreparedData, rows: SomeRows, state: dict
) -> report_of.Groups:
    """Return the groups of rows that get an accuracy each: by language, number of codes, major group, what
    the training knows of them, and the values of the columns of --by, as "column NAME".
    """

    def of_values(values: list[str]) -> tuple[np.ndarray, list[str]]:
        labels = [value for value, _ in Counter(values).most_common(MAX_VALUES)] + [OTHERS]
        numbers = {value: i for i, value in enumerate(labels)}
        return np.array([numbers.get(value, len(labels) - 1) for value in values]), labels

    codes = np.asarray(rows.codes)
    groups: report_of.Groups = {"language": (np.asarray(rows.language), data.languages)}
    groups["codes"] = (codes >= 0).sum(1), range(codes.shape[1] + 1)
    if len(levels[1]) > 1:
        major = [cut(code, levels[1][0], levels[0]) for code in data.codes]
        groups["major_group"] = of_values([major[code] for code in codes[:, 0].tolist()])
    if "data" in state:  # exported models have no counts
        rarest = np.array([*state["data"]["rows_of_codes"], 1 << 60])[codes].min(1)
        words = ("0", "1 to 9", "10 to 99", "100 to 999", "1,000 or more")
        groups["frequency"] = np.digitize(rarest, (1, 10, 100, 1000)), words
        seen = np.isin(rows.text_hash.view(np.int64), state["trained"])
        words = ("text seen", "text new, codes seen", "text new, a code new")
        groups["training"] = np.where(seen, 0, 1 + (rarest == 0)), words
    for name in settings.by or ():
        cells: dict[int, str] = {}
        for i, path in enumerate(settings.train_files):
            table = settings.table(path, [name])
            for some in table.records():
                lines, column = (some.lines + (i << 40)).tolist(), some.filled[table.names.index(name)]
                cells.update((line, cell.strip() or "(blank)") for line, cell in zip(lines, column))
        lines = rows.rows.lines()[rows.index].tolist()
        groups[report_of.BY_COLUMN + name] = of_values([cells[line] for line in lines])
    return groups


def decoder_figures(
    args: EvaluateConfig, coder: Coder, coded: dict[str, Any], how: tuple, is_new: np.ndarray
) -> dict[str, dict]:
    """Return name in the report → figures for each decoder. The decoder that `predict` uses comes first.

    Args:
        coded: as `code_texts` returns it.
        how: further arguments of `decoder_report`.
        is_new: the rows to which thresholds are fitted, bool [N].
    """
    names = sorted((name for name in MEASURED if name in coded), key=lambda x: x != coder.best_decoder)
    of_row, (data, rows, *_) = coded["of_row"], how
    figures = {DECODERS[x].in_report: report_of.decoder_report(coder, coded[x], of_row, *how) for x in names}
    if "linear" in figures:
        figures["linear"]["codes_above"] = str(coder.thresholds)
        logits, numbers = (np.stack(values)[of_row] for values in zip(*coded["outputs"]))
        among = (rows.codes[:, :, None] == numbers[:, None, :5]).any(2) | (rows.codes < 0)
        right = among.all(1) & ~np.isnan(logits[:, 0])
        if five := Figure.measured(right, rows.text_hash, "", "flat"):
            figures["linear"]["first_five"] = {"over_rows": five.share_of_rows, "over_texts": five.share}
        if args.fit_thresholds:
            of_language = {name: is_new & (rows.language == i) for i, name in enumerate(data.languages)}
            groups = {name: part for name, part in of_language.items() if part.sum() >= report_of.MIN_ROWS}
            probs, codes = 1 / (1 + np.exp(-logits)), np.asarray(rows.codes)
            groups["all"] = is_new
            best = report_of.best_thresholds(numbers, probs, codes, coder.thresholds, groups)
            figures["linear"]["thresholds"] = best
    return figures


def store(file: str, target: str, entries: dict[str, Any]) -> None:
    """Write a checkpoint with more entries as `target`. Rank 0 only. Raises UserError, OSError."""
    with files.run_lock(os.path.dirname(target) or "."):  # no run may write there now
        content = checkpoint.load(file)
        content.get(SETTINGS_ENTRY, content).update(entries)
        checkpoint.rewrite(target, content)


def evaluate(
    model: str | os.PathLike,
    data: str | os.PathLike | list[str],
    output: str | os.PathLike | None = None,
    verbose: bool = False,
    **flags: Any,
) -> report_of.Report:
    """Evaluate like `histocc evaluate`, in one process, and return its report.

    Args:
        output: folder of the report, or None to keep no report.
        verbose: print what the command prints.
        flags: flags of the command, with underscores: target_cols=["hisco_1"], share_val=0.1, baseline=True.

    Raises:
        UserError, TrainingError: where the command would end with them.

    Example with a run that set a test part aside:
        >>> from histocc.evaluate import evaluate
        >>> report = evaluate("./output", "data.csv")
        >>> report["data"]["texts"]
        147
    """
    if hasattr(data, "columns"):
        raise UserError(f"data: found {type(data).__name__}, expected the name of a file")
    values = {"model": model, "data": [data] if isinstance(data, str | os.PathLike) else list(data)}
    with contextlib.ExitStack() as held:
        # after an error the data are still mapped, and Windows keeps such files
        own = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        values |= {**flags, "output": output or held.enter_context(own)}
        args = EvaluateConfig(**get_args_parser().checked(values, "evaluate"))
        if not output and (args.fit_confidence or args.fit_thresholds) and models.is_shared(args.model):
            raise UserError(f"{args.model} stays unchanged: name a folder for what is fitted, with output=")
        world = World(device=device_of(args.device))
        if not verbose:
            held.enter_context(contextlib.redirect_stdout(None))
        with settings_of_torch(), torch.random.fork_rng([]):
            run(args, world)
        return report_of.Report(args.output)


def main(argv: list[str] | None = None) -> None:
    start(get_args_parser(), run, argv)


if __name__ == "__main__":
    main()
