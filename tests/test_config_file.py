"""--config FILE: arguments from a file, under those of the command line."""

import json
import os

import pytest
from helpers import REPO, run_inside, write_rows

import finetune
import train_mixer
from histocc.runtime.errors import UserError

PARSE, PARSE_MIXER = (script.get_args_parser().parse_args for script in (finetune, train_mixer))
FILES = ["--train-data", "a.csv", "b.csv", "--val-data", "v.csv", "--save-dir", "out"]


def config(folder, text, name="run.toml"):
    (folder / name).write_text(text)
    return str(folder / name)


def refused(*argv):
    with pytest.raises(UserError) as error:
        PARSE(["--dataset", "a.csv", *argv])
    return str(error.value)


def test_values_of_every_kind(tmp_path):
    file = config(
        tmp_path,
        'dataset = "a.csv"\ntarget-cols = ["hisco_1", "hisco_2"]\nbatch_size = 7\nlearning_rate = 3e-4\n'
        'bf16 = true\noverwrite = false\nmemory_mask = false\nmissing_code = "-1"\nlanguage_col = "lang"\n',
    )
    line = (
        "--dataset a.csv --target-cols hisco_1 hisco_2 --batch-size 7 --learning-rate 3e-4 --bf16"
        " --no-memory-mask --missing-code=-1 --language-col lang"
    )
    args = vars(PARSE(["--config", file]))
    assert args == vars(PARSE(line.split())) | {"config": file} and args["bf16"] and args["batch_size"] == 7


@pytest.mark.parametrize(
    "given", [["--config", "FILE", "--batch_size", "9"], ["--batch-size=9", "--config=FILE"]]
)
def test_the_command_line_wins(tmp_path, given):
    file = config(tmp_path, 'dataset = "a.csv"\nbatch_size = 7\ntarget_cols = ["a"]\n')
    args = PARSE([arg.replace("FILE", file) for arg in given] + ["--target-cols", "b"])
    assert args.batch_size == 9 and args.target_cols == ["b"]


def test_the_arguments_of_a_run_start_the_same_one(tmp_path):
    of_process = ["--distributed", "--local-rank", "3", "--world-size", "2"]
    first = PARSE_MIXER([*FILES, *of_process, "--batch-size", "5", "--save-each-epoch"])
    file = config(tmp_path, json.dumps(vars(first)), "args.json")
    left_out = {"distributed": False, "local_rank": None, "world_size": None}
    assert vars(PARSE_MIXER(["--config", file])) == vars(first) | left_out | {"config": file}
    first = PARSE(["--config", config(tmp_path, 'dataset = "a.csv"\ntarget_cols = ["a", 1]\n')])
    assert first.target_cols == ["a", "1"]
    file = config(tmp_path, json.dumps(vars(first)), "args.json")
    assert vars(PARSE(["--config", file])) == vars(first) | {"config": file}


def test_the_arguments_of_a_run_of_the_other_script_are_known_as_such(tmp_path):
    for parse, required, first, other, names in (
        (PARSE_MIXER, FILES, PARSE(["--dataset", "a.csv"]), "finetune.py", ["dataset", "share_val"]),
        (
            PARSE,
            ["--dataset", "a.csv"],
            PARSE_MIXER(FILES),
            "train_mixer.py",
            ["target_col_naming", "train_data", "val_data"],
        ),
    ):
        with pytest.raises(UserError) as error:
            parse([*required, "--config", config(tmp_path, json.dumps(vars(first)), "args.json")])
        expected = [f"  '{name}': there is no such flag here, it is a flag of {other}" for name in names]
        assert sorted(str(error.value).splitlines()[1:]) == expected


@pytest.mark.parametrize("name, size", [("debug.toml", "tiny"), ("base.toml", "base")])
def test_the_configurations_of_the_repository_fit_both_scripts(name, size):
    for parse, needed in ((PARSE, ["--dataset", "a.csv"]), (PARSE_MIXER, FILES)):
        assert parse([*needed, "--config", str(REPO / "configs" / name)]).model_size == size


def test_a_run_with_a_configuration(tmp_path):
    data = write_rows(tmp_path / "rows.csv", 40)
    text = f'dataset = "{data}"\ntarget_cols = ["hisco_1"]\nformatter = "hisco"\nprepare_only = true\n'
    file = config(tmp_path, text + 'device = "cpu"\n')
    code, output = run_inside(finetune.main, "--config", file, "--save-path", tmp_path / "run")
    assert code == 0 and "40 read" in output


DEEP = 30_000


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("a.toml", "batchsize = 3", "'batchsize': there is no such flag; the nearest is 'batch_size'"),
        ("a.toml", "[training]\nbatch_size = 3", "'training': there is no such flag"),
        ("a.toml", 'train_data = ["a"]', "no such flag here, it is a flag of train_mixer.py"),
        ("a.toml", "wrong = 1\nalso = 2", "2 problems:\n  'wrong'"),
        ("a.toml", "batch_size = [3]", "'batch_size': expected one value, not [3]"),
        ("a.toml", "batch_size = ", "cannot be read as TOML"),
        ("a.toml", "batch_size = 3\nbatch-size = 4", "'batch-size': is the same flag as 'batch_size'"),
        ("a.toml", 'save_path = "a"\nsave-dir = "b"', "'save-dir': is the same flag as 'save_path'"),
        ("a.toml", 'target_cols = "hisco_1"', "'target_cols': expected a list, not \"hisco_1\""),
        ("a.toml", "target_cols = [{a = 1}]", 'expected texts or numbers in the list, not {"a": 1}'),
        ("a.toml", "bf16 = 1", "'bf16': expected true or false, not 1"),
        ("a.toml", 'config = "other.toml"', "'config': stands on a command line alone"),
        ("a.toml", "version = true", "'version': stands on a command line alone"),
        ("a.toml", "x = " + "[" * DEEP + "]" * DEEP, "cannot be read as TOML: it is nested too deeply"),
        ("a.json", '{"a": ' * DEEP + "1" + "}" * DEEP, "cannot be read as JSON: it is nested too deeply"),
        ("a.toml", "batch_size = 0x" + "f" * 5000, "'batch_size': the whole number is too large"),
        ("a.json", '{"batch_size": ' + "9" * 5000 + "}", "a number in it has thousands of digits"),
        ("a.toml", "learning_rate = nan", "'learning_rate': expected a finite number, not nan"),
        ("a.json", '{"learning_rate": 1e999}', "'learning_rate': expected a finite number, not inf"),
        ("a.json", '{"batch_size": 3, "batch_size": 4}', "'batch_size' is there twice"),
        ("a.json", "[1]", "is not the args.json of a run"),
        ("a.json", "{", "cannot be read as JSON"),
        ("a.toml", 'language = "a\\u0000b"', "'language': \"a\\u0000b\" holds a NUL character"),
        ("a.json", '{"dataset": "\\ud800"}', "holds a NUL character or half of a character"),
        ("a.toml", b'a = 1\nlanguage = "\xff"', "line 2 is not UTF-8 (byte 0xff)"),
        ("a.toml", " " * ((1 << 20) + 1), "is larger than 1,048,576 bytes"),
        ("a.toml", "".join(f"x{i} = 1\n" for i in range(50_000)), "… and 49,980 more"),
        ("a.toml", "x" * 100_000 + " = 1\n", "there is no such flag"),
        ("a.yaml", "dataset: a.csv\n", "must be TOML, not YAML (docs/training.md"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else None,
)
def test_any_content_gives_one_short_message(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    message = refused("--config", str(tmp_path / name))
    assert said in message and f"--config {tmp_path / name}: " in message and len(message) < 5000


def test_a_byte_order_mark_before_the_arguments(tmp_path):
    for name, content in (("a.toml", b"batch_size = 7\n"), ("a.json", b'{"batch_size": 7}')):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content)
        assert PARSE(["--dataset", "a.csv", "--config", str(tmp_path / name)]).batch_size == 7


def test_what_is_no_regular_file_is_said_at_once(tmp_path):
    os.mkfifo(tmp_path / "a.toml")
    for path, said in (
        (tmp_path / "a.toml", "is a pipe"),
        (tmp_path, "is a folder"),
        ("a\0.toml", "is not the name of a file"),
        ("x" * 300, "the name is too long"),
        (tmp_path / "none.toml", "no such file"),
    ):
        message = refused("--config", str(path))
        assert message.startswith("--config ") and said in message


def test_two_files_are_refused(tmp_path):
    files = [config(tmp_path, "seed = 7\n", name) for name in ("a.toml", "b.toml")]
    assert "--config is given 2 times" in refused("--config", files[0], "--config", files[1])


@pytest.mark.parametrize("line", ["batch_size = 0", 'model_size = "huge"', "batch_size = 8.5"])
def test_a_value_that_cannot_be_names_the_file(tmp_path, line):
    file = config(tmp_path, line + "\n")
    flag = line.split(" ")[0].replace("_", "-")
    assert refused("--config", file).startswith(f"--config {file}: --{flag}: ")
    of_the_line = ["--batch-size", "0", "--model-size", "vast"]
    assert refused("--config", file, *of_the_line).startswith("argument --")
