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
from torch import Tensor

from histocc.data import prepare as preparing
from histocc.data.arrays import PreparedData, RowSet
from histocc.data.config import PrepareSettings, code_problems, file_problems, problems_of_columns, recoding
from histocc.data.dataset import RowEncoding, TextRows
from histocc.data.report import report_lines
from histocc.data.rows import OUTSIDE_KEY, hold_numbers, key_reader, language_name, read_key
from histocc.evaluate import baseline, figures
from histocc.evaluate import report as report_of
from histocc.evaluate.config import EvaluateConfig, get_args_parser
from histocc.evaluate.figures import MIN_ROWS, OUTPUTS, RANKED, Answers, true_places
from histocc.evaluate.report import JSON, MARKDOWN, PLOTS, REJECTED
from histocc.formatter import BlockyFormatter, hisco_key, make_formatter
from histocc.job import confidence as fitting
from histocc.job.build import make_loss
from histocc.job.config import Losses
from histocc.model.confidence import Thresholds
from histocc.model.loss import BEST_FIT, MEAN
from histocc.model.search import CANDIDATES, CodeSearch, CodeTrie
from histocc.predict.coder import Coder
from histocc.predict.explain import training_data
from histocc.published import models
from histocc.published.formats import KINDS, SETTINGS, Given, files_of, load_content
from histocc.runtime import checkpoint, entrypoint, files
from histocc.runtime.device import Precision, device_of, settings_of_torch
from histocc.runtime.errors import UserError
from histocc.runtime.forked import Forked, choose_processes
from histocc.runtime.world import World
from histocc.seq2seq_mixer_engine import COLUMNS, MixerTask
from histocc.text import UNKNOWN_LANGUAGE
from histocc.trainer import loop
from histocc.trainer.batches import BatchLoader, BatchPlan, MicroBatches

PIECE = 512  # distinct texts that one process codes at a time
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
    "seq2seq_weight": 0.1,
}


def load(args: EvaluateConfig, file: str, world: World) -> models.Loaded:
    """The model, for which --key names numbers alone if it brings its own key and the columns hold numbers.
    Raises UserError.
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
    return model.to(world.device), formatter, state


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
    inside = [p for p in args.data if os.path.realpath(os.path.dirname(p) or ".") == os.path.realpath(output)]
    if checkpoint.exists_in(output) or inside:
        raise UserError(
            f"--output {output} holds {'a run' if checkpoint.exists_in(output) else inside[0]}: choose a"
            " folder of its own for the report"
        )
    inputs = dict.fromkeys(args.data, "a file of the data") | dict.fromkeys(files_of(file), "the model")
    paths = [os.path.join(output, name) for name in (JSON, MARKDOWN, REJECTED, *PLOTS)]
    problem = files.save_path_problem(output)
    problems = (
        [problem]
        if problem
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
    lines = [f"{', '.join(args.data)}: no row can be evaluated ({kinds or 'none is left by --share-val'})"]
    for problem in report["problems"]:
        lines += [f"{each['file']}, line {each['line']}: {each['reason']}" for each in problem["first"][:1]]
    if OUTSIDE_KEY in report["rejected"]:
        lines.append(
            f"The model {args.model} knows other codes than these: is it the model for these columns?"
        )
    raise UserError("\n  ".join(lines))


def baseline_rows(args: EvaluateConfig, file: str, state: dict) -> PreparedData:
    """The data that --baseline is fitted to. Rank 0 only. Raises UserError without them or scikit-learn."""
    baseline.sklearn_parts()
    folder, data = training_data(file, str(state.get("position", {}).get("fingerprint")))
    if data is None:
        raise UserError(
            f"--baseline: the rows of the training are not in {folder}: evaluate a checkpoint in the folder"
            " of its run; --prepare-only with the command of the training prepares them again"
        )
    return data


def data_facts(args: EvaluateConfig, file: str, state: dict, data: PreparedData, rows: RowSet) -> dict:
    """What was evaluated, what was not, and how many of the texts the run was trained and validated on (None
    if that is not known). Rank 0 only.
    """
    number, texts = np.bincount(rows.language, minlength=len(data.languages)), np.unique(rows.text_hash)
    own = training_data(file, str(state.get("position", {}).get("fingerprint")))[1]
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


def validation(
    args: EvaluateConfig, world: World, loaded: models.Loaded, texts: TextRows, processes: int
) -> dict[str, float]:
    """What validation in training would log on the same rows. All ranks. Raises Stopped."""
    model, formatter, state = loaded
    plan = BatchPlan(
        len(texts), args.batch_size * world.size * processes, world.size * processes, args.batch_size
    )
    trained_with = {name: value for name, value in state.get("args", {}).items() if name in LOSS}
    task = MixerTask(make_loss(Losses(**LOSS | trained_with), formatter), formatter)

    def work(part: int) -> dict[str, float]:
        loader = BatchLoader(MicroBatches(texts, plan, world.rank * processes + part))
        sums = loop.own_totals(model, loader, task, world, stop=world.stop_agreed)
        return {name: float(value) for name, value in sums.items()}

    totals: Counter[str] = Counter()
    for sums in Forked(processes, world.give_up_if_asked).each(work):
        totals.update(sums)
    figures = loop.figures_of(dict(totals), world)
    lacking = NOT_OF_KIND[state.get("kind", "mixer")]
    return {name: figures[name] for name in COLUMNS if name in figures and name not in lacking}


def answers(
    args: EvaluateConfig, world: World, coder: Coder, rows: RowSet, languages: list[str], processes: int
) -> dict[str, Any] | None:
    """What the decoders answer to each distinct text of the rows. All ranks; None on all but rank 0.

    Returns:
        {"greedy", "flat", "both", "topk": Coded of each text, as far as the model has the decoder; "outputs":
        of the linear decoder, (numbers, logits) of the most probable ones; "candidates": if the linear share
        is to be fitted, (numbers, log-probabilities by either decoder); "of_row": int64 [N], the text of each
        row}.
    """
    names = [languages[number] for number in rows.language.tolist()]
    pairs = list(zip(rows.strings(np.arange(len(rows))), names))
    numbers = {pair: i for i, pair in enumerate(dict.fromkeys(pairs))}
    distinct = list(numbers)
    decoders = {"flat": ("flat",), "seq2seq": ("greedy", "topk"), "mixer": ("greedy", "flat", "both", "topk")}
    pieces = [distinct[i : i + PIECE] for i in range(0, len(distinct), PIECE)]
    has_share = bool(coder.linear_share or coder.model.ngrams)
    fits_share = args.fit_thresholds and coder.kind == "mixer" and has_share
    search = CodeSearch(coder.model, CodeTrie(coder.codes, coder.formatter)) if fits_share else None
    width = min(OUTPUTS, len(coder.codes))

    def outputs(ids: Tensor, mask: Tensor, _) -> list[tuple]:
        logits, numbers = coder.linear_logits(ids, mask).float().topk(width)
        return list(zip(numbers.cpu().numpy(), logits.cpu().numpy()))

    def candidates(ids: Tensor, mask: Tensor, _) -> list[tuple]:
        assert search is not None
        codes, scores, logits = search.candidates(ids, mask)
        linear = logits.log_softmax(1).gather(1, codes)
        written = 2 * scores - linear  # scores are the mean of both, in a search without a linear share
        return list(zip(*(values.cpu().numpy() for values in (codes, written, linear))))

    def work(part: int) -> dict[int, dict[str, Any]]:
        answered = {}
        for i in range(world.rank * processes + part, len(pieces), world.size * processes):
            texts, names = map(list, zip(*pieces[i]))
            answered[i] = {}
            for decoder in decoders[coder.kind]:
                k = {"flat": OUTPUTS, "topk": RANKED}.get(decoder, coder.formatter.max_num_codes)
                answered[i][decoder] = coder.code(texts, names, decoder, k)
            nothing = np.full(width, -1), np.full(width, -np.inf, dtype=np.float32)
            if coder.kind != "seq2seq":
                answered[i]["outputs"] = coder.map_texts(texts, names, outputs, nothing)
            if search is not None:
                nothing = tuple(array[:CANDIDATES] for array in (*nothing, nothing[1]))
                answered[i]["candidates"] = coder.map_texts(texts, names, candidates, nothing)
        return answered

    mine = {
        i: part
        for answered in Forked(processes, world.give_up_if_asked).each(work)
        for i, part in answered.items()
    }
    shares = world.gather_on_main(mine)
    if shares is None:
        return None
    parts = {i: part for share in shares for i, part in share.items()}
    collected = {name: [one for i in range(len(pieces)) for one in parts[i][name]] for name in parts[0]}
    return collected | {"of_row": np.array([numbers[pair] for pair in pairs], dtype=np.int64)}


def decoders_report(
    answered: dict,
    state: dict,
    formatter: BlockyFormatter,
    data: PreparedData,
    rows: RowSet,
    args: EvaluateConfig,
) -> dict[str, dict]:
    """The figures of each decoder that the model has, from `answers`. Rank 0 only."""
    of_row, decoders = answered["of_row"], {}
    for name, decoder in (("seq2seq", "greedy"), ("linear", "flat"), ("both", "both")):
        if decoder in answered:
            given = Answers.of(answered[decoder], of_row, data.codes)
            decoders[name] = figures.decoder_report(given, formatter, data, rows, args.resamples, args.seed)
    if "topk" in answered:
        number = {code: i for i, code in enumerate(data.codes)}
        width = min(RANKED, len(number))
        ranking = np.array([[number[code] for code in one.codes] or [-1] * width for one in answered["topk"]])
        decoders["seq2seq"]["top_k"] = figures.top_k(*true_places(rows, ranking[of_row]))
    if "outputs" in answered:
        numbers, logits = (np.stack(values)[of_row] for values in zip(*answered["outputs"]))
        places, there = true_places(rows, numbers)
        thresholds, of_linear = Thresholds.of(state), decoders["linear"]
        by_language = {name: np.asarray(rows.language) == i for i, name in enumerate(data.languages)}
        enough = {name: part for name, part in by_language.items() if part.sum() >= MIN_ROWS}
        groups = {"all": np.ones(len(rows), dtype=bool), **enough}
        probs = 1 / (1 + np.exp(-logits))
        of_linear["codes_above"], of_linear["top_k"] = str(thresholds), figures.top_k(places, there)
        of_linear["thresholds"] = figures.best_thresholds(probs, places, there, thresholds, groups)
    if "candidates" in answered:
        codes, written, linear = (np.stack(values)[of_row] for values in zip(*answered["candidates"]))
        counts = np.array([max(1, len(one.codes)) for one in answered["flat"]])[of_row]
        decoders["both"]["linear_share"] = figures.best_linear_share(codes, written, linear, counts, rows)
    return decoders


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


def fitted_thresholds(decoders: dict, state: dict) -> dict:
    """Entries of a checkpoint: the best thresholds, and the best share of the linear decoder if it was looked
    for.
    """
    best, held = decoders["linear"]["thresholds"], state.get("thresholds") or {}
    thresholds = {
        "default": best["all"]["threshold_f1"],
        "source": "fitted",
        "by_language": {name: best[name]["threshold_f1"] for name in best if name in state["languages"]},
        **{name: held[name] for name in ("at_least_one", "at_most") if name in held},
    }
    share = decoders.get("both", {}).get("linear_share")
    return {"thresholds": thresholds} | ({} if share is None else {"linear_share": share})


def store(file: str, evaluated: tuple[int, ...], entries: dict) -> None:
    """Puts entries for coding into a checkpoint. Rank 0 only.

    Args:
        evaluated: its identity when it was read.

    Raises:
        UserError: it is another file by now.
    """
    with files.run_lock(os.path.dirname(file) or "."):  # no run may put another one there meanwhile
        if checkpoint.identity(file) != evaluated:
            raise UserError(f"{file} is no longer the file that was evaluated: nothing is stored in it")
        content = checkpoint.load(file)
        content.get(SETTINGS, content).update(entries)
        checkpoint.replace(file, content)


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
    Precision("float32", world.device).use()  # as in training
    processes = choose_processes(args.processes, world, -(-len(texts) // args.batch_size))
    coder = Coder(
        *loaded,
        batch_size=args.batch_size,
        precision=Precision("int8" if args.int8 else "float32", world.device),
        check=world.give_up_if_asked,
        raw_confidence=args.raw_confidence,
    )
    world.print(f"Coding takes decoder {coder.best_decoder} ({coder.why_best})")
    if kind != "flat":
        coder.search()  # once, before processes are forked
    logged = validation(args, world, loaded, texts, processes)
    answered = answers(args, world, coder, rows, data.languages, processes)
    fitted: dict[str, Any] = {}
    if answered is not None:  # on rank 0
        decoders = decoders_report(answered, state, formatter, data, rows, args)
        report = {
            "model": {
                "file": file,
                "step": state.get("step"),
                "system": state["system"],
                "codes": len(state["key"]),
                "confidence_texts": coder.confidence.texts,
                **({"number_format": "int8"} if args.int8 else {}),
            },
            "data": facts,
            "validation": logged,
            "resamples": args.resamples,
            "seed": args.seed,
            "decoders": decoders,
        }
        if args.baseline:
            world.print(
                "Baseline: a linear support vector machine for each code, fitted to the training rows"
            )
            trained, check = baseline_rows(args, file, state), world.give_up_if_asked
            report["baseline"] = baseline.compared(trained, data, rows, args.resamples, args.seed, check)
        write_report(output, report, data.folder, args.overwrite)
        for name, each in decoders.items():
            over_texts = each["by_digits"][-1]["over_texts"]["accuracy"][0]
            world.print(
                f"{report_of.NAMES[name]}: {each['accuracy']:.1%} of rows, {over_texts:.1%} of distinct texts"
            )
        if args.baseline:
            world.print(report_of.baseline_line(report))
        if not report["plots"]:
            world.print("No plots: they need matplotlib (pip install matplotlib)")
        world.print(f"Report: {os.path.join(output, MARKDOWN)}")
        fitted = fitted_thresholds(decoders, state) if args.fit_thresholds else {}
    if args.fit_confidence:
        fitted = world.run_on_main("thresholds", lambda: fitted)
        loaded, precision = (model, formatter, state | fitted), Precision("float32", world.device)
        fitted |= fitting.fit(file, loaded, rows, data, world, args.batch_size, precision) or {}
    if fitted and world.is_main:
        store(file, evaluated, fitted)
        if "thresholds" in fitted:
            world.print(f"Thresholds stored in {file}: {Thresholds.of(fitted)}")
        if "linear_share" in fitted:
            share = f"{fitted['linear_share']:g}, for coding with --decoder topk or full"
            world.print(f"Linear share stored in {file}: {share}")
        if len(rows) < MIN_ROWS:
            world.print(f"WARNING: they are fitted on {len(rows):,} rows; take {MIN_ROWS} or more")
        if facts["texts_trained_on"]:
            world.print(
                f"WARNING: {facts['texts_trained_on']:,} of the texts that they are fitted on were trained on"
                "; others give better ones"
            )


def evaluate(
    model: str | os.PathLike,
    data: str | os.PathLike | list[str],
    output: str | os.PathLike | None = None,
    verbose: bool = False,
    **flags: Any,
) -> report_of.Report:
    """As `python -m histocc.evaluate` does, in one process; returns its report.

    Args:
        output: folder of the report; None: none is kept.
        verbose: prints what the command does.
        flags: those of the command, with underscores: target_cols=["hisco_1"], share_val=0.1, baseline=True.

    Raises:
        UserError, TrainingError: as the command ends with them.
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
