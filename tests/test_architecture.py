"""How the house is built: imports point down, rooms stay small, and every flag does something."""

import ast
import graphlib
import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import finetune
import train_mixer
from histocc.job import flags
from histocc.job.settings import Settings
from histocc.model.mixer import MODEL_SIZES, NGRAMS, model_config
from histocc.runtime import arguments, errors

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {path.stem: path for path in (ROOT / "finetune.py", ROOT / "train_mixer.py")}
MODULES = {
    ".".join(path.relative_to(ROOT / "histocc").with_suffix("").parts): path
    for path in sorted((ROOT / "histocc").rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in {**MODULES, **SCRIPTS}.items()}

# Rooms, the lowest first; imports only point down, or stay in the room.
LEVELS = [
    {"text", "text_rules", "formatter", "runtime"},
    {"trainer", "model"},
    {"data", "seq2seq_mixer_engine"},
    {"job", "predict"},
    {"evaluate", "review", "prepare", "doctor", "watch", "plot", "export", "launch"},
    {
        "occ_canine",
        "sample",
        "compat",
        "canine",
        "model_io",
        "checkpoint",
        "eval_metrics",
        "prediction_assets",
    },
    set(SCRIPTS),
    {"__main__"},
]
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
# What a room must never import, though its level would allow it.
NEVER = {
    "runtime": set(LEVEL) - {"runtime"},
    "trainer": set(LEVEL) - {"trainer", "runtime"},
    "model": {"data"},
    "predict": {"trainer", "job"},
    "launch": set(LEVEL) - {"launch", "runtime"},
}


def imports(node: ast.AST, inside_functions: bool = True):
    """Full names of what is imported below `node`: "torch.nn", "histocc.text.encode"."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are written with their full names"
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif inside_functions or not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from imports(child, inside_functions)


def module_of(full: str) -> str:
    """The module of histocc that holds an imported name."""
    parts = full.split(".")[1:]
    while ".".join(parts) not in MODULES and ".".join([*parts, "__init__"]) not in MODULES:
        parts.pop()
    return ".".join(parts) if ".".join(parts) in MODULES else ".".join([*parts, "__init__"])


def own_imports(name: str) -> set[str]:
    """Modules of histocc that a module or script imports, anywhere in it."""
    return {module_of(full) for full in imports(TREES[name]) if full.split(".")[0] == "histocc"}


GRAPH = {name: own_imports(name) for name in TREES}


def room_of(name: str) -> str:
    return name.split(".")[0]


def arrows():
    """(module, imported module) from one room to another; the version in `histocc` itself is everybody's."""
    for name, others in GRAPH.items():
        for other in others:
            if room_of(other) not in ("__init__", room_of(name)):
                yield name, other


def test_every_module_is_in_a_room():
    assert {room_of(name) for name in TREES} == set(LEVEL) | {"__init__"}


def test_imports_only_point_down():
    assert len(list(arrows())) > 60 and ("data.dataset", "text") in set(arrows())  # the search finds them
    assert [pair for pair in arrows() if LEVEL[room_of(pair[1])] > LEVEL[room_of(pair[0])]] == []
    graphlib.TopologicalSorter(GRAPH).prepare()  # raises CycleError


def test_what_a_room_must_not_know():
    assert [(a, b) for a, b in arrows() if room_of(b) in NEVER.get(room_of(a), ())] == []


def test_examples_need_the_trainer_alone():
    """No occupations, no code of their own for training, and scripts that one reads in a minute."""
    files = sorted((ROOT / "examples").glob("*.py"))
    assert {"train_llada.py", "train_prs_med.py", "train_from_config.py"} <= {file.name for file in files}
    for file in files:
        content = file.read_text(encoding="utf-8")
        own = {full for full in imports(ast.parse(content)) if full.startswith("histocc.")}
        assert {full.split(".")[1] for full in own} <= {"runtime", "trainer"}, file.name
        assert not re.search(r"\.backward\(|torch\.distributed\.\w+\(|torch\.save", content), file.name
        assert len(content.splitlines()) <= (140 if file.name.startswith("train_") else 190), file.name


def test_the_map_names_every_file():
    """docs/architecture.md, and no file that is gone."""
    named = set(
        re.findall(r"`([a-z_]+/[a-z_0-9]+\.py)`", (ROOT / "docs" / "architecture.md").read_text("utf-8"))
    )
    rooms = {"runtime", "trainer", "model", "data", "job", "predict", "evaluate", "review", "launch"}
    files = {
        path.relative_to(ROOT / "histocc").as_posix()
        for room in rooms
        for path in (ROOT / "histocc" / room).glob("*.py")
    }
    assert named == {file for file in files if not file.endswith("__init__.py")}


def test_module_level_needs_torch_and_numpy_alone():
    allowed = sys.stdlib_module_names | {"torch", "numpy", "histocc"}
    assert [
        f"{name} imports {full}"
        for name, tree in TREES.items()
        for full in imports(tree, inside_functions=False)
        if full.split(".")[0] not in allowed
    ] == []


def test_nothing_imports_a_script():
    assert [
        name for name in MODULES if SCRIPTS.keys() & {full.split(".")[0] for full in imports(TREES[name])}
    ] == []


def test_one_module_knows_the_processes():
    """The launcher's variables, and collectives; another one knows how a model is wrapped."""

    def knows(tree) -> bool:
        return any(full.startswith("torch.distributed") for full in imports(tree)) or any(
            isinstance(node, ast.Constant)
            and node.value in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
            or isinstance(node, ast.Attribute)
            and ast.unparse(node) == "torch.distributed"
            for node in ast.walk(tree)
        )

    assert [name for name, tree in TREES.items() if knows(tree)] == [
        "runtime.groups",
        "runtime.launcher",
        "runtime.parallel",
        "runtime.reduction",
        "runtime.world",
    ]
    assert {full for full in imports(TREES["runtime.parallel"]) if full.startswith("torch.distributed")} == {
        "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook",
        "torch.distributed.device_mesh.init_device_mesh",
        "torch.distributed.fsdp.fully_shard",
        "torch.distributed.tensor.distribute_tensor",
    }


def is_table_of_flags(name: str) -> bool:
    return bool(re.fullmatch(r"add_\w+_arguments|get_args_parser", name.rpartition(".")[2]))


# The job itself, from model to last checkpoint, reads top to bottom in one function.
ONE_PAGE = {"trainer.run.train": 80}
# Signatures of published programs.
PUBLISHED_SIGNATURES = {
    "model.mixer.Seq2SeqMixerOccCANINE.__init__",
    "occ_canine.OccCANINE.__init__",
    "occ_canine.OccCANINE.predict",
    "seq2seq_mixer_engine.train",
    "seq2seq_mixer_engine.train_one_epoch",
}


def functions_of_modules() -> dict[str, ast.FunctionDef]:
    """By module, classes and functions around it, and name."""
    found = {}

    def look(node: ast.AST, inside: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = f"{inside}.{child.name}" if hasattr(child, "name") and hasattr(child, "body") else inside
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found[name] = child
            look(child, name)

    for module, tree in TREES.items():
        look(tree, module)
    return found


def lines_of_code(function: ast.FunctionDef) -> int:
    """Without the docstring."""
    return function.end_lineno - function.lineno + 1 - docstring_lines(function)


def docstring_lines(function: ast.FunctionDef) -> int:
    return function.body[0].end_lineno - function.body[0].lineno + 1 if ast.get_docstring(function) else 0


def test_no_function_takes_many_parameters():
    many = {}
    for name, function in functions_of_modules().items():
        given = function.args
        names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
        count = len(names) - (names[:1] in (["self"], ["cls"]))
        if count > 8 and name not in PUBLISHED_SIGNATURES:
            many[name] = count
    assert many == {}


def test_no_room_is_too_large():
    lengths = {
        name: len(path.read_text(encoding="utf-8").splitlines())
        for name, path in {**MODULES, **SCRIPTS}.items()
    }
    functions = {name: lines_of_code(function) for name, function in functions_of_modules().items()}
    assert {name: lines for name, lines in lengths.items() if lines > 680} == {}
    assert {
        name: lines
        for name, lines in functions.items()
        if lines > ONE_PAGE.get(name, 60) and not is_table_of_flags(name)
    } == {}


def test_nothing_is_put_off():
    places = [
        path
        for pattern in ("*", "histocc/**/*", "scripts/*", "tests/*", "benchmarks/*", "configs/*", ".ci/*")
        for path in ROOT.glob(pattern)
    ]
    texts = {
        path: path.read_text(encoding="utf-8")
        for path in places
        if path.is_file() and (path.suffix in (".py", ".sh", ".md", ".toml") or path.name == "run")
    }
    assert len(texts) > 30
    assert [str(path) for path, text in texts.items() if re.search("TO[D]O|FIX[M]E", text)] == []


# ---- flags

PARSERS = {"finetune": finetune.get_args_parser, "train_mixer": train_mixer.get_args_parser}
REQUIRED = {
    "finetune": ["--dataset", "a.csv"],
    "train_mixer": ["--train-data", "a.csv", "--val-data", "v.csv", "--save-dir", "out"],
}

# dest: default. Flags are the dest with hyphens, and what OTHER_NAMES adds.
BOTH = {
    "save_each_epoch": False,
    "mtbf_hours": None,
    "keep_checkpoints": 3,
    "overwrite": False,
    "log_interval": 100,
    "eval_interval": 1000,
    "log_wandb": False,
    "wandb_project_name": None,
    "tensorboard": False,
    "config": None,
    "input_col": "occ1",
    "target_cols": None,
    "language": "unk",
    "language_col": None,
    "block_size": 5,
    "use_within_block_sep": False,
    "allow_codes_shorter_than_block_size": False,
    "drop_bad_labels": False,
    "missing_code": None,
    "key": None,
    "all_codes_file": None,
    "all_codes_col": None,
    "max_len": 128,
    "prepare_only": False,
    "delimiter": None,
    "include_descriptions": False,
    "description_prob": 0.5,
    "description_template": "{occ} [DESC: {desc}]",
    "descriptions_file": None,
    "descriptions_code_col": None,
    "descriptions_text_col": None,
    "descriptions_lang_col": None,
    "num_transformations": 3,
    "augmentation_prob": 0.3,
    "join_rows": 0.0,
    "unk_lang_prob": 0.25,
    "fn_word_freq": None,
    "num_workers": 0,
    "prefetch_factor": None,
    "pin_memory": False,
    "persistent_workers": False,
    "model_size": None,
    "initial_checkpoint": None,
    "only_encoder": False,
    "memory_mask": None,
    "clean_text": None,
    "initial_key": None,
    "published_target_mask": False,
    "shrink_key": False,
    "freeze_encoder": False,
    "dropout": 0.0,
    "encoder_dropout": 0.1,
    "ngram_dropout": 0.3,
    "decoder_dim_feedforward": None,
    "teacher": None,
    "unlabelled": None,
    "distillation_weight": 0.5,
    "distillation_temperature": 1.0,
    "accumulate_steps": 1,
    "global_batch_size": None,
    "length_groups": None,
    "learning_rate": None,
    "lr_scaling": "none",
    "warmup_pct": 0.05,
    "warmup_steps": None,
    "schedule_steps": None,
    "max_steps": None,
    "stop_after": None,
    "max_bad_steps": 20,
    "check_replicas_every": 1000,
    "weight_decay": 0.01,
    "linear_lr_factor": None,
    "seed": 42,
    "eval_only": False,
    "dry_run": False,
    "device": "auto",
    "distributed": False,
    "local_rank": None,
    "world_size": None,
    "timeout_minutes": 30.0,
    "parallel": "ddp",
    "reduce": "after",
    "gradient_compression": "none",
    "shares": "equal",
    "processes": None,
    "link_gbit": None,
    "sync_every": 1,
    "sync_group": "node",
    "sync_start": None,
    "sync_compression": "bf16",
    "outer_learning_rate": 0.7,
    "outer_momentum": 0.9,
    "block_loss": None,
    "many_codes_weight": 1.0,
    "empty_blocks": None,
    "linear_loss": None,
    "ngrams": "auto",
    "ngram_passes": 10,
    "float64": False,
    "use_amp": False,
    "fp16": False,
    "no_fp16": False,
    "bf16": False,
    "compile": False,
    "profile": None,
    "quiet": False,
}
DEFAULTS = {
    "finetune": (
        BOTH
        | {
            "dataset": None,
            "save_path": "./Finetuned/",
            "save_interval": 1000,
            "formatter": "gpf",
            "share_val": 0.1,
            "num_epochs": 5,
            "batch_size": 128,
            "seq2seq_weight": 0.1,
        }
    ),
    "train_mixer": (
        BOTH
        | {
            "train_data": None,
            "val_data": None,
            "save_path": None,
            "save_interval": 5000,
            "formatter": "hisco",
            "target_col_naming": "hisco",
            "num_epochs": 50,
            "batch_size": 512,
            "seq2seq_weight": 0.5,
        }
    ),
}
OTHER_NAMES = {
    "dataset": {"--data-dir", "--data-root"},
    "train_data": {"--data-dir", "--data-root"},
    "save_path": {"--save-dir", "--checkpoint-dir"},
    "num_epochs": {"--epochs"},
    "initial_checkpoint": {"--model-name"},
    "memory_mask": {"--no-memory-mask"},
}
CHOICES = {
    "clean_text": ("as-is", "ascii-lower"),
    "block_loss": ("best-fit", "one-to-one"),
    "linear_loss": ("mean", "rows"),
    "empty_blocks": ("all", "first"),
    "formatter": ("gpf", "hisco", "occ1950"),
    "model_size": ("tiny", "small", "base", "ngrams"),
    "lr_scaling": ("none", "linear", "sqrt"),
    "parallel": ("ddp", "fsdp"),
    "reduce": ("after", "during"),
    "gradient_compression": ("none", "bf16"),
    "sync_group": ("node", "process"),
    "sync_compression": ("bf16", "none"),
}
SEVERAL = {"unlabelled", "processes", "target_cols", "train_data", "val_data"}


def actions(script: str) -> list:
    return [action for action in PARSERS[script]()._actions if action.dest not in ("help", "version")]


@pytest.mark.parametrize("script", PARSERS)
def test_flags_and_defaults_stay(script):
    found = actions(script)
    assert {action.dest: action.default for action in found} == DEFAULTS[script]
    for action in found:
        assert set(action.option_strings) == {arguments.flag(action.dest)} | OTHER_NAMES.get(
            action.dest, set()
        )
        assert action.choices == CHOICES.get(action.dest) and (action.nargs == "+") == (
            action.dest in SEVERAL
        )
    assert {action.dest for action in found if action.required} == {
        "finetune": {"dataset"},
        "train_mixer": {"train_data", "val_data", "save_path"},
    }[script]


@pytest.mark.parametrize("script", PARSERS)
def test_flags_are_spelled_with_hyphens_or_underscores(script):
    parser = PARSERS[script]()
    for action in actions(script):
        value = [] if action.nargs == 0 else [action.choices[-1]] if action.choices else ["7"]
        if action.dest == "config":
            value = [str(ROOT / "configs" / "debug.toml")]
        for flag in action.option_strings:
            spelled = "--" + flag[2:].replace("-", "_")
            ways = [[flag, *value], [spelled, *value], *([[f"{spelled}={value[0]}"]] if value else [])]
            results = [vars(parser.parse_args([*REQUIRED[script], *way])) for way in ways]
            assert (
                all(result == results[0] for result in results) and results[0][action.dest] != action.default
            )


@pytest.mark.parametrize("script", PARSERS)
def test_values_keep_their_underscores_and_signs(script):
    args = PARSERS[script]().parse_args(
        [
            *REQUIRED[script],
            "--save_path=my_out/_x",
            "--target_cols",
            "hisco_1",
            "hisco_2",
            "--missing_code",
            "-1",
        ]
    )
    assert (args.save_path, args.target_cols, args.missing_code) == (
        "my_out/_x",
        ["hisco_1", "hisco_2"],
        "-1",
    )


@pytest.mark.parametrize("script", PARSERS)
def test_help_names_every_flag(script):
    text = PARSERS[script]().format_help()
    assert all(flag in text for action in actions(script) for flag in action.option_strings) and all(
        action.help for action in actions(script)
    )


WITHOUT_A_VALUE = {
    "prefetch_factor",
    "global_batch_size",
    "max_steps",
    "stop_after",
    "mtbf_hours",
    "profile",
    "missing_code",
    "language_col",
    "warmup_steps",
    "key",
}


@pytest.mark.parametrize("script", PARSERS)
def test_help_says_what_comes_of_a_flag_that_is_not_given(script):
    helps = {action.dest: action.help for action in actions(script)}
    assert [
        dest
        for dest in WITHOUT_A_VALUE
        if "(default: " not in helps[dest] and "without it" not in helps[dest]
    ] == []
    assert [dest for dest, text in helps.items() if text.startswith("…") or text.endswith("…")] == []


def test_help_says_how_large_the_models_are():
    text = {action.dest: action.help for action in actions("finetune")}["model_size"]
    sizes = {name: model_config(name) for name in MODEL_SIZES}
    places = [
        text.index(
            f"{name} {'is ' * (name == 'tiny')}{config.hidden_size} {'wide ' * (name == 'tiny')}with"
            f" {config.num_hidden_layers}"
        )
        for name, config in sizes.items()
        if name != NGRAMS
    ]
    assert places == sorted(places) and len(places) == 3 and text.index("ngrams has no encoder") > places[-1]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--learning-rat", "1"],
        ["--batch-size", "0"],
        ["--num-epochs", "1.5"],
        ["--formatter", "x"],
        ["--seed"],
    ],
)
def test_a_mistake_in_the_arguments_is_the_users(arguments):
    with pytest.raises(errors.UserError, match="finetune.py --help"):
        finetune.get_args_parser().parse_args([*REQUIRED["finetune"], *arguments])


def test_every_flag_is_read():
    """From the arguments, or from settings, whose fields have the names of the flags."""
    holders = {"args", "asked", "settings", "decided", "self"} | {each.name for each in fields(Settings)}
    read = set()
    for node in (node for tree in TREES.values() for node in ast.walk(tree)):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Load)
            and ast.unparse(node.value).rpartition(".")[2] in holders
        ):
            read.add(node.attr)
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) == "getattr"
            and ast.unparse(node.args[0]) == "args"
        ):
            read.update(
                getattr(argument, "value", None)
                for argument in node.args[1:2]
                if isinstance(argument, ast.Constant)
            )
    assert sorted({dest for script in PARSERS for dest in DEFAULTS[script]} - read) == []


def test_tables_of_flags_name_flags():
    everything = set(DEFAULTS["finetune"]) | set(DEFAULTS["train_mixer"])
    assert flags.resumable_flags() <= everything


def test_flags_of_one_script_are_known():
    names = {
        f"{script}.py": {
            name.lstrip("-").replace("-", "_")
            for action in actions(script)
            for name in (action.dest, *action.option_strings)
        }
        for script in PARSERS
    }
    assert flags.FLAGS_OF_ONE_SCRIPT == {
        script: own.difference(*(names[other] for other in names if other != script))
        for script, own in names.items()
    }


@pytest.mark.parametrize("script", PARSERS)
def test_the_least_arguments_are_sound(script):
    assert flags.argument_problems(PARSERS[script]().parse_args(REQUIRED[script])) == []


# ---- the contracts, and the tests that hold them


def table_of_contracts() -> dict[str, tuple[str, str]]:
    """contract → (default test, full test), as file::function, of tests/README.md."""
    text = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| ([\w -]+) \| `([\w/.:]+)` \| `([\w/.:]+)` \|$", text, re.M)
    return {name: (default, full) for name, default, full in found}


def marks_of(test: str) -> list[str]:
    """Names of the marks on a test, and on its class; raises where there is no such test."""
    file, name = test.split("::")
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    for holder in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]:
        for node in holder.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                both = [*node.decorator_list, *getattr(holder, "decorator_list", [])]
                return [ast.unparse(each) for each in both]
    raise AssertionError(f"{test}: there is no such test")


def test_every_contract_has_its_tests():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    contracts = re.findall(r"^- \*\*([^*]+)\*\*:", text, re.M)
    assert len(contracts) > 20 and sorted(contracts) == sorted(table_of_contracts())
    for default, full in table_of_contracts().values():
        assert default != full and "pytest.mark.full" not in marks_of(default), default
        marks_of(full)
