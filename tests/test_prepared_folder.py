"""The folder of prepared data: found again, made again, shared by processes, never half there."""

import dataclasses
import errno
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
from helpers import write_csv
from preparing import HEADER, Result, prepare, quiet, second_process, settings_for  # noqa: F401

from histocc.data import folder as prepared_folder
from histocc.data import prepare as prep
from histocc.data import settings as data_settings
from histocc.data import writer as row_writer
from histocc.data.settings import PrepareSettings, fingerprint
from histocc.formatter import make_formatter
from histocc.runtime.errors import UserError


def test_found_again(tmp_path):
    path = write_csv(tmp_path / "data.csv", HEADER, [("farmer", "61110", "")])
    said = []
    folder = prep.prepare(settings_for(path), str(tmp_path / "out"), said.append)
    before = {file.name: file.stat().st_mtime_ns for file in Path(folder).iterdir()}
    assert said == [f"Preparing data: {path}"]
    os.rename(path, tmp_path / "renamed.csv")  # the content counts, not the path
    assert prep.prepare(settings_for(tmp_path / "renamed.csv"), str(tmp_path / "out"), said.append) == folder
    assert (
        said[1] == f"Prepared data: found in {folder}, made from {path}"
        and {file.name: file.stat().st_mtime_ns for file in Path(folder).iterdir()} == before
    )
    assert sorted(before) == [
        "conflicts.csv",
        "data_report.json",
        "key.csv",
        "meta.json",
        "rejected_rows.csv",
        *(
            f"{part}.{name}"
            for part in ("train", "val")
            for name in ("chars", "codes", "language", "offsets", "text_hash")
        ),
        "words.csv",
    ]


def test_a_changed_byte_is_prepared_anew(tmp_path):
    first = prepare(tmp_path, "occ1,hisco_1\nfarmer,61110\n")
    second = prepare(tmp_path, "occ1,hisco_1\nfarmes,61110\n")
    assert first.folder != second.folder and (first.texts, second.texts) == (["farmer"], ["farmes"])


def test_every_setting_counts(tmp_path, monkeypatch):
    a, b = (write_csv(tmp_path / name, HEADER, [(name, "61110", "")]) for name in ("a.csv", "b.csv"))
    plain = settings_for(a, val_files=[b])
    other = {
        "train_files": [a, a],
        "val_files": [],
        "formatter": make_formatter("gpf", ["hisco_1"]).to_dict(),
        "target_cols": ["hisco_2"],
        "share_val": 0.1,
        "input_col": "x",
        "language": "en",
        "language_col": "lang",
        "max_len": 64,
        "missing_code": "-1",
        "drop_bad_labels": True,
        "fixed_codes": ["61110"],
        "numbered": True,
        "delimiter": ";",
        "number_codes": ["61110"],
        "first_codes": ["61110"],
        "clean_text": "ascii-lower",
    }
    assert set(other) == {field.name for field in dataclasses.fields(PrepareSettings)}
    changed = [dataclasses.replace(plain, **{name: value}) for name, value in other.items()]
    changed += [
        dataclasses.replace(plain, train_files=[b], val_files=[a]),
        dataclasses.replace(plain, train_files=[a, b], val_files=[]),
    ]
    prints = [fingerprint(what) for what in (plain, *changed)]
    assert len(set(prints)) == len(prints) and fingerprint(plain) == prints[0]
    monkeypatch.setattr(data_settings, "PREPARED_FORMAT", data_settings.PREPARED_FORMAT + 1)
    assert fingerprint(plain) != prints[0]


def test_nothing_stays_behind_after_an_error(tmp_path, monkeypatch):
    path = write_csv(tmp_path / "data.csv", HEADER, [("farmer", "61110", "")])

    def fails(*_):
        raise OSError("disk full")

    for name in ("write_key", "write_words"):
        with monkeypatch.context() as patch:
            patch.setattr(prep, name, fails)
            with pytest.raises(UserError, match="could not be prepared in .*: disk full"):
                prep.prepare(settings_for(path), str(tmp_path / "out"), quiet)
        assert [file.name for file in tmp_path.iterdir()] == ["data.csv"]


def test_an_error_leaves_other_prepared_data_alone(tmp_path):
    folder = prepare(tmp_path, "occ1,hisco_1\nfarmer,61110\n").folder
    with pytest.raises(UserError):
        prepare(tmp_path, "occ1,hisco_1\nfarmer,\n")
    assert list(folder.parent.iterdir()) == [folder] and Result(str(folder)).texts == ["farmer"]


def test_a_killed_preparation_leaves_nothing_that_stays(tmp_path):
    """A real process, killed while it writes; what it left is removed by the next, and the result is
    whole.
    """
    path = write_csv(tmp_path / "data.csv", HEADER, [(f"occupation {i}", "61110", "") for i in range(3000)])
    root, fork = tmp_path / "out" / "prepared", multiprocessing.get_context("fork")
    reached = fork.Event()

    def work():
        prep.write_key = lambda *_: (reached.set(), time.sleep(60))
        prep.prepare(settings_for(path), str(tmp_path / "out"), quiet)

    process = fork.Process(target=work)
    process.start()
    assert reached.wait(30)
    assert [name for name in os.listdir(root) if name != ".lock"][0].startswith(".")
    process.kill()
    process.join()
    result = Result(prep.prepare(settings_for(path), str(tmp_path / "out"), quiet))
    assert len(result.train) == 3000 and os.listdir(root) == [result.folder.name]


def test_without_locks_the_first_to_finish_wins(tmp_path, monkeypatch):
    """On a file system that has none: another job finishes the same while this one writes."""
    path = write_csv(tmp_path / "data.csv", HEADER, [("farmer", "61110", "")])
    rename, others = os.rename, []

    def no_lock(*_):
        raise OSError(errno.ENOLCK, "no locks available")

    def rename_after_the_other(source, target):
        monkeypatch.setattr(prepared_folder.os, "rename", rename)
        others.append(prep.prepare(settings_for(path), str(tmp_path / "out"), quiet))
        rename(source, target)

    monkeypatch.setattr("fcntl.flock", no_lock)
    monkeypatch.setattr(prepared_folder.os, "rename", rename_after_the_other)
    folder = prep.prepare(settings_for(path), str(tmp_path / "out"), quiet)
    assert [folder] == others and Result(folder).texts == ["farmer"]
    assert [entry.name for entry in Path(folder).parent.iterdir()] == [Path(folder).name]


def test_several_processes_at_once_do_the_work_once(tmp_path):
    path = write_csv(tmp_path / "data.csv", HEADER, [(f"occupation {i}", "61110", "") for i in range(3000)])
    fork = multiprocessing.get_context("fork")
    barrier, answers = fork.Barrier(3), fork.Queue()

    def work():
        written, said, write_key = [], [], prep.write_key
        prep.write_key = lambda *arguments: (written.append(1), time.sleep(0.5), write_key(*arguments))
        barrier.wait()
        answers.put(
            (prep.prepare(settings_for(path), str(tmp_path / "out"), said.append), len(written), said[1:])
        )

    processes = [fork.Process(target=work) for _ in range(3)]
    for process in processes:
        process.start()
    found = sorted((answers.get(timeout=60) for _ in processes), key=lambda answer: -answer[1])
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes] == [0, 0, 0] and len(
        {folder for folder, *_ in found}
    ) == 1
    assert [count for _, count, _ in found] == [1, 0, 0]
    assert found[0][2] == [] and all("Waiting for another job" in said for _, _, [said] in found[1:])
    folder = found[0][0]
    assert len(Result(folder).train) == 3000 and os.listdir(Path(folder).parent) == [Path(folder).name]


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    path, finish = write_csv(tmp_path / "data.csv", HEADER, [("farmer", "61110", "")]), prep.Reader.finish

    def finish_and_change(reader):
        write_csv(path, HEADER, [("farmer", "61110", ""), ("smith", "83110", "")])
        return finish(reader)

    monkeypatch.setattr(prep.Reader, "finish", finish_and_change)
    with pytest.raises(UserError, match="data.csv changed while it was read"):
        prep.prepare(settings_for(path), str(tmp_path / "out"), quiet)
    assert not (tmp_path / "out").exists()


def test_lists_can_be_read_again_whatever_their_texts(tmp_path):
    content = 'occ1,hisco_1\n"a\rb",61110\n"a\rb",83110\n"c\rd",\n'
    result = prepare(tmp_path, content)
    assert [row[0] for row in result.table("conflicts.csv")[1:]] == ["a\rb"] * 2
    assert [len(row) for row in result.table("rejected_rows.csv")] == [5, 5] and result.reasons[0][0] == 6


def test_a_second_process_writes_the_same(tmp_path, request):
    path = write_csv(
        tmp_path / "data.csv",
        HEADER,
        [(f"occupation {i % 40} ø𝔊", "61110", ("", "83110")[i % 2]) for i in range(200)],
    )
    folders = []
    for name in ("alone", "beside"):
        folders.append(
            Path(
                prep.prepare(settings_for(path, cols=HEADER[1:], share_val=0.3), str(tmp_path / name), quiet)
            )
        )
        request.getfixturevalue("second_process")
    assert [file.name for file in sorted(folders[0].iterdir())] == [
        file.name for file in sorted(folders[1].iterdir())
    ]
    for file in folders[0].iterdir():
        assert file.read_bytes() == (folders[1] / file.name).read_bytes()


@pytest.mark.parametrize(
    "end, words",
    [("full", "no space left on the device"), ("killed", "process that writes the prepared data has died")],
)
def test_what_happens_to_the_second_process_is_said(
    tmp_path,
    second_process,
    monkeypatch,
    end,
    words,  # noqa: F811
):
    path = write_csv(tmp_path / "data.csv", HEADER, [(f"occupation {i}", "61110", "") for i in range(20_000)])
    reader = os.getpid()
    add = row_writer.PartFiles.add

    def fails(self, *arguments, **arrays):
        if os.getpid() != reader and self.info.rows > 50:
            if end == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.ENOSPC, "No space left on device")
        add(self, *arguments, **arrays)

    monkeypatch.setattr(row_writer.PartFiles, "add", fails)
    with pytest.raises(UserError, match=words):
        prep.prepare(settings_for(path), str(tmp_path / "out"), quiet)
    assert [file.name for file in tmp_path.iterdir()] == [
        "data.csv"
    ] and multiprocessing.active_children() == []


def test_words_of_many_rows_are_counted_in_a_part_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr("histocc.data.tables.CHUNK", 10)
    monkeypatch.setattr(row_writer, "ALL_WORDS_OF", 20)
    monkeypatch.setattr(row_writer, "MOST_COUNTED_WORDS", 15)
    rows = [("common " + ("often" if i % 2 else f"once{i}"), "61110") for i in range(200)]
    result = prepare(tmp_path, Path(write_csv(tmp_path / "rows.csv", HEADER[:2], rows)).read_bytes())
    words = {word: int(count) for word, count in result.table("words.csv")[1:]}
    assert 40 < words["common"] < 80 and abs(words["often"] * 2 - words["common"]) <= 2 and len(words) <= 15


def test_description_of_the_folder_is_written_last(tmp_path, monkeypatch):
    """Who finds meta.json finds the rest."""
    present, write_last = [], prep.write_last
    monkeypatch.setattr(
        prep,
        "write_last",
        lambda folder, content: (present.extend(os.listdir(folder)), write_last(folder, content)),
    )
    folder = prepare(tmp_path, "occ1,hisco_1\nfarmer,61110\n").folder
    assert sorted([*present, "meta.json"]) == sorted(file.name for file in folder.iterdir())


@pytest.mark.parametrize("damage", ["short", "missing", "no json"])
def test_a_damaged_folder_is_made_anew(tmp_path, damage):
    content = "occ1,hisco_1\nfarmer,61110\nsmith,83110\n"
    folder = prepare(tmp_path, content).folder
    file = folder / ("meta.json" if damage == "no json" else "train.codes")
    file.unlink() if damage == "missing" else os.truncate(file, file.stat().st_size - 1)
    assert prepare(tmp_path, content).texts == ["farmer", "smith"] and os.listdir(folder.parent) == [
        folder.name
    ]
