"""Prepared data that were damaged, edited or mixed with other files: told from whole ones, made again,
nothing of others lost.
"""

import errno
import fcntl
import json
import multiprocessing
import os
import resource
import shutil
import signal
import threading
from pathlib import Path

import pytest
from helpers import write_csv
from preparing import HEADER, Result, prepare, quiet, second_process, settings_for  # noqa: F401

from histocc.data import arrays
from histocc.data import folder as prepared_folder
from histocc.data import prepare as prep
from histocc.data import rows as row_reader
from histocc.data import writer as row_writer
from histocc.data.arrays import FILES, TEACHER, PreparedData, read_meta
from histocc.data.folder import is_whole
from histocc.evaluate import __main__ as evaluate
from histocc.runtime import checksums
from histocc.runtime.errors import UserError

CONTENT = "occ1,hisco_1,lang\n" + "".join(
    f"{text} {i},{code},{lang}\n"
    for i in range(30)
    for text, code, lang in (("farmer", "61110", "en"), ("smith", "83110", "da"))
)
OPTIONS = {"share_val": 0.3, "language_col": "lang"}
ARRAY_FILES = [f"{part}.{name}" for part in ("train", "val") for name in arrays.ARRAYS]


@pytest.fixture
def made(tmp_path):
    """A prepared folder, its settings, and a function that prepares once more and returns (result, what was
    said)."""
    result = prepare(tmp_path, CONTENT, **OPTIONS)
    settings = settings_for(tmp_path / "data.csv", **OPTIONS)

    def again(**more):
        said = []
        return Result(prep.prepare(settings, str(tmp_path / "out"), said.append, **more)), said

    return result, settings, again


def overwrite(path: Path) -> None:
    """Other bytes of the same number."""
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


# ---- checksums


@pytest.mark.parametrize(
    "name", [*ARRAY_FILES, "words.csv", "key.csv", "rejected_rows.csv", "conflicts.csv", "data_report.json"]
)
def test_an_overwritten_file_is_made_anew(made, name):
    first, _, again = made
    before = {path.name: path.read_bytes() for path in first.folder.iterdir()}
    overwrite(first.folder / name)
    assert is_whole(str(first.folder), contents=False) and not is_whole(str(first.folder))
    second, said = again()
    assert (
        said[0] == f"Prepared data: {first.folder}: {name} is not as it was written; preparing it again"
        and len(said) == 2
    )
    assert {path.name: path.read_bytes() for path in second.folder.iterdir()} == before
    assert again()[1] == [f"Prepared data: found in {first.folder}"]


def test_an_edited_description_is_made_anew(made):
    first, _, again = made
    path = first.folder / "meta.json"
    path.write_text(path.read_text().replace("61110", "61120", 1))
    assert not is_whole(str(first.folder), contents=False)
    with pytest.raises(UserError, match="meta.json: checksum: found .* changed after it was written"):
        PreparedData.open(str(first.folder))
    second, said = again()
    assert "meta.json is not as it was written; preparing it again" in said[0] and second.train == first.train


def test_the_order_of_entries_does_not_count(made):
    first, _, again = made
    path = first.folder / "meta.json"
    path.write_text(json.dumps(dict(reversed(json.loads(path.read_text()).items())), indent=2))
    assert again()[1] == [f"Prepared data: found in {first.folder}"]


def test_a_folder_under_the_name_of_another(made):
    first, _, again = made
    other = first.folder.with_name("0" * 16)
    shutil.copytree(first.folder, other)
    assert prepared_folder.fault(str(other)) == "meta.json is that of other data"


@pytest.mark.parametrize("name", ["val.chars", "meta.json"])
def test_a_pipe_in_the_place_of_a_file_does_not_hang(tmp_path, name):
    result = prepare(tmp_path, CONTENT.replace(",lang", ",language"), share_val=0.0)  # val.chars is empty
    (result.folder / name).unlink()
    os.mkfifo(result.folder / name)
    assert not is_whole(str(result.folder))
    before = everything(tmp_path)
    with pytest.raises(UserError, match=f"{name}: found a pipe, expected a file"):
        prep.prepare(settings_for(tmp_path / "data.csv", share_val=0.0), str(tmp_path / "out"), quiet)
    assert everything(tmp_path) == before


@pytest.mark.parametrize(
    "entry, value, words",
    [
        ("codes", "x", "'x', expected a list of texts"),
        ("codes", [1], "list of texts"),
        ("languages", None, "list of texts"),
        ("max_codes", 0, "above 0"),
        ("max_codes", True, "above 0"),
        ("max_codes", "2", "above 0"),
        ("alphabet", [0x110000], "code points"),
        ("report", {}, "list of its files"),
        ("sizes", {"train.codes": "8"}, "number for each file"),
        ("hisco_numbers", 1, "true or false"),
        ("clean_text", [], "a text"),
        ("format", 4, "expected 3"),
        ("fingerprint", 5, "a text"),
        ("kept_codes", -1, "whole number"),
        ("checksums", [], "number for each file"),
        ("checksum", 1.5, "whole number"),
    ],
)
def test_every_entry_is_looked_at(made, entry, value, words):
    folder = made[0].folder
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {entry: value}))
    with pytest.raises(UserError, match=f"meta.json: {entry}: found .*{words}.*; move .* away"):
        read_meta(str(folder))
    assert not is_whole(str(folder))


@pytest.mark.parametrize(
    "content", [b"", b"[1]", b"null", b"\xff\xfe{", b"[" * 100_000, b'{"codes": 1' + b"0" * 5000 + b"}"]
)
def test_no_description_at_all(made, content):
    first, _, again = made
    (first.folder / "meta.json").write_bytes(content)
    with pytest.raises(UserError, match="meta.json: "):
        read_meta(str(first.folder))
    assert "meta.json is not as it was written" in again()[1][0]


def test_a_shorter_array_is_refused(made):
    folder = made[0].folder
    os.truncate(folder / "train.codes", 5)
    with pytest.raises(UserError, match="train.codes is not as it was written; move the folder away"):
        PreparedData.open(str(folder))


def test_one_process_of_each_node_looks_at_the_checksums(made, tmp_path, monkeypatch):
    first, settings, again = made
    read, of_file = [], checksums.of_file
    monkeypatch.setattr(checksums, "of_file", lambda path: (read.append(path), of_file(path))[1])
    again()
    everyone = len(list(first.folder.iterdir())) - 1
    assert len(read) == everyone
    folder, said, here = str(first.folder), [], str(tmp_path / "out")
    assert (
        prep.prepare_on_node(settings, here, folder, 0, quiet, warn=said.append) == folder
        and len(read) == everyone
    )
    assert (
        prep.prepare_on_node(settings, here, folder, 2, quiet, warn=said.append) == folder
        and len(read) == 2 * everyone
    )
    PreparedData.open(folder)
    assert len(read) == 2 * everyone and said == []
    overwrite(first.folder / "train.codes")
    assert prep.prepare_on_node(settings, here, folder, 2, quiet, warn=said.append) == folder and is_whole(
        folder
    )
    assert said == [
        f"On the node of rank 2: Prepared data: {folder}: train.codes is not as it was written; "
        "preparing it again"
    ]


def test_no_figure_comes_from_damaged_hashes(made, tmp_path):
    first = made[0]
    state = {"position": {"fingerprint": first.data.fingerprint}}
    file = str(first.folder.parent.parent / "best.bin")
    assert evaluate.known_texts(file, state, first.data.val)["texts_trained_on"] == 0
    overwrite(first.folder / "train.text_hash")
    assert evaluate.known_texts(file, state, first.data.val)["texts_trained_on"] is None


def test_a_stop_is_seen_between_files(made):
    class Stop(BaseException):
        pass

    def check():
        raise Stop

    with pytest.raises(Stop):
        made[2](check=check)


def test_a_data_file_that_is_gone_is_said(made, tmp_path):
    os.unlink(tmp_path / "data.csv")
    with pytest.raises(UserError, match="data.csv: cannot be read: No such file"):
        made[2]()


def test_a_data_file_that_cannot_be_read_to_its_end_is_said(tmp_path, monkeypatch):
    def breaks(*_):
        yield from ()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(row_reader, "read_chunks", breaks)
    with pytest.raises(UserError, match="data.csv: cannot be read: Input/output error"):
        prepare(tmp_path, CONTENT, **OPTIONS)


# ---- what else lies in the folders

LEFTOVER = ".0123456789abcdef.a1b2_c3d"


def fill(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text("x")
    return folder


def test_only_what_killed_jobs_left_is_removed(tmp_path):
    root = tmp_path / "out" / "prepared"
    gone = [
        fill(root / LEFTOVER, "train.codes", "train.lines", "val.codes.new", "rejected_rows.csv"),
        fill(root / f"{LEFTOVER[:-1]}9"),
    ]
    for name in (
        ".git",
        ".dvc",
        "notes",
        ".0123456789abcdef",
        ".0123456789abcdeg.a1b2_c3d",
        ".0123456789abcdef.a1b2_c3d4",
    ):
        fill(root / name, "train.codes")
    fill(root / ".fedcba9876543210.a1b2_c3d", "train.codes", "notes.txt")
    fill(root / ".fedcba9876543211.a1b2_c3d" / "train.codes", "inside")
    (root / ".notes").write_text("x")
    (root / ".fedcba9876543212.a1b2_c3d").symlink_to(fill(tmp_path / "elsewhere", "train.codes"))
    (fill(root / ".fedcba9876543213.a1b2_c3d") / "val.codes").symlink_to(
        tmp_path / "elsewhere" / "train.codes"
    )
    before = {
        path: what
        for path, what in everything(tmp_path).items()
        if not any(str(folder) in str(tmp_path / path) for folder in gone)
    }
    prepare(tmp_path, CONTENT, **OPTIONS)
    after = everything(tmp_path)
    assert {path: after.get(path) for path in before} == before
    assert not any(folder.exists() for folder in gone) and not (root / ".lock").exists()


def test_what_a_living_job_writes_without_the_lock_stays(tmp_path):
    folder = fill(tmp_path / "out" / "prepared" / LEFTOVER, "train.codes")
    with prepared_folder._in_work(str(folder)):
        prepare(tmp_path, CONTENT, **OPTIONS)
        assert (folder / "train.codes").exists()
    prepare(tmp_path, CONTENT + "baker,77610,en\n", **OPTIONS)
    assert not folder.exists()


def test_all_files_have_a_name_of_ours(tmp_path, monkeypatch):
    seen, replace, finish, write_last = set(), os.replace, row_reader.Reader.finish, prep.write_last
    monkeypatch.setattr(
        row_reader.os,
        "replace",
        lambda source, target: (seen.add(Path(source).name), replace(source, target)),
    )
    monkeypatch.setattr(
        row_reader.Reader,
        "finish",
        lambda reader: (seen.update(os.listdir(reader.folder)), finish(reader))[1],
    )
    monkeypatch.setattr(
        prep,
        "write_last",
        lambda folder, content: (seen.update(os.listdir(folder)), write_last(folder, content)),
    )
    prepare(tmp_path, CONTENT, **OPTIONS)
    without_teacher = set(FILES) - {f"train.{TEACHER}"}  # which test_teacher.py looks at
    assert {name for name in seen if "." in name and not name.startswith(".")} | {
        "meta.json"
    } == without_teacher


def test_files_of_others_in_the_folder_stay(made, monkeypatch):
    first, _, again = made
    before = {path.name: path.read_bytes() for path in first.folder.iterdir()}
    (first.folder / "notes.txt").write_text("mine")
    fill(first.folder / ".git", "config")
    for name in ("val.lines", "train.codes.new"):
        (first.folder / name).write_text("of a killed job")
    os.truncate(first.folder / "train.codes", 3)
    whole, replace = [], os.replace

    def watched(source, target):
        whole.append(is_whole(str(first.folder), contents=False))
        replace(source, target)

    monkeypatch.setattr(prepared_folder.os, "replace", watched)
    again()
    assert not any(whole) and len(whole) >= len(before) and is_whole(str(first.folder))
    assert (first.folder / "notes.txt").read_text() == "mine" and (
        first.folder / ".git" / "config"
    ).read_text() == "x"
    assert {path.name: path.read_bytes() for path in first.folder.iterdir() if path.name in FILES} == before


def test_the_folder_of_all_may_lie_on_another_disk(tmp_path):
    path = write_csv(tmp_path / "data.csv", HEADER, [("farmer", "61110", "")])
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "prepared").symlink_to(tmp_path / "disk")
    folder = prep.prepare(settings_for(path), str(tmp_path / "out"), quiet)
    assert os.path.exists(os.path.join(folder, "meta.json")) and len(list((tmp_path / "disk").iterdir())) == 1


@pytest.mark.parametrize(
    "where, what",
    [
        ("prepared", "file"),
        ("prepared", "loose link"),
        ("key", "link"),
        ("key", "file"),
        ("key", "folder inside"),
        ("key", "pipe"),
        ("key", "link inside"),
    ],
)
def test_what_stands_in_the_way_is_said_and_stays(tmp_path, where, what):
    path = write_csv(tmp_path / "data.csv", HEADER, [("farmer", "61110", "")])
    settings, out = settings_for(path), tmp_path / "out"
    place = out / "prepared" if where == "prepared" else out / "prepared" / prep.fingerprint(settings)
    elsewhere = fill(tmp_path / "elsewhere", "train.codes", "meta.json")
    place.parent.mkdir(parents=True)
    if what in ("link", "loose link"):
        place.symlink_to(elsewhere if what == "link" else tmp_path / "nowhere")
    elif what == "file":
        place.write_text("mine")
    elif what == "pipe":
        os.mkfifo(place)
    elif what == "folder inside":
        fill(place / "train.codes", "mine")
    else:
        fill(place)
        (place / "train.codes").symlink_to(elsewhere / "train.codes")
    before = everything(tmp_path)
    with pytest.raises(
        UserError, match="found a .*, expected a .* that this program made; nothing was changed"
    ):
        prep.prepare(settings, str(out), quiet)
    assert everything(tmp_path) == before


# ---- the lock


def test_waiting_for_another_job_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(prepared_folder, "POLL_SECONDS", 0.01)
    path = write_csv(tmp_path / "data.csv", HEADER, [("farmer", "61110", "")])
    root = tmp_path / "out" / "prepared"
    leftover = fill(root / LEFTOVER, "train.codes")
    said, looked = [], []
    with open(root / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = prep.prepare(
            settings_for(path), str(tmp_path / "out"), said.append, None, lambda: looked.append(1), 0.1
        )
        assert (root / ".lock").exists() and leftover.exists()
    assert said[1:] == [
        f"Waiting for another job that prepares data in {root}",
        f"Another job has held {root / '.lock'} for {0.1 / 60:g} minutes; not waiting any longer",
    ]
    assert len(looked) >= 10 and is_whole(folder)


@pytest.mark.parametrize("what", ["pipe", "folder", "link", "loose link", "file of others"])
def test_a_lock_that_is_none(tmp_path, what):
    root = fill(tmp_path / "out" / "prepared")
    lock, mine = root / ".lock", tmp_path / "mine"
    mine.write_text("mine")
    if what == "pipe":
        os.mkfifo(lock)
    elif what == "folder":
        fill(lock, "mine")
    elif what == "file of others":
        lock.write_text("mine")
    else:
        lock.symlink_to(mine if what == "link" else tmp_path / "nowhere")
    before, said = everything(tmp_path), []
    path = write_csv(tmp_path / "data.csv", HEADER, [("farmer", "61110", "")])
    assert is_whole(prep.prepare(settings_for(path), str(tmp_path / "out"), said.append))
    after = everything(tmp_path)
    assert {name: after.get(name) for name in before} == before
    assert what == "file of others" or ".lock" in said[1] and "preparing data without one" in said[1]


# ---- the process that writes

ROWS = [(f"occupation {i}", "61110", "") for i in range(20_000)]


def assert_nothing_is_left(tmp_path):
    assert [file.name for file in tmp_path.iterdir()] == [
        "data.csv"
    ] and multiprocessing.active_children() == []


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside"])
def test_a_limit_of_file_sizes_is_said(tmp_path, request, beside):
    path = write_csv(tmp_path / "data.csv", HEADER, ROWS)
    if beside:
        request.getfixturevalue("second_process")
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, usual[1]))
    try:
        with pytest.raises(UserError, match="the file is too large.*ulimit -f"):
            prep.prepare(settings_for(path), str(tmp_path / "out"), quiet)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert_nothing_is_left(tmp_path)


@pytest.mark.parametrize(
    "error, words",
    [
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), "quota is used up"),
        (MemoryError(), "out of memory"),
    ],
)
def test_what_fails_in_the_second_process_is_said(
    tmp_path,
    second_process,
    monkeypatch,
    error,
    words,  # noqa: F811
):
    path, reader, add = write_csv(tmp_path / "data.csv", HEADER, ROWS), os.getpid(), row_writer.PartFiles.add

    def fails(self, *arguments, **more):
        if os.getpid() != reader:
            raise error
        add(self, *arguments, **more)

    monkeypatch.setattr(row_writer.PartFiles, "add", fails)
    with pytest.raises(UserError, match=words):
        prep.prepare(settings_for(path), str(tmp_path / "out"), quiet)
    assert_nothing_is_left(tmp_path)


@pytest.fixture
def stopped(second_process, monkeypatch):  # noqa: F811
    """The second process stands still after some rows."""
    reader, add = os.getpid(), row_writer.PartFiles.add

    def stands_still(self, *arguments, **more):
        if os.getpid() != reader and self.info.rows > 100:
            os.kill(os.getpid(), signal.SIGSTOP)
        add(self, *arguments, **more)

    monkeypatch.setattr(row_writer.PartFiles, "add", stands_still)
    monkeypatch.setattr(row_writer, "POLL_SECONDS", 0.01)


@pytest.mark.parametrize("rows", [20_000, 200], ids=["while sending", "while receiving"])
def test_a_second_process_that_stands_still_is_not_waited_for_without_end(tmp_path, stopped, rows):
    path = write_csv(tmp_path / "data.csv", HEADER, ROWS[:rows])
    with pytest.raises(UserError, match="process that writes the prepared data has not moved for .* minutes"):
        prep.prepare(settings_for(path), str(tmp_path / "out"), quiet, wait_seconds=0.2)
    assert_nothing_is_left(tmp_path)


def test_a_stop_is_seen_while_the_second_process_stands_still(tmp_path, stopped):
    class Stop(BaseException):
        pass

    asked = threading.Event()
    threading.Timer(0.5, asked.set).start()

    def check():
        if asked.is_set():
            raise Stop

    with pytest.raises(Stop):
        prep.prepare(
            settings_for(write_csv(tmp_path / "data.csv", HEADER, ROWS)),
            str(tmp_path / "out"),
            quiet,
            None,
            check,
        )
    assert_nothing_is_left(tmp_path)
