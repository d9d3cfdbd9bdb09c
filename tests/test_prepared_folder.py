"""The folder of prepared data: found again, told from damaged ones, made again, never half there."""

import dataclasses
import json
import multiprocessing
import os
import resource
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import mutations, write_csv
from hypothesis import given, settings
from hypothesis import strategies as st
from preparing import HEADER, Result, prepare, quiet, settings_for

from histocc.data import arrays
from histocc.data import prepare as prep
from histocc.data.arrays import META, PreparedData, fault, read_meta
from histocc.data.config import PrepareSettings, fingerprint
from histocc.formatter import make_formatter
from histocc.predict.explain import training_data
from histocc.runtime.errors import UserError

CONTENT = "occ1,hisco_1,lang\n" + "".join(
    f"{text} {i},{code},{lang}\n"
    for i in range(30)
    for text, code, lang in (("farmer", "61110", "en"), ("smith", "83110", "da"))
)
OPTIONS = {"share_val": 0.3, "language_col": "lang"}
MADE = sorted(
    [*(f"{part}.{name}" for part in ("train", "val") for name in arrays.ARRAYS), META, "words.csv", "key.csv"]
    + ["rejected_rows.csv", "conflicts.csv", "data_report.json"]
)
LEFTOVER = ".0123456789abcdef.a1b2_c3d"


@pytest.fixture
def made(tmp_path):
    """A prepared folder, its settings, and a function that prepares once more and returns (result, what was
    said)."""
    result = prepare(tmp_path, CONTENT, **OPTIONS)
    chosen = settings_for(tmp_path / "data.csv", **OPTIONS)

    def again(**more):
        said = []
        return Result(prep.prepare(chosen, str(tmp_path / "out"), said.append, **more)), said

    return result, chosen, again


def flip(path: Path) -> None:
    path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))


def everything(folder: Path) -> dict:
    """Kind and content of all entries below a folder, links not followed."""
    return {
        str(path.relative_to(folder)): (
            os.lstat(path).st_mode,
            os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None,
        )
        for path in folder.rglob("*")
    }


def fill(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text("x")
    return folder


def farmer(tmp_path) -> PrepareSettings:
    return settings_for(write_csv(tmp_path / "data.csv", HEADER, [("farmer", "61110", "")]))


# ---- found again, or made again


def test_found_again_by_its_content(made, tmp_path):
    first, _, again = made
    assert sorted(os.listdir(first.folder)) == MADE
    before = {file.name: file.stat().st_mtime_ns for file in first.folder.iterdir()}
    meta = first.folder / META  # the order of its entries does not count
    meta.write_text(json.dumps(dict(reversed(json.loads(meta.read_text()).items())), indent=2))
    before[META] = meta.stat().st_mtime_ns
    assert again()[1] == [f"Prepared data: found in {first.folder}"]
    os.rename(tmp_path / "data.csv", tmp_path / "renamed.csv")
    said = []
    prep.prepare(settings_for(tmp_path / "renamed.csv", **OPTIONS), str(tmp_path / "out"), said.append)
    assert said == [f"Prepared data: found in {first.folder}, made from {tmp_path / 'data.csv'}"]
    assert {file.name: file.stat().st_mtime_ns for file in first.folder.iterdir()} == before
    assert prepare(tmp_path, CONTENT.replace("farmer 3", "farmes 3"), **OPTIONS).folder != first.folder


def test_every_setting_counts(tmp_path):
    a, b = (write_csv(tmp_path / name, HEADER, [(name, "61110", "")]) for name in ("a.csv", "b.csv"))
    plain = settings_for(a, val_files=[b])
    other = {
        **{"train_files": [a, a], "val_files": [], "formatter": make_formatter("gpf", ["hisco_1"]).to_dict()},
        **{"target_cols": ["hisco_2"], "share_val": 0.1, "input_col": "x", "language": "en", "max_len": 64},
        **{"language_col": "lang", "missing_code": "-1", "drop_bad_labels": True, "fixed_codes": ["61110"]},
        **{
            "delimiter": ";",
            "number_codes": ["61110"],
            "first_codes": ["61110"],
            "clean_text": "ascii-lower",
        },
        **{
            "encoding": "cp1250",
            "code_separator": ";",
            "recode": {"1": "2"},
            "empty_text": "-1",
            "ditto": True,
        },
    }
    assert set(other) == {field.name for field in dataclasses.fields(PrepareSettings)}
    changed = [dataclasses.replace(plain, **{name: value}) for name, value in other.items()]
    changed += [
        dataclasses.replace(plain, train_files=[b], val_files=[a]),
        dataclasses.replace(plain, train_files=[a, b], val_files=[]),
    ]
    prints = [fingerprint(what) for what in (plain, *changed)]
    assert len(set(prints)) == len(prints) and fingerprint(plain) == prints[0]


DAMAGE = st.sampled_from(
    ["flip", "cut", "append", "delete", "swap", "empty", "edit", "folder", "pipe", "link"]
)


def damage(folder: Path, kind: str, name: str, number: int) -> None:
    path, content = folder / name, bytearray((folder / name).read_bytes())
    path.unlink()
    if kind == "edit":  # an entry of meta.json has another value, or is gone
        path.write_bytes(content)
        meta = json.loads((folder / META).read_text())
        entry = sorted(meta)[number % len(meta)]
        meta = meta | {entry: [None, "x", -1, [], {"x": 1}][number % 5]} if number % 6 else {}
        (folder / META).write_text(json.dumps(meta))
    elif kind == "flip" and content:
        content[number % len(content)] ^= 1 << number % 8
        path.write_bytes(content)
    elif kind in ("cut", "append", "empty", "swap", "flip"):
        cut = content[: number % (len(content) + 1)]
        other = (folder / sorted(os.listdir(folder))[number % (len(MADE) - 1)]).read_bytes()
        path.write_bytes({"cut": cut, "append": content + b"x", "swap": other}.get(kind, b""))
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(folder / MADE[0] if name != MADE[0] else "nowhere")


@settings(max_examples=mutations(0.34), deadline=None, derandomize=True)
@given(kind=DAMAGE, name=st.sampled_from(MADE), number=st.integers(0, 1 << 30))
def test_damaged_data_are_made_again_or_refused(tmp_path_factory, kind, name, number):
    folder = tmp_path_factory.getbasetemp() / "damaged"
    folder.mkdir(exist_ok=True)
    result, said = prepare(folder, CONTENT, **OPTIONS), []
    before = {file.name: file.read_bytes() for file in result.folder.iterdir()}
    damage(result.folder, kind, name, number)
    try:
        chosen = settings_for(folder / "data.csv", **OPTIONS)
        found = PreparedData.open(prep.prepare(chosen, str(folder / "out"), said.append))
    except UserError as error:  # something else than a file is in the way: it stays
        assert kind in ("folder", "pipe", "link") and f"{result.folder / name}: found" in str(error)
        shutil.rmtree(result.folder)
        return
    assert {file.name: file.read_bytes() for file in result.folder.iterdir()} == before
    assert len(found.train) + len(found.val) == 60 and len(said) in (1, 2)


def test_damage_is_said_by_name(made):
    first, _, again = made
    for name in ("train.codes", "words.csv"):
        flip(first.folder / name)
        assert fault(str(first.folder), contents=False) is None
        second, said = again()
        assert (
            said[0] == f"Prepared data: {first.folder}: {name} is not as it was written; preparing it again"
        )
        assert len(said) == 2 and second.train == first.train
    shutil.copytree(first.folder, first.folder.with_name("0" * 16))
    assert fault(str(first.folder.with_name("0" * 16))) == "meta.json is that of other data"
    os.truncate(first.folder / "train.codes", 5)
    with pytest.raises(UserError, match="train.codes is not as it was written; move the folder away"):
        PreparedData.open(str(first.folder))
    for content in (b"", b"[1]", b"null", b"\xff\xfe{", b"[" * 100_000, b'{"codes": 1' + b"0" * 5000 + b"}"):
        (first.folder / META).write_bytes(content)
        with pytest.raises(UserError, match="meta.json: .*; move .* away"):
            read_meta(str(first.folder))
    (first.folder / META).unlink()
    assert "meta.json is missing" in again()[1][0] and fault(str(first.folder)) is None


def test_a_node_that_sees_the_folder_looks_at_its_checksums(made, tmp_path, capsys):
    first, chosen, again = made

    def on(rank: int):
        world = SimpleNamespace(rank=rank, local_rank=0, node_leaders=lambda: [rank])
        world.run_on = lambda name, leaders, work: [work()]
        return prep.on_every_node(chosen, str(tmp_path / "out"), str(first.folder), world, quiet)

    assert len(on(2).train) == len(first.train) and capsys.readouterr().out == ""
    flip(first.folder / "train.codes")
    on(0)  # the process that has just prepared them
    assert fault(str(first.folder)) is not None
    assert len(on(2).train) == len(first.train) and fault(str(first.folder)) is None
    said = capsys.readouterr().out
    assert said.startswith(f"On the node of rank 2: Prepared data: {first.folder}: train.codes is not as")


def test_no_figure_comes_from_damaged_hashes(made):
    first = made[0]
    file = str(first.folder.parent.parent / "best.bin")
    assert training_data(file, first.data.fingerprint)[1] is not None
    flip(first.folder / "train.text_hash")
    assert training_data(file, first.data.fingerprint)[1] is None


# ---- errors leave nothing behind


def test_nothing_stays_behind_after_an_error(tmp_path):
    chosen = farmer(tmp_path)
    folder = prep.prepare(chosen, str(tmp_path / "out"), quiet)
    with pytest.raises(UserError):
        prepare(tmp_path, "occ1,hisco_1\nfarmer,\n")
    assert os.listdir(tmp_path / "out" / "prepared") == [os.path.basename(folder)] and fault(folder) is None


def test_a_limit_of_file_sizes_is_said(tmp_path):
    path = write_csv(tmp_path / "data.csv", HEADER, [(f"occupation {i}", "61110", "") for i in range(20_000)])
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, usual[1]))
    try:
        with pytest.raises(UserError, match=r"the file is too large.*ulimit -f"):
            prep.prepare(settings_for(path), str(tmp_path / "out"), quiet)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert [file.name for file in tmp_path.iterdir()] == ["data.csv"]


def test_data_files_that_change_or_go(made, tmp_path, monkeypatch):
    chosen, finish = farmer(tmp_path), prep.Reader.finish

    def finish_and_change(reader):
        write_csv(tmp_path / "data.csv", HEADER, [("farmer", "61110", ""), ("smith", "83110", "")])
        return finish(reader)

    with monkeypatch.context() as patch:
        patch.setattr(prep.Reader, "finish", finish_and_change)
        with pytest.raises(UserError, match="data.csv changed while it was read"):
            prep.prepare(chosen, str(tmp_path / "other"), quiet)
    assert not (tmp_path / "other").exists()
    os.unlink(tmp_path / "data.csv")
    with pytest.raises(UserError, match="data.csv: cannot be read: No such file"):
        made[2]()


def test_a_killed_preparation_leaves_nothing_that_stays(tmp_path):
    """A real process, killed while it writes; meanwhile others are refused, and the next one clears up."""
    path = write_csv(tmp_path / "data.csv", HEADER, [(f"occupation {i}", "61110", "") for i in range(3000)])
    root, fork = tmp_path / "out" / "prepared", multiprocessing.get_context("fork")
    reached = fork.Event()

    def work():
        prep.write_key = lambda *_: (reached.set(), time.sleep(60))
        prep.prepare(settings_for(path), str(tmp_path / "out"), quiet)

    process = fork.Process(target=work)
    process.start()
    assert reached.wait(30)
    with pytest.raises(UserError, match=f"prepared is in use by another job: .* process {process.pid}"):
        prep.prepare(settings_for(path), str(tmp_path / "out"), quiet)
    process.kill()
    process.join()
    assert len(os.listdir(root)) == 2
    result = Result(prep.prepare(settings_for(path), str(tmp_path / "out"), quiet))
    assert len(result.train) == 3000 and os.listdir(root) == [result.folder.name]


def test_a_stop_is_seen_between_files(made):
    def check():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made[2](check=check)


# ---- what else is in the folders


def test_only_what_killed_jobs_left_is_removed(tmp_path):
    root = tmp_path / "out" / "prepared"
    gone = [fill(root / LEFTOVER, "train.codes", "train.lines"), fill(root / f"{LEFTOVER[:-1]}9")]
    kept = (".git", "notes", ".0123456789abcdef", ".0123456789abcdeg.a1b2_c3d", f"{LEFTOVER}4")
    kept = [fill(root / name, "train.codes") for name in kept]
    kept.append(fill(root / ".fedcba9876543210.a1b2_c3d", "train.codes", "notes.txt"))
    (root / ".fedcba9876543212.a1b2_c3d").symlink_to(fill(tmp_path / "elsewhere", "train.codes"))
    prepare(tmp_path, CONTENT, **OPTIONS)
    assert all((folder / "train.codes").exists() for folder in kept)
    assert (root / ".fedcba9876543212.a1b2_c3d" / "train.codes").exists()
    assert not any(folder.exists() for folder in gone) and not (root / "run.lock").exists()


def test_files_of_others_in_the_folder_stay(made):
    first, _, again = made
    before = {path.name: path.read_bytes() for path in first.folder.iterdir()}
    fill(first.folder / ".git", "config")
    (first.folder / "val.lines").write_text("of a killed job")
    os.truncate(first.folder / "train.codes", 3)
    again()
    assert fault(str(first.folder)) is None and (first.folder / ".git" / "config").read_text() == "x"
    assert {path.name: path.read_bytes() for path in first.folder.iterdir() if path.is_file()} == before


@pytest.mark.parametrize("where", ["prepared", "key"])
@pytest.mark.parametrize("what", ["file", "loose link", "link", "pipe", "folder inside", "link inside"])
def test_what_is_in_the_way_is_said_and_stays(tmp_path, where, what):
    chosen, out = farmer(tmp_path), tmp_path / "out"
    place = out / "prepared" if where == "prepared" else out / "prepared" / fingerprint(chosen)
    elsewhere = fill(tmp_path / "elsewhere", "train.codes", META)
    place.parent.mkdir(parents=True)
    if "link" in what and what != "link inside":
        place.symlink_to(elsewhere if what == "link" else tmp_path / "nowhere")
    elif what == "file":
        place.write_text("mine")
    elif what == "pipe":
        os.mkfifo(place)
    elif what == "folder inside":
        fill(place / "train.codes", "mine")
    else:
        (fill(place) / "train.codes").symlink_to(elsewhere / "train.codes")
    before = everything(tmp_path)
    if where == "prepared" and what in ("link", "folder inside", "link inside"):  # it may lie on another disk
        folder = prep.prepare(chosen, str(out), quiet)
        assert fault(folder) is None and everything(tmp_path).items() >= before.items()
        return
    with pytest.raises(UserError):
        prep.prepare(chosen, str(out), quiet)
    assert everything(tmp_path) == before
    assert (tmp_path / "nowhere").exists() is False


def test_lists_can_be_read_again_whatever_their_texts(tmp_path):
    content = 'occ1,hisco_1\n"a\rb",61110\n"a\rb",83110\n"c\rd",\n'
    result = prepare(tmp_path, content)
    assert [row[0] for row in result.table("conflicts.csv")[1:]] == ["a\rb"] * 2
    assert [len(row) for row in result.table("rejected_rows.csv")] == [5, 5] and result.reasons[0][0] == 6


def test_words_of_many_rows_are_counted_in_a_part_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr("histocc.data.tables.CHUNK", 10)
    monkeypatch.setattr(prep, "ALL_WORDS_OF", 20)
    monkeypatch.setattr(prep, "MAX_COUNTED_WORDS", 15)
    rows = [("common " + ("often" if i % 2 else f"once{i}"), "61110") for i in range(200)]
    result = prepare(tmp_path, Path(write_csv(tmp_path / "rows.csv", HEADER[:2], rows)).read_bytes())
    words = {word: int(count) for word, count in result.table("words.csv")[1:]}
    assert 40 < words["common"] < 80 and abs(words["often"] * 2 - words["common"]) <= 2 and len(words) <= 15
