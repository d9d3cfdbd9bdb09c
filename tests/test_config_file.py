"""--config FILE: arguments from a file, under those of the command line."""

import json
import os

import pytest
from helpers import REPO, run_inside, write_rows

import finetune
import train_mixer
from histocc.runtime.errors import UserError

PARSE = finetune.get_args_parser().parse_args


def config(folder, text, name="run.toml"):
    (folder / name).write_text(text)
    return str(folder / name)


def test_values_of_every_kind(tmp_path):
    file = config(
        tmp_path,
        'dataset = "a.csv"\ntarget-cols = ["hisco_1", "hisco_2"]\nbatch_size = 7\nlearning_rate = 3e-4\nbf16'
        ' = true\noverwrite = false\nmissing_code = "-1"\nlanguage_col = "lang"\n',
    )
    args = PARSE(["--config", file])
    assert (
        args.dataset,
        args.target_cols,
        args.batch_size,
        args.learning_rate,
        args.bf16,
        args.overwrite,
        args.missing_code,
    ) == ("a.csv", ["hisco_1", "hisco_2"], 7, 3e-4, True, False, "-1")
    assert args.config == file and vars(args) | {"config": None} == vars(
        PARSE(
            [
                "--dataset",
                "a.csv",
                "--target-cols",
                "hisco_1",
                "hisco_2",
                "--batch-size",
                "7",
                "--learning-rate",
                "3e-4",
                "--bf16",
                "--missing-code=-1",
                "--language-col",
                "lang",
            ]
        )
    )


@pytest.mark.parametrize(
    "given", [["--config", "FILE", "--batch_size", "9"], ["--batch-size=9", "--config=FILE"]]
)
def test_the_command_line_wins(tmp_path, given):
    file = config(tmp_path, 'dataset = "a.csv"\nbatch_size = 7\ntarget_cols = ["a"]\n')
    args = PARSE([arg.replace("FILE", file) for arg in given] + ["--target-cols", "b"])
    assert args.batch_size == 9 and args.target_cols == ["b"]


@pytest.mark.parametrize(
    "text, said",
    [
        ("batchsize = 3\n", "'batchsize': there is no such flag; the nearest is 'batch_size'"),
        ('train_data = ["a"]\n', "'train_data': there is no such flag"),
        ("batch_size = [3]\n", "'batch_size': expected one value, not [3]"),
        ('target_cols = "hisco_1"\n', "'target_cols': expected a list, not \"hisco_1\""),
        ("bf16 = 1\n", "'bf16': expected true or false, not 1"),
        ("[training]\nbatch_size = 3\n", "'training': there is no such flag"),
        ("batch_size = \n", "cannot be read as TOML"),
        ('train_data = ["a"]\n', "'train_data': there is no such flag here, it is a flag of train_mixer.py"),
        (
            'target-col-naming = "a"\n',
            "'target-col-naming': there is no such flag here, it is a flag of train_mixer.py",
        ),
        ('config = "other.toml"\n', "'config': stands on a command line alone"),
        ("help = true\n", "'help': stands on a command line alone"),
        ("h = true\n", "'h': stands on a command line alone"),
        ("version = true\n", "'version': stands on a command line alone"),
        (
            'save_path = "a"\nsave-dir = "b"\n',
            "'save-dir': is the same flag as 'save_path': they are mutually exclusive",
        ),
        (
            "batch_size = 3\nbatch-size = 4\n",
            "'batch-size': is the same flag as 'batch_size': they are mutually exclusive",
        ),
        ('target_cols = ["a", ["b"]]\n', "'target_cols': expected texts or numbers in the list, not [\"b\"]"),
        ('target_cols = ["a", true]\n', "'target_cols': expected texts or numbers in the list, not true"),
        ("target_cols = [{a = 1}]\n", "'target_cols': expected texts or numbers in the list, not {\"a\": 1}"),
        ("wrong = 1\nalso = 2\n", "2 problems:\n  'wrong'"),
    ],
)
def test_what_cannot_be_is_said(tmp_path, text, said):
    with pytest.raises(UserError) as error:
        PARSE(["--dataset", "a.csv", "--config", config(tmp_path, text)])
    assert said in str(error.value)


def test_values_are_checked_as_on_the_command_line(tmp_path):
    with pytest.raises(UserError, match="batch-size"):
        PARSE(["--dataset", "a.csv", "--config", config(tmp_path, "batch_size = 0\n")])


@pytest.mark.parametrize(
    "name, content",
    [("none.toml", None), ("bad.json", "{"), ("list.json", "[1]"), ("latin.toml", b'a = "\xe9"')],
)
def test_a_file_that_is_none_is_said(tmp_path, name, content):
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=f"--config .*{name}"):
        PARSE(["--dataset", "a.csv", "--config", str(tmp_path / name)])


def test_the_arguments_of_a_run_start_the_same_one(tmp_path):
    first = train_mixer.get_args_parser().parse_args(
        [
            "--train-data",
            "a.csv",
            "b.csv",
            "--val-data",
            "v.csv",
            "--save-dir",
            "out",
            "--distributed",
            "--local-rank",
            "3",
            "--batch-size",
            "5",
            "--save-each-epoch",
            "--world-size",
            "2",
        ]
    )
    file = config(tmp_path, json.dumps(vars(first)), "args.json")
    again = train_mixer.get_args_parser().parse_args(["--config", file])
    assert vars(again) == vars(first) | {
        "distributed": False,
        "local_rank": None,
        "world_size": None,
        "config": file,
    }


def test_the_arguments_of_a_run_of_the_other_script_are_known_as_such(tmp_path):
    file = config(tmp_path, json.dumps(vars(PARSE(["--dataset", "a.csv"]))), "args.json")
    with pytest.raises(UserError) as error:
        train_mixer.get_args_parser().parse_args(
            ["--train-data", "a", "--val-data", "v", "--save-dir", "o", "--config", file]
        )
    assert str(error.value).splitlines()[1:] == [
        f"  '{name}': there is no such flag here, it is a flag of finetune.py"
        for name in ("dataset", "share_val")
    ]


def test_the_arguments_of_a_run_that_had_a_configuration_start_it_again(tmp_path):
    first = PARSE(["--config", config(tmp_path, 'dataset = "a.csv"\ntarget_cols = ["a", 1]\n')])
    assert first.target_cols == ["a", "1"]
    file = config(tmp_path, json.dumps(vars(first)), "args.json")
    assert vars(PARSE(["--config", file])) == vars(first) | {"config": file}


@pytest.mark.parametrize(
    "name, script, needed",
    [
        ("debug.toml", finetune, ["--dataset", "a.csv"]),
        ("debug.toml", train_mixer, ["--train-data", "a", "--val-data", "v", "--save-dir", "o"]),
        ("base.toml", finetune, ["--dataset", "a.csv"]),
        ("base.toml", train_mixer, ["--train-data", "a", "--val-data", "v", "--save-dir", "o"]),
    ],
)
def test_the_configurations_of_the_repository_fit_both_scripts(name, script, needed):
    args = script.get_args_parser().parse_args([*needed, "--config", str(REPO / "configs" / name)])
    assert args.model_size == name.removesuffix(".toml").replace("debug", "tiny")


def test_a_run_with_a_configuration(tmp_path):
    data = write_rows(tmp_path / "rows.csv", 40)
    file = config(
        tmp_path,
        f'dataset = "{data}"\ntarget_cols = ["hisco_1"]\nformatter = "hisco"\nprepare_only = true\ndevice ='
        ' "cpu"\n',
    )
    code, output = run_inside(finetune.main, "--config", file, "--save-path", tmp_path / "run")
    assert code == 0 and "40 read" in output


def test_a_flag_that_can_be_switched_off(tmp_path):
    for value, expected in (("true", True), ("false", False)):
        path = config(tmp_path, f'dataset = "a.csv"\nmemory_mask = {value}\n')
        assert finetune.get_args_parser().parse_args(["--config", str(path)]).memory_mask is expected


DEEP = 30_000


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("a.toml", b"x = " + b"[" * DEEP + b"]" * DEEP, "cannot be read as TOML: it is nested too deeply"),
        (
            "a.toml",
            b"x = " + b"{a = " * DEEP + b"1" + b"}" * DEEP,
            "cannot be read as TOML: it is nested too deeply",
        ),
        ("a.json", b'{"a": ' * DEEP + b"1" + b"}" * DEEP, "cannot be read as JSON: it is nested too deeply"),
        ("a.toml", b"batch_size" + b".a" * 1500 + b" = 1", "'batch_size': expected one value, not "),
        ("a.toml", b"batch_size = 0x" + b"f" * 5000, "'batch_size': the whole number is too large"),
        ("a.toml", b"batch_size = " + b"9" * 5000, "a number in it has thousands of digits"),
        ("a.json", b'{"batch_size": ' + b"9" * 5000 + b"}", "a number in it has thousands of digits"),
        (
            "a.toml",
            b"target_cols = [[0x" + b"f" * 5000 + b"]]",
            "'target_cols': expected texts or numbers in the list, not a list",
        ),
        ("a.toml", b"learning_rate = nan", "'learning_rate': expected a finite number, not nan"),
        ("a.json", b'{"learning_rate": NaN}', "'learning_rate': expected a finite number, not nan"),
        ("a.json", b'{"learning_rate": -Infinity}', "'learning_rate': expected a finite number, not -inf"),
        ("a.json", b'{"learning_rate": 1e999}', "'learning_rate': expected a finite number, not inf"),
        ("a.json", b'{"target_cols": ["a", Infinity]}', "'target_cols': expected a finite number, not inf"),
        (
            "a.json",
            b'{"batch_size": 3, "batch_size": 4}',
            "cannot be read as JSON: 'batch_size' is there twice",
        ),
        ("a.toml", b"batch_size = 3\nbatch_size = 4", "cannot be read as TOML: Cannot overwrite"),
        ("a.toml", b'language = "a\0b"', "cannot be read as TOML"),
        ("a.json", b'{"language": "a\0b"}', "cannot be read as JSON"),
        ("a.toml", b'language = "a\\u0000b"', "'language': \"a\\u0000b\" holds a NUL character"),
        (
            "a.json",
            b'{"dataset": "\\ud800"}',
            "'dataset': \"\\ud800\" holds a NUL character or half of a character",
        ),
        ("a.toml", b'a = 1\nlanguage = "\xff"', "line 2 is not UTF-8 (byte 0xff)"),
        ("a.json", b'{"language": "\xff"}', "line 1 is not UTF-8 (byte 0xff)"),
        ("a.toml", b" " * ((1 << 20) + 1), "is larger than 1,048,576 bytes"),
        ("a.toml", b"".join(b"x%d = 1\n" % i for i in range(50_000)), "… and 49,980 more"),
        ("a.toml", b"x" * 100_000 + b" = 1\n", "there is no such flag"),
        ("a.yaml", b"dataset: a.csv\n", "must be TOML, not YAML (docs/training.md"),
        ("a.toml", b"target_cols = 2020-01-01\n", "'target_cols': expected a list, not \"2020-01-01\""),
    ],
)
def test_any_content_gives_one_short_message(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        PARSE(["--dataset", "a.csv", "--config", str(tmp_path / name)])
    assert said in str(caught.value) and f"--config {tmp_path / name}: " in str(caught.value)
    assert len(str(caught.value)) < 5000 and "Traceback" not in str(caught.value)


def test_a_byte_order_mark_before_the_arguments(tmp_path):
    for name, content in (("a.toml", b"batch_size = 7\n"), ("a.json", b'{"batch_size": 7}')):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content)
        assert PARSE(["--dataset", "a.csv", "--config", str(tmp_path / name)]).batch_size == 7


@pytest.mark.parametrize("name", ["a.toml", "a.json", "a.yaml"])
def test_what_is_no_regular_file_is_said_at_once(tmp_path, name):
    os.mkfifo(tmp_path / name)
    os.mkdir(tmp_path / f"folder-{name}")
    for path, said in (
        (tmp_path / name, "is a pipe"),
        (tmp_path / f"folder-{name}", "is a folder"),
        ("a\0" + name, "is not the name of a file"),
        ("x" * 300 + name, "the name is too long"),
        (tmp_path / f"none-{name}", "no such file"),
    ):
        with pytest.raises(UserError, match=f"^--config .*{said}"):
            PARSE(["--dataset", "a.csv", "--config", str(path)])


def test_two_files_are_refused(tmp_path):
    files = [config(tmp_path, "seed = 7\n", name) for name in ("a.toml", "b.toml")]
    with pytest.raises(UserError, match="--config is given 2 times"):
        PARSE(["--config", files[0], "--config", files[1], "--dataset", "a.csv"])


@pytest.mark.parametrize("line", ["batch_size = 0", 'model_size = "huge"', "batch_size = 8.5"])
def test_a_value_that_cannot_be_names_the_file(tmp_path, line):
    file = config(tmp_path, line + "\n")
    with pytest.raises(UserError) as error:
        PARSE(["--config", file, "--dataset", "a.csv"])
    assert str(error.value).startswith(f"--config {file}: --{line.split(' ')[0].replace('_', '-')}: ")
    with pytest.raises(UserError) as error:  # of the command line
        PARSE(["--config", file, "--dataset", "a.csv", "--batch-size", "0", "--model-size", "vast"])
    assert str(error.value).startswith("argument --")
