"""How the house is built: imports point down, torch and numpy are enough, no file is too long to read."""

import ast
import graphlib
import re
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
    "runtime": (3085, 13),
    "trainer": (2210, 10),
    "model": (2820, 14),
    "published": (760, 4),
    "data": (4660, 17),
    "predict": (2355, 10),
    "learn": (1105, 6),
    "job": (1440, 7),
    "evaluate": (1490, 5),
    "review": (2250, 7),
    "sample": (765, 6),
    "": (3140, 19),  # single files, and the lexicon
}


def test_no_room_is_larger_than_it_may_be():
    found = dict.fromkeys(SIZES, (0, 0))
    for path in (ROOT / "histocc").rglob("*.py"):
        room = path.relative_to(ROOT / "histocc").parts[0]
        room = room if room in SIZES else ""
        lines, files = found[room]
        found[room] = lines + path.read_text(encoding="utf-8").count("\n"), files + 1
    too_large = [room for room, size in found.items() if any(a > b for a, b in zip(size, SIZES[room]))]
    assert too_large == [], found


# Names that stand in several modules, and why.
TWINS = {
    *("main", "run", "get_args_parser"),  # of each command
    *("train", "train_one_epoch", "evaluate"),  # published: of engine, loop, any script, and a command
}
MAP = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
USERS_WORDS = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")


def public_names(tree: ast.Module):
    """Names of classes, functions and constants at the top of a module."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for each in (name for target in targets for name in ast.walk(target)):
                if isinstance(each, ast.Name):
                    yield each.id


def test_a_name_has_one_meaning():
    modules: dict[str, set[str]] = {}
    for module, tree in TREES.items():
        for name in public_names(tree):
            modules.setdefault(name, set()).add(module)
    assert len(modules["train"]) == 3  # the search finds them
    several = {name for name, found in modules.items() if len(found) > 1 and name[0] != "_"}
    assert several <= TWINS


def test_classes_of_flags_are_not_called_as_the_thing():
    nodes = [node for tree in TREES.values() for node in tree.body]
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}

    def is_of_flags(name: str) -> bool:
        bases = [base.id for base in classes[name].bases if isinstance(base, ast.Name)]
        return "Config" in bases or any(base in classes and is_of_flags(base) for base in bases)

    of_flags = [name for name in classes if is_of_flags(name)]
    assert "NoiseFlags" in of_flags
    assert [name for name in of_flags if not name.endswith(("Flags", "Config", "Settings"))] == []


def test_the_map_has_a_glossary_and_short_cells_and_names_what_there_is():
    """Its glossary and docs/glossary.md share no word."""
    glossary = MAP.partition("## Glossary")[2].partition("\n## ")[0]
    words = re.findall(r"^\| ([^|]+) \|", glossary, re.MULTILINE)[1:]
    words += re.findall(r"^\| \*\*([^|*]+)\*\* \|", USERS_WORDS, re.MULTILINE)
    assert len(set(words)) == len(words) >= 40 and len(MAP.splitlines()) <= 200
    rows = [line.strip("|").split("|") for line in MAP.splitlines() if line.startswith("|")]
    assert [cell for row in rows for cell in row if len(cell.split()) > 40] == []
    named = re.findall(r"`(\w+)(?:\.\w+)?`(?: of `\w+`)? in `([\w/]+\.py)`", MAP)
    texts = {path: "" for _, path in named}
    for path in texts:
        found = [folder / path for folder in (ROOT, ROOT / "histocc") if (folder / path).exists()]
        assert found, path
        texts[path] = found[0].read_text(encoding="utf-8")
    assert len(named) > 100
    assert [pair for pair in named if not re.search(rf"\b{pair[0]}\b", texts[pair[1]])] == []


def test_commands_that_compute_nothing_start_without_torch():
    commands = ["watch", "plot", "prepare", "sample.__main__", "review.__main__", "__main__"]
    code = "import sys, importlib as i\nfor name in sys.argv[1:]: i.import_module(name)\nprint(*sys.modules)"
    line = [sys.executable, "-c", code, *(f"histocc.{name}" for name in commands)]
    loaded = subprocess.run(line, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    assert "histocc.data.prepare" in loaded
    assert {"torch", "histocc.model", "histocc.trainer.batches"}.isdisjoint(loaded)
