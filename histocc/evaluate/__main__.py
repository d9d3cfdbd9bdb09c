"""How good a model is on data with known codes: accuracy, precision, recall, calibration, thresholds,
confusions, for each decoder.

    python -m histocc.evaluate --model RUN_OR_FILE --data test.csv --target-cols hisco_1 hisco_2 \\
        --language-col lang

Writes report.md, report.json, rejected_rows.csv and, where matplotlib is, plots into --output. The rows go
through the engine's own evaluation, so losses and accuracies are those that training would log on the same
rows.
"""

from histocc.runtime import signals

if __name__ == "__main__":
    signals.start_listening()  # from here on a signal is heard, though importing torch takes seconds

import contextlib
import json
import os

import numpy as np

from histocc.data import prepare as preparing
from histocc.data.arrays import PreparedData, RowSet, fault
from histocc.data.config import problems_of_columns
from histocc.data.report import report_lines
from histocc.data.rows import OUTSIDE_KEY, hold_numbers, key_reader, read_key
from histocc.data.settings import PrepareSettings, file_problems
from histocc.evaluate import baseline
from histocc.evaluate import markdown as report_text
from histocc.evaluate.answering import answered
from histocc.evaluate.config import EvaluateConfig, get_args_parser
from histocc.evaluate.figures import decoders_report
from histocc.evaluate.fitted import fit_confidence, store_thresholds
from histocc.formatter import BlockyFormatter, hisco_key, make_formatter
from histocc.model import model_io
from histocc.model.confidence import Confidence
from histocc.model.int8 import to_int8
from histocc.model.published import KINDS, SETTINGS, Given, files_of, load_content
from histocc.model.thresholds import Thresholds
from histocc.runtime import checkpoint, entrypoint, files
from histocc.runtime.checkpoint import exists_in
from histocc.runtime.device import Precision
from histocc.runtime.errors import UserError
from histocc.runtime.world import World
from histocc.seq2seq_mixer_engine import COLUMNS
from histocc.text import UNKNOWN_LANGUAGE

JSON, MARKDOWN, REJECTED = "report.json", "report.md", "rejected_rows.csv"
# figures of a decoder that the model lacks
NOT_OF_KIND = {
    "mixer": (),
    "seq2seq": ("val_loss", "val_loss_linear", "flat_acc"),
    "flat": ("val_loss", "val_loss_seq2seq", "seq_acc", "token_acc"),
}
OWN_FILES = (JSON, MARKDOWN, REJECTED, *report_text.PLOTS)


def number_codes(
    args: EvaluateConfig, columns: list[str], state: dict, formatter: BlockyFormatter
) -> list[str] | None:
    """The codes that the cells of `columns` are numbers of, or None for columns of codes. They are those of
    --key, else of the --key of the training, else of the HISCO key. Raises UserError where a model of another
    system does not say.
    """
    trained_on_them = hold_numbers(formatter.target_cols) and "args" in state
    if (
        not hold_numbers(columns)
        or trained_on_them
        and not (args.key or state["args"].get("key") or state.get("hisco_numbers"))
    ):
        return None  # of another formatter: codes, in columns of such names
    if args.key:
        return [formatter.repair(code)[0] for code in read_key(args.key)]
    if trained_on_them and state["args"].get("key"):
        return list(state["key"])
    if formatter.kind != "hisco":
        raise UserError(f"--target-cols {' '.join(columns)} hold numbers of a key: --key names its file")
    return list(hisco_key())


def filled_in(args: EvaluateConfig, trained: dict) -> EvaluateConfig:
    """With the columns and the language that are not named, as in the training; trained: its arguments."""
    language, language_col = args.language, args.language_col
    if language is None and language_col is None:
        language_col = trained.get("language_col")
        language = None if language_col else trained.get("language")
    return args.decide(
        input_col=trained.get("input_col", "occ1") if args.input_col is None else args.input_col,
        language=UNKNOWN_LANGUAGE if language is None else language,
        language_col=language_col,
    )


def settings_from(args: EvaluateConfig, state: dict, formatter: BlockyFormatter) -> PrepareSettings:
    """What is read, with the codes of the model in their order. Raises UserError with all that is wrong."""
    columns = args.target_cols or formatter.target_cols
    args = filled_in(args, state.get("args", {})).decide(target_cols=columns)
    max_len = state["config"]["max_len"]
    problems = list(problems_of_columns(args, max_len))
    if len(columns) > formatter.max_num_codes:
        problems.append(
            f"--target-cols names {len(columns)} columns, but the model writes at most"
            f" {formatter.max_num_codes} codes"
        )
        columns = columns[: formatter.max_num_codes]
    own = make_formatter(
        formatter.kind,
        columns,
        formatter.block_size,
        formatter.within_block_sep is not None,
        formatter.allow_short,
        formatter.chars,
    )
    numbers = number_codes(args, columns, state, formatter)
    settings = PrepareSettings(
        train_files=args.data,
        formatter=own.to_dict(),
        target_cols=columns,
        share_val=args.share_val,
        input_col=args.input_col or "occ1",
        language=args.language or UNKNOWN_LANGUAGE,
        language_col=args.language_col,
        max_len=max_len,
        missing_code=args.missing_code,
        drop_bad_labels=True,
        fixed_codes=sorted(state["key"], key=state["key"].get),
        delimiter=args.delimiter,
        clean_text=state["config"]["text"],
        numbered=numbers is not None,
        number_codes=numbers,
    )
    problems += file_problems(settings)
    if args.missing_code is not None and args.missing_code not in state["key"]:
        problems.append(f"--missing-code: {args.missing_code!r} is not among the codes of the model")
    if problems:
        raise UserError("\n  ".join(problems))
    return settings


def output_problem(args: EvaluateConfig, file: str) -> str | None:
    """Why no report can be written into the folder of --output, or None. file: of the weights."""
    folder = args.output
    inside = [
        path
        for path in args.data
        if os.path.realpath(os.path.dirname(path) or ".") == os.path.realpath(folder)
    ]
    if exists_in(folder) or inside:
        return (
            f"--output {folder} holds {'a run' if exists_in(folder) else inside[0]}: choose a folder of its"
            " own for the report"
        )
    unwritable = files.save_path_problem(folder)
    inputs = dict.fromkeys(args.data, "a file of the data") | {
        args.key: "the file of --key",
        **dict.fromkeys(files_of(file), "the model"),
    }
    found = (
        []
        if unwritable
        else files.problems([os.path.join(folder, name) for name in OWN_FILES], inputs, args.overwrite)
    )
    return unwritable or (found[0] if found else None)


def prepared(
    args: EvaluateConfig, world: World, file: str, state: dict, formatter: BlockyFormatter
) -> PreparedData:
    """The rows as arrays, checked; rank 0 prepares them in the folder of the report. All ranks. Raises
    UserError.
    """

    def first() -> tuple[PrepareSettings, str]:
        problem = output_problem(args, file)
        if problem:
            raise UserError(problem)
        settings = settings_from(args, state, formatter)
        if args.baseline:
            rows_of_run(args, file, state)  # only to find out now whether they are there
        try:
            folder = preparing.prepare(
                settings,
                args.output,
                lambda line: None,
                check=world.give_up_if_asked,
                warn=world.print,
            )
            return settings, folder
        except preparing.UnusableData as error:
            raise UserError(nothing_left(error.report, args)) from None

    settings, folder = world.run_on_main("prepare", first)
    return preparing.on_every_node(
        settings,
        args.output,
        folder,
        world,
        world.give_up_if_asked,
    )


def nothing_left(report: dict, args: EvaluateConfig) -> str:
    """What to say of data without a row to evaluate."""
    kinds = "; ".join(f"{rows:,} × {kind}" for kind, rows in report["rejected"].items())
    first = [
        f"{each['file']}, line {each['line']}: {each['reason']}"
        for problem in report["problems"]
        for each in problem["first"][:1]
    ]
    what = (
        "no row can be evaluated"
        if kinds or not args.share_val
        else f"--share-val {args.share_val:g} leaves no row to evaluate"
    )
    lines = [f"{', '.join(args.data)}: {what}" + (f" ({kinds})" if kinds else ""), *first]
    if OUTSIDE_KEY in report["rejected"]:
        lines.append(
            f"The model {args.model} knows other codes than these: are these the right columns, and is it the"
            " model for them?"
        )
    return "\n  ".join(lines)


def prepared_of_run(file: str, state: dict) -> str:
    """The folder of the data that a checkpoint was trained on; it need not be there."""
    return os.path.join(os.path.dirname(file), "prepared", str(state.get("position", {}).get("fingerprint")))


def trained_on(file: str, state: dict) -> PreparedData | None:
    """The prepared data of the run; None where they are not there any more as they were written."""
    folder = prepared_of_run(file, state)
    if fault(folder):
        return None
    with contextlib.suppress(OSError, ValueError, KeyError, UserError):
        return PreparedData.open(folder)
    return None


def known_texts(file: str, state: dict, rows: RowSet) -> dict[str, int | None]:
    """How many of the distinct texts were trained on, and how many the run was validated on, to which its
    confidence may be fitted; None where `trained_on` is.
    """
    own, texts = trained_on(file, state), np.unique(rows.text_hash)
    parts = {"trained": None, "validated": None}
    if own is not None:
        parts = {"trained": own.train, "validated": own.val}
    return {
        f"texts_{name}_on": None if part is None else int(np.isin(texts, part.text_hash).sum())
        for name, part in parts.items()
    }


def rows_of_run(args: EvaluateConfig, file: str, state: dict) -> PreparedData:
    """The data that --baseline is fitted to. Rank 0 only. Raises UserError without them or scikit-learn."""
    baseline.check_installed()
    if "fingerprint" not in state.get("position", {}):
        raise UserError(
            f"--baseline: {args.model} does not say which rows it was trained on, as checkpoints"
            " of finetune.py and train_mixer.py do; evaluate one of them in the folder of its"
            " run, or leave out --baseline"
        )
    own = trained_on(file, state)
    if own is None:
        raise UserError(
            f"--baseline: the rows of the training are not in {prepared_of_run(file, state)} any"
            " more: evaluate the checkpoint in the folder of its run; --prepare-only with the"
            " command of the training prepares them again"
        )
    return own


def baseline_figures(
    args: EvaluateConfig, world: World, file: str, state: dict, data: PreparedData, rows: RowSet
) -> dict | None:
    """`baseline.compared` on the evaluated rows; None without --baseline. Rank 0 fits. All ranks."""

    def fit() -> dict:
        own = rows_of_run(args, file, state)
        world.print(
            f"Baseline: a linear support vector machine for each of {len(own.codes):,} codes, on"
            f" {min(len(own.train), baseline.MOST_ROWS):,} training rows"
        )
        return baseline.compared(
            own, data, rows, args.resamples, args.seed, world.give_up_if_asked, world.print
        )

    if not args.baseline:
        return None
    return world.run_on_main("baseline", fit)


def data_facts(args: EvaluateConfig, file: str, state: dict, data: PreparedData, rows: RowSet) -> dict:
    """What was evaluated, and what was not."""
    of_language = np.bincount(rows.language, minlength=len(data.languages))
    return {
        "files": args.data,
        "rows_read": data.report["rows"],
        "rows": len(rows),
        "texts": len(np.unique(rows.text_hash)),
        "share_val": args.share_val,
        "other_part_rows": data.report["train_rows"] if args.share_val is not None else 0,
        "rejected": data.report["rejected"],
        "rows_outside_key": data.report["rejected"].get(OUTSIDE_KEY, 0),
        "unknown_languages": {
            name: int(count)
            for name, count in zip(data.languages, of_language)
            if count and name not in state["languages"] and name != UNKNOWN_LANGUAGE
        },
        **known_texts(file, state, rows),
    }


def write_report(args: EvaluateConfig, report: dict, prepared_folder: str) -> None:
    """All files of the report, report.json last. Rank 0 only."""
    plots = report_text.plots(report)
    report["plots"] = list(plots or {})
    for name in OWN_FILES if args.overwrite else ():  # those that the new report does not have, too
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(args.output, name))
    with open(os.path.join(prepared_folder, REJECTED), "rb") as file:
        contents = {REJECTED: file.read()}
    texts = {
        MARKDOWN: report_text.markdown(report),
        JSON: json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n",
    }
    contents |= {name: text.encode("utf-8", "backslashreplace") for name, text in texts.items()}
    written = {name: lambda file, content=content: file.write(content) for name, content in contents.items()}
    with contextlib.ExitStack() as together:  # which gives the first one its name last
        for name, write in {JSON: written.pop(JSON), **written, **(plots or {})}.items():
            path = os.path.join(args.output, name)
            file = together.enter_context(files.atomic_write(path, args.overwrite))
            write(file)
            file.flush()


def make_report(
    args: EvaluateConfig, file: str, state: dict, facts: dict, figures: dict, decoders: dict
) -> dict:
    """What report.json holds, but for the baseline and the plots."""
    lacking = NOT_OF_KIND[state.get("kind", "mixer")]
    return {
        "model": {
            "file": file,
            "step": state.get("step"),
            "system": state["system"],
            "codes": len(state["key"]),
            "confidence_texts": 0 if args.raw_confidence else Confidence.of(state).texts,
            **({"number_format": "int8"} if args.int8 else {}),
        },
        "data": facts,
        "validation": {name: figures[name] for name in COLUMNS if name in figures and name not in lacking},
        "resamples": args.resamples,
        "seed": args.seed,
        "decoders": decoders,
    }


def print_result(args: EvaluateConfig, world: World, report: dict) -> None:
    """The main figures, and where the others are."""
    for name, each in report["decoders"].items():
        world.print(
            f"{report_text.name_of(name, each)}: {each['accuracy']:.1%} of rows, "
            f"{each['by_digits'][-1]['over_texts']['accuracy'][0]:.1%} of distinct texts"
        )
    if "baseline" in report:
        world.print(report_text.baseline_line(report))
    if not report["plots"]:
        world.print("No plots: they need matplotlib (pip install matplotlib)")
    world.print(f"Report: {os.path.join(args.output, MARKDOWN)}")


def run(args: EvaluateConfig, world: World) -> None:
    """All ranks."""
    file = model_io.find_weights(args.model, args.model)
    beside = os.path.dirname(file) if os.path.exists(args.model) else ""
    args = args.decide(output=args.output or os.path.join(beside, "evaluation"))
    stores = args.fit_thresholds or args.fit_confidence
    evaluated = checkpoint.identity(file) if stores and world.is_main else ()
    loaded = load(args, file, world)
    _, formatter, state = loaded
    kind = state.get("kind", "mixer")
    if kind != "mixer":
        world.print(f"{args.model}: {KINDS[kind]}: the report is on the decoder that it has")
    best, why = Confidence.of(state).best_decoder(kind)
    world.print(f"Coding takes decoder {best} ({why})")
    data = prepared(args, world, file, state, formatter)
    rows = data.train if args.share_val is None else data.val
    facts = data_facts(args, file, state, data, rows) if world.is_main else {}
    if world.is_main:
        world.print("\n".join([*report_lines(data.report)[:1], *report_text.data_lines(facts)]))
    figures, outcomes = answered(args, world, loaded, data, rows)
    compared = baseline_figures(args, world, file, state, data, rows)
    found = outcomes.gathered(world)
    if found is None:  # on the other ranks
        return fit_confidence(args, file, evaluated, loaded, data, rows, world)
    decoders = decoders_report(found, formatter, data, rows, args.resamples, args.seed, kind)
    if "linear" in decoders:
        decoders["linear"]["codes_above"] = str(Thresholds.of(state))
    report = make_report(args, file, state, facts, figures, decoders)
    report |= {"baseline": compared} if compared else {}
    write_report(args, report, data.folder)
    print_result(args, world, report)
    if args.fit_thresholds:
        fitted = {
            name: each
            for name, each in decoders["linear"]["thresholds"].items()
            if name in ("all", *state["languages"])
        }
        share = decoders["both"]["linear_share"] if "both" in decoders else None
        evaluated = store_thresholds(file, evaluated, fitted, share, facts["texts_trained_on"], world)
    fit_confidence(args, file, evaluated, loaded, data, rows, world)


def load(args: EvaluateConfig, file: str, world: World) -> model_io.Loaded:
    """The model, for which --key names numbers alone where it brings its own key and the columns hold
    numbers. Raises UserError.
    """
    content = load_content(file)
    own = model_io.brings_settings(content)
    with checkpoint.reading(file):
        trained = content.get(SETTINGS, content)["formatter"]["target_cols"] if own else None
    key = None if own and hold_numbers(args.target_cols or trained or ["-"]) else args.key
    model, formatter, state = model_io.model_of(
        file,
        content,
        Given(args.formatter, key_reader(key), args.target_cols, args.use_within_block_sep),
    )
    stores = [
        f"--{name}" for name in ("fit-thresholds", "fit-confidence") if getattr(args, name.replace("-", "_"))
    ]
    if stores and (not own or file.endswith(".safetensors")):
        raise UserError(
            f"{stores[0]}: {file} is not a .bin of histocc, so it is not written to; python -m"
            " histocc.export makes one of it"
        )
    if args.fit_thresholds and state.get("kind") == "seq2seq":
        raise UserError(f"--fit-thresholds: {args.model} has no linear decoder")
    if stores and args.int8:
        raise UserError(f"{stores[0]} is for the model in float32: leave --int8 out")
    model.to(world.device)
    if args.int8:
        Precision("int8", world.device)  # raises where there is none
        to_int8(model)
    return model, formatter, state


def main(argv: list[str] | None = None) -> None:
    entrypoint.start(get_args_parser(), run, argv)


if __name__ == "__main__":
    main()
