"""From arguments to prepared data: everything that can be wrong is found here, and said together."""

import argparse
import os

from histocc import checkpoint, model_io, prepare, tables
from histocc.arrays import PreparedData
from histocc.cli import MAY_DIFFER_ON_RESUME, argument_problems, save_path_problem
from histocc.distributed import UserError, World
from histocc.formatter import BlockyFormatter, CodeError, make_formatter


def settings_from(args: argparse.Namespace, train_files: list[str], val_files: list[str],
                  naming: str = "hisco") -> prepare.PrepareSettings:
    """Rank 0 only. What is to be prepared, after checking arguments, files and folder together.

    Raises one UserError with all problems.
    """
    problems = argument_problems(args)
    problems += [problem for problem in [save_path_problem(args.save_path)] if problem]
    problems += _checkpoint_problems(args)
    fixed = formatter = None
    try:
        if not args.target_cols:
            args.target_cols = _find_target_cols(args, train_files[0], naming)
        formatter = make_formatter(args.formatter, args.target_cols, args.block_size, args.use_within_block_sep,
                                   args.allow_codes_shorter_than_block_size)
        fixed = _fixed_codes(args, formatter)
    except (UserError, ValueError) as error:
        problems.append(str(error))
    settings = prepare.PrepareSettings(
        train_files=train_files, val_files=val_files, formatter=formatter.to_dict() if formatter else {},
        target_cols=args.target_cols or [], share_val=getattr(args, "share_val", None), input_col=args.input_col,
        language=args.language, language_col=args.language_col, max_len=args.max_len, missing_code=args.missing_code,
        drop_bad_labels=args.drop_bad_labels, fixed_codes=fixed,
        numbered=bool(args.key) and tables.hold_numbers(args.target_cols or []))
    problems += [problem for problem in prepare.file_problems(settings) if problem not in problems]
    problems += _missing_code_problem(formatter, args.missing_code, fixed)
    if problems:
        raise UserError(problems[0] if len(problems) == 1 else
                        "\n  ".join([f"{len(problems)} problems:", *(p.replace("\n", "\n  ") for p in problems)]))
    return settings


def _checkpoint_problems(args: argparse.Namespace) -> list[str]:
    first = checkpoint.find(args.initial_checkpoint) if args.initial_checkpoint else None
    if args.initial_checkpoint and first is None:
        return [f"--initial-checkpoint {args.initial_checkpoint}: no checkpoint there"]
    if first and args.overwrite and os.path.realpath(os.path.dirname(first) or ".") == os.path.realpath(args.save_path):
        return [f"--overwrite would remove {first}, which --initial-checkpoint needs: choose another folder for the new run"]
    if args.eval_only and first is None and checkpoint.find(args.save_path) is None:
        return [f"--eval-only: no checkpoint in {args.save_path}; --initial-checkpoint names one"]
    if args.eval_only and getattr(args, "share_val", None) == 0:
        return ["--eval-only needs rows to validate on, and --share-val 0 leaves none"]
    if checkpoint.missing_last(args.save_path) and not (args.overwrite or args.prepare_only or args.eval_only):
        return [f"{args.save_path} holds checkpoints of a run but no last.bin to go on from. Copy the one to go on from "
                f"there ({checkpoint.others(args.save_path)}), or start anew with --overwrite"]
    return []


def _find_target_cols(args: argparse.Namespace, path: str, naming: str) -> list[str]:
    found = tables.find_target_columns(tables.read_header(path)[0], naming, has_key=bool(args.key))
    if found is None:
        raise UserError(f"{path}: has none of the columns {naming}_1, OCC1950_1; name yours with --target-cols")
    return found[1]


def _fixed_codes(args: argparse.Namespace, formatter: BlockyFormatter) -> list[str] | None:
    """Codes of --key or --all-codes-file as the formatter writes them. Raises UserError."""
    path = args.key or args.all_codes_file
    if not path:
        return None
    if args.key:
        cells = tables.read_key(path)
    else:
        cells = [cell for cell, in tables.read_columns(path, [args.all_codes_col or args.target_cols[0]])]
    codes = [formatter.repair(cell)[0] for cell in cells if cell]
    try:
        for code in codes:
            formatter.encode_code(code)
    except CodeError as error:
        raise UserError(f"{path}: {error}") from None
    if args.key and len(set(codes)) < len(codes):
        raise UserError(f"{path}: a code stands there twice, with and without its leading zero")
    return codes if args.key else sorted(set(codes))


def _missing_code_problem(formatter: BlockyFormatter | None, code: str | None, fixed: list[str] | None) -> list[str]:
    if formatter is None or code is None:
        return []
    try:
        formatter.encode_code(code)
    except CodeError as error:
        return [f"--missing-code: {error}"]
    return [] if fixed is None or code in fixed else [f"--missing-code: code {code!r} is not among the codes of the key"]


def prepared(args: argparse.Namespace, world: World, train_files: list[str], val_files: list[str],
             naming: str = "hisco") -> tuple[PreparedData, BlockyFormatter]:
    """Checks everything and prepares the data on rank 0 while the others wait; every rank maps the result. All ranks."""
    def work() -> list:
        settings = settings_from(args, train_files, val_files, naming)
        if checkpoint.exists_in(args.save_path) and not (args.overwrite or args.prepare_only or args.eval_only):
            refuse_other_arguments(args, _last_checkpoint(args.save_path))
        return [prepare.prepare(settings, args.save_path, world.print), args.target_cols, settings.formatter]
    folder, args.target_cols, formatter = world.main_first("prepare", work)
    if not os.path.isfile(os.path.join(folder, "meta.json")):
        raise UserError(f"rank {world.rank} finds no prepared data in {folder}: all nodes need the same --save-path "
                        "on a shared file system")
    data = PreparedData.open(folder)
    for line in prepare.report_lines(data.report):
        world.print(line)
    return data, BlockyFormatter.from_dict(formatter)


def _last_checkpoint(folder: str) -> dict:
    try:
        return model_io.own_checkpoint(os.path.join(folder, checkpoint.LAST))
    except UserError as error:
        others = checkpoint.others(folder)
        raise UserError(f"{error}\n  " + (f"Beside it lie {others}: copy one of them over {checkpoint.LAST} to go on from there."
                                          if others else "There is no other checkpoint; --overwrite starts anew.")) from None


def refuse_other_arguments(args: argparse.Namespace, state: dict) -> None:
    """Raises UserError where a resumed run is asked for with arguments that decide the result and differ."""
    different = checkpoint.differing_args(state["args"], vars(args), MAY_DIFFER_ON_RESUME)
    size = state["args"].get("model_size")
    if args.model_size not in (None, size):
        different.append(f"--model-size was {size!r}, now it is {args.model_size!r}")
    if args.num_epochs < state["args"]["num_epochs"]:
        different.append(f"--num-epochs was {state['args']['num_epochs']}, now it is {args.num_epochs}; only more can go on")
    if different:
        raise UserError("\n  ".join([f"{args.save_path} holds a run with other arguments:", *different,
                                     "Repeat them as they were, choose another folder, or start anew with --overwrite."]))
