"""How the house is built: imports point down, torch and numpy are enough, no file is too long to read."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = [ROOT / "finetune.py", ROOT / "train_mixer.py"]
PATHS = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in [*sorted((ROOT / "histocc").rglob("*.py")), *SCRIPTS]
}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in PATHS.items()}
EXAMPLES = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "examples").glob("*.py")]

# Rooms, the lowest first; a room imports those of lower levels, and itself.
LEVELS = [
    {"runtime"},
    {"text", "formatter", "lexicon", "logistic", "figure"},
    {"trainer", "model"},
    {"published", "plot"},
    {"data", "seq2seq_mixer_engine"},
    {"predict"},
    {"learn"},
    {"job"},
    {"evaluate", "review", "prepare", "doctor", "watch", "export"},
    {"occ_canine", "sample", "canine", "model_io"},
    {"estimator", "eval_metrics", "prediction_assets"},
    {"finetune", "train_mixer"},
    {"__main__"},
]
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}


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


def own_imports(tree: ast.AST) -> set[str]:
    """Modules of ours that are imported anywhere in a module: "histocc.text"."""
    found = set()
    for full in imports(tree):
        if full.split(".")[0] in ("histocc", "finetune", "train_mixer"):
            while full not in TREES:  # a name in a module
                full = full.rpartition(".")[0]
            found.add(full)
    return found - {"histocc"}  # the version


def room_of(module: str) -> str:
    name = module.removeprefix("histocc.")
    return name if name in LEVEL else name.split(".")[0]


def test_imports_only_point_down():
    graph = {name: own_imports(tree) for name, tree in TREES.items() if name != "histocc"}
    between = [(a, b) for a, others in graph.items() for b in others if room_of(a) != room_of(b)]
    assert ("histocc.data.dataset", "histocc.text") in between  # the search finds them
    assert [pair for pair in between if LEVEL[room_of(pair[0])] <= LEVEL[room_of(pair[1])]] == []
    assert {room_of(each) for tree in EXAMPLES for each in own_imports(tree)} <= {"runtime", "trainer"}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_torch_and_numpy_alone_at_module_level():
    allowed = sys.stdlib_module_names | {"torch", "numpy", "histocc"}
    found = {(name, full.split(".")[0]) for name, tree in TREES.items() for full in imports(tree, False)}
    assert {(name, package) for name, package in found if package not in allowed} == set()


def test_no_file_has_more_than_700_lines():
    lengths = {name: path.read_text(encoding="utf-8").count("\n") for name, path in PATHS.items()}
    assert {name: lines for name, lines in lengths.items() if lines > 700} == {}


# Most lines and files of a room. Whoever needs more changes the row in the same commit, and says why there.
SIZES = {
    "runtime": (2950, 13),
    "trainer": (2180, 10),
    "model": (2820, 14),
    "published": (745, 4),
    "data": (4640, 17),
    "predict": (2300, 10),
    "learn": (1100, 6),
    "job": (1390, 7),
    "evaluate": (1440, 5),
    "review": (2150, 7),
    "sample": (645, 5),
    "": (3020, 19),  # single files, and the lexicon
}


def test_no_room_is_larger_than_it_may_be():
    found = dict.fromkeys(SIZES, (0, 0))
    for path in (ROOT / "histocc").rglob("*.py"):
        room = path.relative_to(ROOT / "histocc").parts[0]
        room = room if room in SIZES else ""
        lines, files = found[room]
        found[room] = lines + path.read_text(encoding="utf-8").count("\n"), files + 1
    assert {
        room: size for room, size in found.items() if size[0] > SIZES[room][0] or size[1] > SIZES[room][1]
    } == {}


def test_commands_that_compute_nothing_start_without_torch():
    commands = ["watch", "plot", "prepare", "sample.__main__", "review.__main__", "__main__"]
    code = (
        "import sys, importlib\nfor name in sys.argv[1:]: importlib.import_module(name)\nprint(*sys.modules)"
    )
    line = [sys.executable, "-c", code, *(f"histocc.{name}" for name in commands)]
    loaded = subprocess.run(line, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    assert "histocc.data.prepare" in loaded
    assert {"torch", "histocc.model", "histocc.trainer.batches"}.isdisjoint(loaded)
