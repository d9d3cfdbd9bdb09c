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
import io
import json
import os
import tempfile
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from histocc.data import prepare as preparing
from histocc.data.arrays import PreparedData, RowSet, fault
from histocc.data.config import PrepareSettings, code_problems, file_problems, problems_of_columns, recoding
from histocc.data.dataset import RowEncoding, TextRows
from histocc.data.report import report_lines
from histocc.data.rows import OUTSIDE_KEY, hold_numbers, key_reader, language_name, read_key
from histocc.evaluate import baseline
from histocc.evaluate import report as report_of
from histocc.evaluate.config import EvaluateConfig, get_args_parser
from histocc.evaluate.figures import MIN_ROWS, RANKED, Outcomes, decoders_report
from histocc.evaluate.report import JSON, MARKDOWN, PLOTS, REJECTED
from histocc.formatter import BlockyFormatter, hisco_key, make_formatter
from histocc.job import confidence as fitting
from histocc.job import recipe
from histocc.job.config import Losses
from histocc.model.confidence import MIN_TEXTS, Confidence, Thresholds
from histocc.model.decoding import greedy_from_memory, sets_of
from histocc.model.int8 import to_int8
from histocc.model.loss import BEST_FIT, MEAN
from histocc.model.search import CodeSearch, CodeTrie
from histocc.published import models
from histocc.published.formats import KINDS, SETTINGS, Given, files_of, load_content
from histocc.runtime import checkpoint, entrypoint, files
from histocc.runtime.device import Precision, device_of, settings_of_torch
from histocc.runtime.errors import UserError
from histocc.runtime.forked import Forked, choose_processes
from histocc.runtime.signals import Stopped
from histocc.runtime.world import World
from histocc.seq2seq_mixer_engine import COLUMNS, MixerTask
from histocc.text import UNKNOWN_LANGUAGE
from histocc.trainer import loop
from histocc.trainer.batches import BatchLoader, BatchPlan, MicroBatches

# figures of a decoder that the model lacks
NOT_OF_KIND = {
    "mixer": (),
    "seq2seq": ("val_loss", "val_loss_linear", "flat_acc"),
    "flat": ("val_loss", "val_loss_seq2seq", "seq_acc", "token_acc"),
}
# of models that do not say how they were trained
LOSS = {
    "block_loss": BEST_FIT,
    "empty_blocks": "all",
    "linear_loss": MEAN,
    "many_codes_weight": 1.0,
    "seq2seq_weight": 0.1,
}


def load(args: EvaluateConfig, file: str, world: World) -> models.Loaded:
    """The model, for which --key names numbers alone where it brings its own key and the columns hold
    numbers. Raises UserError.
    """
    content = load_content(file)
    own = models.brings_settings(content)
    with checkpoint.reading(file):
        trained = content.get(SETTINGS, content)["formatter"]["target_cols"] if own else None
    key = None if own and hold_numbers(args.target_cols or trained or ["-"]) else args.key
    given = Given(args.formatter, key_reader(key), args.target_cols, args.use_within_block_sep)
    model, formatter, state = models.model_of(file, content, given)
    stores = ["--fit-thresholds"] * args.fit_thresholds + ["--fit-confidence"] * args.fit_confidence
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


def prepare_settings(args: EvaluateConfig, state: dict, formatter: BlockyFormatter) -> PrepareSettings:
    """What is read, with the codes of the model in their order; columns and language that are not named are
    those of the training. Raises UserError with all that is wrong.
    """
    trained, columns = state.get("args", {}), args.target_cols or formatter.target_cols
    language, language_col = args.language, args.language_col
    if language is None and language_col is None:
        language, language_col = trained.get("language"), trained.get("language_col")
        language = None if language_col else language
    input_col = args.input_col or trained.get("input_col", "occ1")
    max_len = state["config"]["max_len"]
    named = args.decide(
        input_col=input_col, target_cols=columns, language=language, language_col=language_col
    )
    problems = list(problems_of_columns(named, max_len))
    if len(columns) > formatter.max_num_codes:
        problems.append(
            f"--target-cols names {len(columns)} columns, but the model writes at most"
            f" {formatter.max_num_codes} codes"
        )
        columns = columns[: formatter.max_num_codes]
    # cells hold numbers of --key, else of the --key of the training, else of the HISCO key
    numbers, by_number = None, hold_numbers(formatter.target_cols) and "args" in state
    key_of_training = trained.get("key") if by_number else None
    if hold_numbers(columns) and (args.key or key_of_training or state.get("hisco_numbers") or not by_number):
        if args.key:
            numbers = [formatter.repair(code)[0] for code in read_key(args.key)]
        elif not key_of_training and formatter.kind != "hisco":
            raise UserError(f"--target-cols {' '.join(columns)} hold numbers of a key: --key names its file")
        else:
            numbers = list(state["key"] if key_of_training else hisco_key())
    own = make_formatter(
        formatter.kind,
        columns,
        formatter.block_size,
        formatter.within_block_sep is not None,
        formatter.allow_short,
        formatter.chars,
    )
    settings = PrepareSettings(
        train_files=args.data,
        formatter=own.to_dict(),
        target_cols=columns,
        share_val=args.share_val,
        input_col=input_col,
        language=language_name(language or UNKNOWN_LANGUAGE),
        language_col=language_col,
        max_len=max_len,
        missing_code=args.missing_code,
        drop_bad_labels=True,
        fixed_codes=sorted(state["key"], key=state["key"].get),
        delimiter=args.delimiter,
        clean_text=state["config"]["text"],
        number_codes=numbers,
        encoding=args.encoding,
        code_separator=args.code_separator,
        recode=recoding(args.recode),
        empty_text=args.empty_text,
        ditto=args.ditto,
    )
    problems += file_problems(settings) + code_problems(own, settings)
    if problems:
        raise UserError("\n  ".join(problems))
    return settings


def prepare(
    args: EvaluateConfig, output: str, file: str, state: dict, formatter: BlockyFormatter, world: World
) -> tuple[PrepareSettings, str]:
    """(what is read, the folder of its arrays below that of the report). Rank 0 only. Raises UserError where
    something stands in the way of the report, too.
    """
    inside = [
        path
        for path in args.data
        if os.path.realpath(os.path.dirname(path) or ".") == os.path.realpath(output)
    ]
    if checkpoint.exists_in(output) or inside:
        raise UserError(
            f"--output {output} holds {'a run' if checkpoint.exists_in(output) else inside[0]}: choose a"
            " folder of its own for the report"
        )
    inputs = dict.fromkeys(args.data, "a file of the data") | dict.fromkeys(files_of(file), "the model")
    paths = [os.path.join(output, name) for name in (JSON, MARKDOWN, REJECTED, *PLOTS)]
    unwritable = files.save_path_problem(output)
    problems = (
        [unwritable]
        if unwritable
        else files.problems(paths, inputs | {args.key: "the file of --key"}, args.overwrite)
    )
    if problems:
        raise UserError(problems[0])
    settings = prepare_settings(args, state, formatter)
    if args.baseline:
        baseline_rows(args, file, state)  # only to find out now whether they are there
    try:
        return settings, preparing.prepare(
            settings, output, preparing.nothing, check=world.give_up_if_asked, warn=world.print
        )
    except preparing.UnusableData as error:
        report = error.report
    kinds = "; ".join(f"{rows:,} × {kind}" for kind, rows in report["rejected"].items())
    lines = [f"{', '.join(args.data)}: no row can be evaluated" + (f" ({kinds})" if kinds else "")]
    if args.share_val and not kinds:
        lines = [f"{', '.join(args.data)}: --share-val {args.share_val:g} leaves no row to evaluate"]
    for problem in report["problems"]:
        lines += [f"{each['file']}, line {each['line']}: {each['reason']}" for each in problem["first"][:1]]
    if OUTSIDE_KEY in report["rejected"]:
        lines.append(
            f"The model {args.model} knows other codes than these: are these the right columns, and is it the"
            " model for them?"
        )
    raise UserError("\n  ".join(lines))


def trained_on(file: str, state: dict) -> tuple[str, PreparedData | None]:
    """(where the prepared data of the run are, or were; these, None where they are not there any more as they
    were written).
    """
    folder = os.path.join(
        os.path.dirname(file), "prepared", str(state.get("position", {}).get("fingerprint"))
    )
    if fault(folder) is None:
        with contextlib.suppress(OSError, ValueError, KeyError, UserError):
            return folder, PreparedData.open(folder)
    return folder, None


def baseline_rows(args: EvaluateConfig, file: str, state: dict) -> PreparedData:
    """The data that --baseline is fitted to. Rank 0 only. Raises UserError without them or scikit-learn."""
    baseline.sklearn_parts()
    if "fingerprint" not in state.get("position", {}):
        raise UserError(
            f"--baseline: {args.model} does not say which rows it was trained on, as checkpoints"
            " of finetune.py and train_mixer.py do; evaluate one of them in the folder of its"
            " run, or leave out --baseline"
        )
    folder, data = trained_on(file, state)
    if data is None:
        raise UserError(
            f"--baseline: the rows of the training are not in {folder} any more: evaluate the checkpoint in"
            " the folder of its run; --prepare-only with the command of the training prepares them again"
        )
    return data


def data_facts(args: EvaluateConfig, file: str, state: dict, data: PreparedData, rows: RowSet) -> dict:
    """What was evaluated, what was not, and how many of the texts the run was trained and validated on (None
    where that cannot be found out). Rank 0 only.
    """
    number, texts = np.bincount(rows.language, minlength=len(data.languages)), np.unique(rows.text_hash)
    own = trained_on(file, state)[1]
    return {
        "files": args.data,
        "rows_read": data.report["rows"],
        "rows": len(rows),
        "texts": len(texts),
        "share_val": args.share_val,
        "other_part_rows": data.report["train_rows"] if args.share_val is not None else 0,
        "rejected": data.report["rejected"],
        "rows_outside_key": data.report["rejected"].get(OUTSIDE_KEY, 0),
        "unknown_languages": {
            name: int(count)
            for name, count in zip(data.languages, number)
            if count and name not in state["languages"] and name != UNKNOWN_LANGUAGE
        },
        "texts_trained_on": own and int(np.isin(texts, own.train.text_hash).sum()),
        "texts_validated_on": own and int(np.isin(texts, own.val.text_hash).sum()),
    }


def answers(
    args: EvaluateConfig, world: World, loaded: models.Loaded, texts: TextRows, languages: list[str]
) -> tuple[dict, Outcomes]:
    """(what validation in training would log, the answers to this rank's rows). All ranks. Raises Stopped."""
    model, formatter, state = loaded
    Precision("float32", world.device).use()  # as in training
    number = choose_processes(args.processes, world, -(-len(texts) // args.batch_size))
    plan = BatchPlan(len(texts), args.batch_size * world.size * number, world.size * number, args.batch_size)
    confidence = Confidence() if args.raw_confidence else Confidence.of(state)
    share, search, kind = state.get("linear_share") or 0.0, None, state.get("kind", "mixer")
    # also on the codes that both decoders rank together: of a model that was made for it, or has a share
    together = kind == "mixer" and bool(state["config"].get("ngrams") or share)
    if kind != "flat":
        tree = CodeTrie(list(state["key"]), formatter)
        search = CodeSearch(model, tree, share, confidence.ranking) if together else CodeSearch(model, tree)
    outcomes = Outcomes(np.asarray(texts.rows.language), languages, Thresholds.of(state), confidence.outputs)

    def collect(batch: dict, memory, padding, decoded, linear_logits) -> None:
        if confidence.written is not None:
            sizes = {"max_codes": formatter.max_num_codes, "block_size": formatter.block_size}
            decoded = greedy_from_memory(model, memory, padding, **sizes, writing=confidence.written)
        blocks, set_probs = sets_of(model, memory, padding, decoded, formatter, confidence.written)
        both, ranking = None, torch.full((len(blocks), RANKED), -1, device=blocks.device)
        if search is not None and together:
            written, linear = search.log_probs(batch["input_ids"], batch["attention_mask"])
            ranking = written.sort(dim=1, descending=True, stable=True).indices[:, :RANKED]
            scores = search.scores(written, linear)
            both = written, scores.argmax(1), search.probs_of(scores).max(1).values
        elif search is not None:
            ranking = search.topk(batch["input_ids"], batch["attention_mask"], RANKED)[0]
        outcomes.add(batch, blocks, set_probs, ranking, linear_logits, both)

    trained_with = {name: value for name, value in state.get("args", {}).items() if name in LOSS}
    loss_fn = recipe.make_loss(Losses(**LOSS | trained_with), formatter)
    task = MixerTask(loss_fn, formatter, collect)

    def work(part: int) -> tuple[dict[str, float], dict, dict]:
        loader = BatchLoader(MicroBatches(texts, plan, world.rank * number + part))
        found = loop.own_totals(model, loader, task, world, stop=world.stop_agreed)
        return {name: float(value) for name, value in found.items()}, outcomes.parts, outcomes.counts

    totals: Counter[str] = Counter()
    for part, (sums, *collected) in enumerate(Forked(number, world.give_up_if_asked).each(work)):
        totals.update(sums)
        if part:  # the first is this process
            outcomes.merge(*collected)
    return loop.figures_of(dict(totals), world), outcomes


def write_report(output: str, report: dict, prepared_folder: str, overwrite: bool) -> None:
    """All files of the report, report.json last. Rank 0 only."""
    with open(os.path.join(prepared_folder, REJECTED), "rb") as file:
        contents = {REJECTED: file.read()}
    try:
        plots = report_of.figures_of(report)
    except ImportError:
        plots = ()
    for name, figure in zip(PLOTS, plots):
        figure.savefig(buffer := io.BytesIO(), format="png", dpi=150)
        contents[name] = buffer.getvalue()
    report["plots"] = [name for name in PLOTS if name in contents]
    text = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    contents[MARKDOWN] = report_of.markdown(report).encode("utf-8", "backslashreplace")
    for name in (JSON, MARKDOWN, REJECTED, *PLOTS) if overwrite else ():  # also those that are not new
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(output, name))
    contents[JSON] = text.encode("utf-8", "backslashreplace")
    for name, content in contents.items():
        with files.atomic_write(os.path.join(output, name), overwrite) as file:
            file.write(content)


@contextlib.contextmanager
def changed(file: str, evaluated: tuple[int, ...]):
    """The entries for coding of a checkpoint, to be changed; it is written then. evaluated: its identity when
    it was read. Raises UserError where it is another file by now.
    """
    with files.run_lock(os.path.dirname(file) or "."):  # no run may put another one there meanwhile
        if checkpoint.identity(file) != evaluated:
            raise UserError(f"{file} is no longer the file that was evaluated: nothing is stored in it")
        content = checkpoint.load(file)
        yield content.get(SETTINGS, content)
        checkpoint.replace(file, content)


def store_thresholds(
    file: str,
    evaluated: tuple[int, ...],
    decoders: dict,
    state: dict,
    texts_trained_on: int | None,
    world: World,
) -> None:
    """Puts the best thresholds, and the best share of the linear decoder where there is one, into the
    checkpoint. Rank 0 only. Raises UserError.
    """
    best = decoders["linear"]["thresholds"]
    fitted = {
        "default": best["all"]["threshold_f1"],
        "source": "fitted",
        "by_language": {name: best[name]["threshold_f1"] for name in best if name in state["languages"]},
    }
    with changed(file, evaluated) as settings:
        held = settings.get("thresholds") or {}
        fitted |= {name: held[name] for name in ("at_least_one", "at_most") if name in held}
        settings["thresholds"] = fitted
        if "both" in decoders:
            settings["linear_share"] = decoders["both"]["linear_share"]
    world.print(f"Thresholds stored in {file}: {Thresholds.of({'thresholds': fitted})}")
    if "both" in decoders:
        share = decoders["both"]["linear_share"]
        world.print(f"Linear share stored in {file}: {share:g}, for coding with --decoder topk or full")
    if best["all"]["rows"] < MIN_ROWS:
        world.print(f"WARNING: they are fitted on {best['all']['rows']:,} rows; take {MIN_ROWS} or more")
    if texts_trained_on:
        world.print(
            f"WARNING: {texts_trained_on:,} of the texts that they are fitted on were trained on; others give"
            " better ones"
        )


def run(args: EvaluateConfig, world: World) -> None:
    """All ranks."""
    file = models.find_weights(args.model, args.model)
    beside = os.path.dirname(file) if os.path.exists(args.model) else ""
    output = args.output or os.path.join(beside, "evaluation")
    stores = args.fit_thresholds or args.fit_confidence
    evaluated = checkpoint.identity(file) if stores and world.is_main else ()
    model, formatter, state = loaded = load(args, file, world)
    kind = state.get("kind", "mixer")
    if kind != "mixer":
        world.print(f"{args.model}: {KINDS[kind]}: the report is on the decoder that it has")
    best, why = Confidence.of(state).best_decoder(kind)
    world.print(f"Coding takes decoder {best} ({why})")
    settings, folder = world.run_on_main(
        "prepare", lambda: prepare(args, output, file, state, formatter, world)
    )
    data = preparing.on_every_node(settings, output, folder, world, world.give_up_if_asked)
    rows = data.train if args.share_val is None else data.val
    facts = data_facts(args, file, state, data, rows) if world.is_main else {}
    if world.is_main:
        world.print("\n".join([*report_lines(data.report)[:1], *report_of.data_lines(facts)]))
    # a language that the model was not trained on is read as unk
    known = [name if name in state["languages"] else UNKNOWN_LANGUAGE for name in data.languages]
    max_len = state["config"]["max_len"]
    encoding = RowEncoding(formatter, max_len, None if state["config"]["memory_mask"] else max_len)
    texts = TextRows(rows, replace(data, languages=known), encoding)
    figures, outcomes = answers(args, world, loaded, texts, known)
    compared = None
    if args.baseline:
        compared = world.run_on_main(
            "baseline",
            lambda: baseline.compared(
                baseline_rows(args, file, state),
                data,
                rows,
                args.resamples,
                args.seed,
                world.give_up_if_asked,
                world.print,
            ),
        )
    found = outcomes.gathered(world)
    if found is not None:  # on rank 0
        decoders = decoders_report(found, formatter, data, rows, args.resamples, args.seed, kind)
        if "linear" in decoders:
            decoders["linear"]["codes_above"] = str(Thresholds.of(state))
        report = {
            "model": {
                "file": file,
                "step": state.get("step"),
                "system": state["system"],
                "codes": len(state["key"]),
                "confidence_texts": 0 if args.raw_confidence else Confidence.of(state).texts,
                **({"number_format": "int8"} if args.int8 else {}),
            },
            "data": facts,
            "validation": {
                name: figures[name] for name in COLUMNS if name in figures and name not in NOT_OF_KIND[kind]
            },
            "resamples": args.resamples,
            "seed": args.seed,
            "decoders": decoders,
            **({"baseline": compared} if compared else {}),
        }
        write_report(output, report, data.folder, args.overwrite)
        for name, each in decoders.items():
            over_texts = each["by_digits"][-1]["over_texts"]["accuracy"][0]
            world.print(
                f"{report_of.NAMES[name].format(**each)}: {each['accuracy']:.1%} of rows, {over_texts:.1%} of"
                " distinct texts"
            )
        if compared:
            world.print(report_of.baseline_line(report))
        if not report["plots"]:
            world.print("No plots: they need matplotlib (pip install matplotlib)")
        world.print(f"Report: {os.path.join(output, MARKDOWN)}")
        if args.fit_thresholds:
            store_thresholds(file, evaluated, decoders, state, facts["texts_trained_on"], world)
    if args.fit_confidence:
        fit_confidence(args, file, evaluated, loaded, texts, np.asarray(rows.text_hash), world)


def fit_confidence(
    args: EvaluateConfig,
    file: str,
    evaluated: tuple[int, ...],
    loaded: models.Loaded,
    texts: TextRows,
    text_hash: np.ndarray,
    world: World,
) -> None:
    """All ranks. Raises UserError, Stopped."""
    model, formatter, state = loaded
    number = len(np.unique(text_hash))
    if number < MIN_TEXTS:
        world.print(fitting.too_few(number, "take more rows"))
        return
    if args.fit_thresholds:  # with those that were stored

        def stored() -> dict:
            content = checkpoint.load(file)
            settings = content.get(SETTINGS, content)
            held = {name: settings[name] for name in ("thresholds", "linear_share") if name in settings}
            return held | {"identity": checkpoint.identity(file)}

        held = world.run_on_main("stored", stored)
        evaluated = tuple(held.pop("identity"))
        state = {**state, **held}
    precision = Precision("float32", world.device)
    fitted = fitting.fit((model, formatter, state), texts, text_hash, world, args.batch_size, precision)
    if fitted is None and world.is_main:
        raise Stopped
    if fitted is not None:
        with changed(file, evaluated) as settings:
            settings["confidence"] = fitted.confidence.to_dict()
        world.print(f"{file}: {fitted.line}")


def evaluate(
    model: str | os.PathLike,
    data: str | os.PathLike | list[str],
    output: str | os.PathLike | None = None,
    verbose: bool = False,
    **flags: Any,
) -> report_of.Report:
    """As `python -m histocc.evaluate` does, in one process; returns its report.

    output: folder of the report; None: none is kept. verbose: prints what the command does. The others are
    the flags of the command, with underscores: target_cols=["hisco_1"], share_val=0.1, baseline=True. Raises
    UserError, TrainingError.
    """
    values = {"model": model, "data": [data] if isinstance(data, str | os.PathLike) else list(data)}
    with contextlib.ExitStack() as held:
        values |= {**flags, "output": output or held.enter_context(tempfile.TemporaryDirectory())}
        args = EvaluateConfig(**get_args_parser().checked(values, "evaluate"))
        world = World(device=device_of(args.device))
        if not verbose:
            held.enter_context(contextlib.redirect_stdout(None))
        with settings_of_torch(), torch.random.fork_rng([]):
            run(args, world)
        return report_of.Report.read(args.output)


def main(argv: list[str] | None = None) -> None:
    entrypoint.start(get_args_parser(), run, argv)


if __name__ == "__main__":
    main()
