"""Flags: from the command line, from a file, from a call, and on resume."""

import json
import re

import pytest
from helpers import REPO, TINY, run_here, write_rows

import finetune
import train_mixer
from histocc import prepare
from histocc.evaluate import __main__ as evaluate
from histocc.job.config import FinetuneConfig, refuse_on_resume
from histocc.predict import __main__ as predict
from histocc.published import models
from histocc.review import __main__ as review
from histocc.runtime.checkpoint import made_by
from histocc.runtime.config import declarations, flag_of
from histocc.runtime.errors import UserError

PARSE, PARSE_MIXER = (script.get_args_parser().parse_args for script in (finetune, train_mixer))
CODED = (finetune, train_mixer, evaluate, prepare)  # read coded tables
FILES = ["--train-data", "a.csv", "b.csv", "--val-data", "v.csv", "--save-dir", "out"]


def config(folder, text, name="run.toml"):
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(folder / name)


def refused(*argv):
    with pytest.raises(UserError) as error:
        PARSE(["--dataset", "a.csv", *argv])
    assert len(str(error.value)) < 5000
    return str(error.value)


def test_a_file_says_what_the_command_line_says(tmp_path):
    file = config(
        tmp_path,
        '\ufeffdataset = "a.csv"\ntarget-cols = ["hisco_1", "hisco_2"]\nbatch_size = 7\n'
        "learning_rate = 3e-4\n"
        'bf16 = true\noverwrite = false\nmemory_mask = false\nmissing_code = "-1"\nlanguage_col = "lang"\n',
    )
    line = (
        "--dataset a.csv --target-cols hisco_1 hisco_2 --batch-size 7 --learning-rate 3e-4 --bf16"
        " --no-memory-mask --missing-code=-1 --language-col lang"
    )
    args = PARSE(["--config", file])
    assert args.values() == PARSE(line.split()).values() | {"config": file}
    assert args.bf16 and args.batch_size == 7 and args.memory_mask is False
    fits_both = ["--config", str(REPO / "configs" / "published_size.toml")]
    assert PARSE(["--dataset", "a.csv", *fits_both]).model_size == "base"
    assert PARSE_MIXER([*FILES, *fits_both]).model_size == "base"


def test_the_command_line_wins_and_switches_off(tmp_path):
    file = config(
        tmp_path,
        'dataset = "a.csv"\nbatch_size = 7\ntarget_cols = ["a"]\nbf16 = true\nfp16 = true\n'
        "save_each_epoch = true\nmemory_mask = true\noverwrite = true\n",
    )
    off = ["--no-bf16", "--no_fp16", "--no-save-each-epoch", "--no-memory-mask", "--no-overwrite"]
    for given in (["--config", file, "--batch_size", "9"], ["--batch-size=9", f"--config={file}"]):
        args = PARSE([*given, "--target-cols", "b", *off])
        assert args.batch_size == 9 and args.target_cols == ["b"] and args.memory_mask is False
        assert not (args.bf16 or args.fp16 or args.save_each_epoch or args.overwrite)
    assert PARSE(["--config", file]).bf16
    assert "--config is given twice" in refused("--config", file, f"--config={file}")
    assert "--no-bf16" not in finetune.get_args_parser().format_help()


def test_the_arguments_of_a_run_start_the_same_one(tmp_path):
    of_process = ["--distributed", "--local-rank", "3", "--world-size", "2", "--no-fp16"]
    first = PARSE_MIXER([*FILES, *of_process, "--batch-size", "auto", "--save-each-epoch"])
    of_before = {"teacher": None, "unlabeled": None}  # flags that were removed
    values = {**first.values(), **of_before, "made_by": made_by()}
    file = config(tmp_path, json.dumps(values), "args.json")
    left_out = {"distributed": False, "local_rank": None, "world_size": None}
    assert PARSE_MIXER(["--config", file]).values() == first.values() | left_out | {"config": file}
    assert "'train_data': there is no such flag" in refused("--config", file)


def test_a_flag_has_its_names_in_every_command():
    for command in (finetune, train_mixer, prepare, predict, evaluate, review):
        named = command.get_args_parser().named
        assert named["input_col"] is named["column"] and named["language_col"] is named["language_column"]
        assert named.get("dataset") is named.get("data") and ("data" in named) == (command in CODED)


def test_help_shows_the_usual_flags_and_all_of_them_if_asked(capsys):
    shown = {}
    for name in ("", "all"):
        with pytest.raises(SystemExit, match="0"):
            finetune.get_args_parser().parse_args(["--help", *filter(None, [name])])
        shown[name] = set(re.findall(r"^  (--[a-z0-9-]+)", capsys.readouterr().out, re.M))
    assert {"--input-col", "--bf16", "--overwrite"} < shown[""] and len(shown[""]) < 20
    every = {flag_of(name) for name in declarations(FinetuneConfig)} - {"--dataset"}  # the table comes first
    assert every == shown["all"] and len(every) > 90


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("a.toml", "bacth_size = 3", "'bacth_size': there is no such flag; did you mean batch_size?"),
        ("a.toml", "deterministic = true", "there is no such flag; leave it out: equal seeds give"),
        ("args.json", '{"teacher": "./run"}', "there is no such flag; code the texts with that model"),
        ("a.yaml", "batch_size: 3", "TOML and JSON are read. Convert it: python -c"),
        ("a.toml", "wrong = 1\nalso = 2", "2 problems:\n  'wrong'"),
        ("a.toml", "batch_size = [3]", "'batch_size': expected a text or a number, not [3]"),
        ("a.toml", "batch_size = 0", "'batch_size': '0' is not a whole number of at least 1"),
        ("a.toml", 'model_size = "huge"', "'model_size': expected one of auto, tiny, small, base, ngrams"),
        ("a.toml", 'save_path = "a"\nsave-dir = "b"', "'save-dir': is given already, by another name"),
        ("a.toml", "target_cols = [{a = 1}]", "'target_cols': expected a text or a number, not {'a': 1}"),
        ("a.toml", "bf16 = 1", "'bf16': expected true or false, not 1"),
        ("a.toml", 'config = "other.toml"', "'config': there is no such flag"),
        ("a.json", '{"a": ' * 30_000 + "1" + "}" * 30_000, "cannot be read as JSON"),
        ("a.json", "[1]", "is not the args.json of a run"),
        ("a.toml", "batch_size = ", "cannot be read as TOML"),
        ("a.toml", b'a = 1\nlanguage = "\xff"', "can't decode byte 0xff in position 18"),
        ("a.toml", "".join(f"x{i} = 1\n" for i in range(5_000)), "… and 4,980 more"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else None,
)
def test_any_content_gives_one_short_message(tmp_path, name, content, said):
    file = config(tmp_path, content, name)
    message = refused("--config", file)
    assert said in message and f"--config {file}: " in message


def test_an_odd_value_of_any_flag_is_taken_or_refused_in_one_message():
    """Two outcomes: what argparse and `problems` take, or a UserError that names the flag."""
    parser, refusals = finetune.get_args_parser(), 0
    for action in parser._actions:
        if action.nargs == 0 or action.dest == "help" or not action.option_strings:
            continue
        for value in ("-1", "0", "nan", "1e400", "", "abc"):
            name = action.option_strings[0]
            try:
                list(parser.parse_args(["--dataset", "a.csv", f"{name}={value}"]).problems())
            except UserError as error:
                refusals += 1
                assert name in str(error) and len(str(error)) < 400, error
    assert refusals > 200


def test_what_the_run_decided_is_no_other_argument_on_resume(tmp_path):
    """Given at their decided values they change nothing; others are named, unless they decide no result."""
    flags = ["--dataset", write_rows(tmp_path / "rows.csv", 40), "--batch-size", 8, "--num-epochs", 2, *TINY]
    flags += ["--save-path", tmp_path / "run", "--max-steps", 1]
    run_here(finetune.main, *flags)
    state = models.load_run(str(tmp_path / "run" / "last.bin"))
    found = {name: state["args"][name] for name in ("formatter", "target_cols", "language", "language_col")}

    def differing(*more):
        try:
            args = PARSE([*map(str, flags), *map(str, more)])
            columns = {name: getattr(args, name) or value for name, value in found.items()}
            refuse_on_resume(args.with_decided(**columns), state)
        except UserError as error:
            return str(error)
        return ""

    for name, decided, other in (
        ("--learning-rate", 1e-3, 1e-2),
        ("--warmup-steps", 0, 1),
        ("--linear-loss", "rows", "mean"),
        ("--formatter", "hisco", "occ1950"),
        ("--clean-text", "as-is", "ascii-lower"),
        ("--model-size", "tiny", "small"),
    ):
        assert differing(name, decided) == "" and f"{name} was " in differing(name, other)
    assert differing("--memory-mask") == "" and "--memory-mask was " in differing("--no-memory-mask")
    for more in (["--dropout", 0.1], ["--seed", 7], ["--share-val", 0.2]):
        assert f"{more[0]} was " in differing(*more)
    for more in (["--log-interval", 5], ["--no-log-wandb"], ["--bf16"], ["--num-epochs", 3]):
        assert differing(*more) == ""
    assert "--num-epochs was 2, now it is 1" in differing("--num-epochs", 1)
    state["args"]["warmup_steps"] = 0  # as decided, by one that was resumed with the flag
    assert differing() == "" and "--warmup-steps was 0, now it is 1" in differing("--warmup-steps", 1)
