"""Tables of several files, and coding in parts: which rows a part has, the tasks that share the parts, and
what is refused.
"""

import gzip
import os
import re
import shutil
import subprocess
import sys
import time

import pytest
from helpers import PIPED, command, environment, free_port, read, run_here, start_forked, write_csv
from test_predict import CODES, model, save_model  # noqa: F401

from histocc.data import binary, tables
from histocc.data.records import Table
from histocc.evaluate import __main__ as evaluate
from histocc.formatter import hisco_blocky5
from histocc.predict import __main__ as predict
from histocc.predict import parts
from histocc.predict.config import PredictConfig
from histocc.review import __main__ as review
from histocc.runtime.errors import UserError
from histocc.runtime.files import run_lock

WORDS = ["smith", "wine merchant", "farmer", "sailor", "baker", "miller", "teacher", "huusmand", "væver"]


def texts(rows, start=0):
    return [f"{WORDS[i % 9]} {chr(97 + i * i % 23)}{chr(97 + i % 19)}" for i in range(start, start + rows)]


def write_parts(folder, count=4, rows=12):
    """Write a folder of parts; the first row of a later one repeats the last row of the part before."""
    folder.mkdir(parents=True)
    for i in range(count):
        some = texts(rows, rows * i)
        some[0] = "do." if i else some[0]
        write_csv(folder / f"part-{i:05d}.csv", ["occ1", "note"], [[text, f"n{i}"] for text in some])
    (folder / "_SUCCESS").touch()
    (folder / "part-99999.csv").touch()  # Spark writes one for a partition without rows
    (folder / "readme.txt").write_text("not a table")
    return folder


def code(model, source, output, *more, code=0):  # noqa: F811
    sources = source if isinstance(source, list) else [source]
    flags = ["--model", model, "--input", *sources, "--output", output, "--device", "cpu", *more]
    return run_here(predict.main, *flags, code=code)


def answers(path):
    """Return the rows of a coded file, but their probabilities, in which other texts at once are rounded."""
    names = [name for name in sorted(read(path)[0]) if "prob" not in name and name != "conf"]
    return [{name: row[name] for name in names} for row in read(path)]


def contents(folder):
    """Return the bytes of all files below a folder, by their names there."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_a_pattern_and_several_names_are_one_table(model, tmp_path):  # noqa: F811
    folder = write_parts(tmp_path / "in")
    code(model, folder, tmp_path / "folder.csv")
    code(model, f"{folder}/part-0000?.csv", tmp_path / "pattern.csv")
    code(model, sorted(folder.glob("part-0*.csv")), tmp_path / "names.csv")
    rows = read(tmp_path / "folder.csv")
    assert [row["note"] for row in rows] == [f"n{i}" for i in range(4) for _ in range(12)]
    assert (tmp_path / "pattern.csv").read_bytes() == (tmp_path / "names.csv").read_bytes()
    assert (tmp_path / "pattern.csv").read_bytes() == (tmp_path / "folder.csv").read_bytes()
    assert len({(row["hisco_1"], row["conf"]) for row in rows[11:13]}) == 1


def test_each_part_of_a_folder_gets_its_own_and_joined_they_are_the_table(model, tmp_path):  # noqa: F811
    folder = write_parts(tmp_path / "in")
    said = code(model, folder, f"{tmp_path}/out/")
    assert "4 of 4 parts" in said and "All parts are done" in said and "48 rows" in said
    names = [f"part-{i:05d}.csv" for i in range(4)]
    assert sorted(contents(tmp_path / "out")) == ["_histocc.json", *names]
    run_here(predict.main, "--join", tmp_path / "out", "--output", tmp_path / "joined.csv")
    code(model, folder, tmp_path / "whole.csv")
    assert answers(tmp_path / "joined.csv") == answers(tmp_path / "whole.csv")
    before = contents(tmp_path / "out")
    (tmp_path / "out" / names[1]).unlink()
    os.utime(folder / names[2], (2e9, 2e9))  # it may have changed
    held = tmp_path / "out" / f"_{names[3]}.parts"  # of a process that was killed
    held.mkdir()
    assert "1 of them done" in code(model, folder, f"{tmp_path}/out/")
    (tmp_path / "out" / "_histocc.json").write_bytes(before["_histocc.json"])
    assert contents(tmp_path / "out") == before and not held.exists()


def test_the_names_of_folders_are_columns(model, tmp_path):  # noqa: F811
    for language, year in (("da", "1880"), ("en", "__HIVE_DEFAULT_PARTITION__")):
        place = tmp_path / "in" / f"lang={language}" / f"year={year}"
        place.mkdir(parents=True)
        write_csv(place / "a.csv", ["occ1"], [[text] for text in texts(5)])
    assert "languages are read from column 'lang'" in code(model, tmp_path / "in", tmp_path / "whole.csv")
    firsts = read(tmp_path / "whole.csv")[::5]
    assert [(row["lang"], row["year"]) for row in firsts] == [("da", "1880"), ("en", "")]
    code(model, tmp_path / "in", f"{tmp_path}/out/")
    part = tmp_path / "out" / "lang=da" / "year=1880" / "a.csv"
    assert "lang" not in read(part)[0]  # as those who read such folders expect
    run_here(predict.main, "--join", tmp_path / "out", "--output", tmp_path / "joined.csv")
    assert answers(tmp_path / "joined.csv") == answers(tmp_path / "whole.csv")


def test_parquet_stays_parquet_and_what_cannot_be_written_becomes_csv(model, tmp_path):  # noqa: F811
    import pyarrow
    from pyarrow import dataset, parquet

    (tmp_path / "in").mkdir()
    for i in range(2):
        table = pyarrow.table({"occ1": texts(9, 9 * i), "age": list(range(9))})
        parquet.write_table(table, tmp_path / "in" / f"{i}.parquet")
    code(model, tmp_path / "in", f"{tmp_path}/out/")
    read_back = dataset.dataset(tmp_path / "out").to_table()
    assert read_back.num_rows == 18 and read_back.schema.field("age").type == pyarrow.int64()
    write_csv(tmp_path / "in" / "2.tsv", ["occ1", "age"], [["smith", "1"]], "\t")
    code(model, tmp_path / "in", f"{tmp_path}/all/")
    assert (tmp_path / "all" / "2.csv").is_file()


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_ranges_of_a_large_file_are_the_file(model, tmp_path, monkeypatch, kind):  # noqa: F811
    rows, place = [], ""
    for i, text in enumerate(texts(300)):
        text = {0: '"in ""quotes""\nof the, town"', 3: "do.", 5: '5" nails'}.get(i % 7, text)
        place = f"P{i}" if i % 50 == 0 else ""
        rows.append(f"{text},{place}")
    path = tmp_path / f"large.{kind}"
    (tmp_path / "large.csv").write_text("\n".join(["occ1,place", *rows, ""]), encoding="utf-8")
    if kind == "parquet":
        import pyarrow
        from pyarrow import parquet

        table = pyarrow.Table.from_pylist(read(tmp_path / "large.csv"))
        parquet.write_table(table, path, row_group_size=23)

    def rows_of(table, span=None):
        parts = table.records(span=span)
        return [row for some in parts for row in zip(some.lines, some.texts, *some.filled)]

    how = {"others": None, "fill_down": ["place"]}
    whole = rows_of(Table(str(path), (), ["occ1"], **how))
    for module in (tables, binary, parts):
        monkeypatch.setattr(module, "RANGE", 600)
    ranges = tables.table_format(str(path)).ranges
    table = Table(str(path), (), ["occ1"], **how)
    cut = [rows_of(table, i) for i in range(ranges)]
    assert ranges > 5 and sum(map(bool, cut)) > 5 and [row for part in cut for row in part] == whole
    firsts = [part[0] for part in cut if part]
    assert any(first[1] != "do." and first[2] == "do." for first in firsts)  # a range begins with one
    for task in (2, 1):
        code(model, path, f"{tmp_path}/out/", "--fill-down", "place", "--task", f"{task}/2")
    monkeypatch.undo()
    run_here(predict.main, "--join", tmp_path / "out", "--output", tmp_path / "joined.csv")
    code(model, path, tmp_path / "whole.csv", "--fill-down", "place")
    assert answers(tmp_path / "joined.csv") == answers(tmp_path / "whole.csv")


def test_what_a_row_repeats_is_found_many_parts_above(model, tmp_path):  # noqa: F811
    folder = tmp_path / "in"
    folder.mkdir()
    for i in range(12):
        text = "smith" if i == 0 else "do."
        write_csv(folder / f"{i}.csv", ["occ1", "place"], [[text, "Lund" * (i == 1)]] * (i % 4 != 2))
    code(model, folder, f"{tmp_path}/out/", "--fill-down", "place", "--ditto")
    code(model, folder, tmp_path / "whole.csv", "--fill-down", "place", "--ditto")
    run_here(predict.main, "--join", tmp_path / "out", "--output", tmp_path / "joined.csv")
    rows = answers(tmp_path / "joined.csv")
    assert rows == answers(tmp_path / "whole.csv")
    assert len({row["hisco_1"] for row in rows}) == 1


@pytest.mark.parametrize("ending", ["xlsx", "jsonl"])
def test_folders_of_other_kinds_of_tables(model, tmp_path, ending):  # noqa: F811
    pandas = pytest.importorskip("pandas")
    (tmp_path / "in").mkdir()
    for i in range(3):
        path, frame = tmp_path / "in" / f"{i}.{ending}", pandas.DataFrame({"occ1": texts(9, 9 * i)})
        if ending == "jsonl":
            frame.to_json(path, orient="records", lines=True)
        else:
            frame.to_excel(path, index=False)
    code(model, tmp_path / "in", f"{tmp_path}/out/")
    run_here(predict.main, "--join", tmp_path / "out", "--output", tmp_path / "joined.csv")
    assert [row["occ1"] for row in read(tmp_path / "joined.csv")] == texts(27)


def test_parts_stand_in_the_order_of_their_numbers_and_hidden_names_are_kept(model, tmp_path):  # noqa: F811
    names = ["part.0.csv", "part.2.csv", "part.10.csv", "_own.csv"]
    (tmp_path / "in").mkdir()
    for i, name in enumerate(names):
        write_csv(tmp_path / "in" / name, ["occ1"], [[texts(4)[i]]])
    code(model, tmp_path / "in", tmp_path / "whole.csv")
    assert [row["occ1"] for row in read(tmp_path / "whole.csv")] == texts(3)
    code(model, [tmp_path / "in" / name for name in reversed(names)], f"{tmp_path}/out/")
    run_here(predict.main, "--join", tmp_path / "out", "--output", tmp_path / "joined.csv")
    assert [row["occ1"] for row in read(tmp_path / "joined.csv")] == texts(4)[::-1]


def test_a_part_is_coded_again_with_the_one_before_and_parts_of_no_input_are_named(model, tmp_path):  # noqa: F811
    folder = write_parts(tmp_path / "in", 3, 5)
    code(model, folder, f"{tmp_path}/out/")
    rows = [["sailor", "n"]] * 5
    write_csv(folder / "part-00000.csv", ["occ1", "note"], rows)  # the next part begins with "do."
    assert "1 of them done" in code(model, folder, f"{tmp_path}/out/")
    codes = [[*read(tmp_path / "out" / f"part-0000{i}.csv")[0].values()][2:5] for i in (0, 1)]
    assert codes[0] == codes[1]
    (folder / "part-00002.csv").unlink()
    said = code(model, folder, f"{tmp_path}/out/", code=2)
    assert "part-00002.csv belongs to an input that is not named now" in said
    (tmp_path / "out" / "part-00002.csv").unlink()
    code(model, folder, f"{tmp_path}/out/")
    said = run_here(predict.main, "--join", tmp_path / "out", "--output", tmp_path / "joined.csv")
    assert "10 rows of 2 parts" in said


def test_a_packed_file_is_read_whole(tmp_path, monkeypatch):
    for module in (tables, binary):
        monkeypatch.setattr(module, "RANGE", 10)
    path = tmp_path / "mac.csv"
    path.write_bytes(b'occ1,note\rsmith,"a\nb"\r' * 20)
    assert tables.table_format(str(path)).ranges > 9

    def lines_of(span=None):
        chunks = tables.read_chunks(str(path), None, span=span)
        return [line for chunk in chunks for line in chunk.lines.tolist()]

    assert [line for i in range(9) for line in lines_of(i)] == lines_of()
    with gzip.open(tmp_path / "a.csv.gz", "wt") as file:
        file.write("occ1\n" + "smith\n" * 1000)
    assert tables.table_format(str(tmp_path / "a.csv.gz")).ranges == 1
    (tmp_path / "wide.csv").write_text("occ1\n" + "smith\n" * 1000, encoding="utf-16")
    assert tables.table_format(str(tmp_path / "wide.csv")).ranges == 1


@pytest.mark.full
def test_tasks_that_are_killed_and_started_again_write_what_one_process_does(model, tmp_path):  # noqa: F811
    folder = write_parts(tmp_path / "in", 12, 400)
    line = ["--model", model, "--input", folder, "--device", "cpu", "--output", f"{tmp_path}/out/", "--task"]
    code(model, folder, f"{tmp_path}/one/")
    said, killed, tasks = tmp_path / "said", 0, [f"{i}/6" for i in range(1, 7)]
    said.touch()
    while tasks:
        running = {task: start_forked("histocc.predict", [*line, task], said)[0] for task in tasks[:2]}
        tasks = tasks[2:]
        for i, (task, process) in enumerate(running.items()):
            if i == 0 and killed < 3:  # while it codes a part
                while process.is_alive() and not [*(tmp_path / "out").glob("_part*/*.part")]:
                    time.sleep(0.01)
            else:
                process.join(120)
            if process.is_alive():
                process.kill()
                process.join()
                killed += 1
                tasks.append(task)
            else:
                assert process.exitcode == 0, said.read_text()
    assert killed and contents(tmp_path / "out") == contents(tmp_path / "one")


def test_a_task_takes_its_share_from_the_variables_of_slurm_and_torchrun(monkeypatch):
    def share(*flags, **variables):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            return parts.task_of(PredictConfig(input=["in"], output="out/", **dict(flags)))

    array = {"SLURM_ARRAY_TASK_MIN": "10", "SLURM_ARRAY_TASK_MAX": "40", "SLURM_ARRAY_TASK_COUNT": "4"}
    assert share() == (0, 1, "")
    assert share(("task", (3, 20)), RANK="1", WORLD_SIZE="2") == (2, 20, "--task")
    assert share(RANK="1", WORLD_SIZE="2")[:2] == (1, 2)
    assert share(SLURM_ARRAY_TASK_ID="30", **array) == (2, 4, "SLURM_ARRAY_TASK_ID")
    step = {"RANK": "1", "WORLD_SIZE": "3"}  # also of srun
    assert share(SLURM_ARRAY_TASK_ID="30", **step, **array)[:2] == (7, 12)
    for odd in ({"ID": "15"}, {"ID": "70"}, {"ID": "x"}, {}):
        with pytest.raises(UserError, match="add --task I/N"):
            share(**{f"SLURM_ARRAY_TASK_{name}": value for name, value in odd.items()}, **array)


def test_what_comes_through_a_pipe_goes_on_through_one(model, tmp_path):  # noqa: F811
    source = write_csv(tmp_path / "in.csv", ["occ1"], [[text] for text in texts(20)])
    code(model, source, tmp_path / "out.csv")
    line = command("histocc.predict", "--model", model, "--input", "-", "--output", "-", "--device", "cpu")
    with open(source, "a", encoding="utf-8") as file:
        file.write('"smith" x\n')
    done = subprocess.run(line, stdin=open(source, "rb"), capture_output=True, env=environment(), check=False)
    assert done.returncode == 1 and b"not in the output: 1;" in done.stderr
    assert done.stdout == (tmp_path / "out.csv").read_bytes()
    write_csv(source, ["occ1"], [[text] for text in texts(20)])
    with subprocess.Popen(["cat", source], stdout=subprocess.PIPE).stdout as pipe:
        done = subprocess.run(line, stdin=pipe, capture_output=True, env=environment(), check=False)
    assert done.returncode == 0 and b"20 rows" in done.stderr, done.stderr
    assert done.stdout == (tmp_path / "out.csv").read_bytes()


def test_known_texts_reports_and_sheets_take_folders(model, tmp_path):  # noqa: F811
    folder = tmp_path / "known"
    folder.mkdir()
    for i in range(2):
        rows = [[text, "22222"] for text in texts(10, 10 * i)]
        write_csv(folder / f"{i}.csv", ["occ1", "hisco_1"], rows)
    code(model, folder, tmp_path / "coded.csv", "--known", folder, "--overwrite-columns")
    flags = ["--model", model, "--data", folder, "--output", tmp_path / "report", "--device", "cpu"]
    assert "Rows: 20 " in run_here(evaluate.main, *flags, "--target-cols", "hisco_1")
    code(model, folder, f"{tmp_path}/parts/", "--overwrite-columns")
    known = [[text, "22222", "33333"] for text in texts(1)]
    known = write_csv(tmp_path / "known.csv", ["occ1", "hisco_1", "hisco_2"], known)
    code(model, folder, f"{tmp_path}/two/", "--overwrite-columns", "--known", known, "--k", 1)
    (row, *_), others = (read(tmp_path / "two" / f"{i}.csv") for i in range(2))
    assert (row["hisco_1"], row["hisco_2"]) == ("22222", "33333")  # more than --k
    assert others[0].keys() == row.keys()  # also in the part without a known text
    sheet = tmp_path / "sheet.csv"
    run_here(review.main, "make", tmp_path / "parts", "--output", sheet, "--rows", "5")


def test_what_does_not_fit_a_folder_is_refused_before_coding(model, tmp_path):  # noqa: F811
    folder, out = write_parts(tmp_path / "in", 2), f"{tmp_path}/out/"
    code(model, folder, out)
    before = contents(tmp_path / "out")
    other = save_model(tmp_path / "other", hisco_blocky5(), CODES, step=2)

    def refused(*words, source=folder, output=out, more=()):
        said = code(model, source, output, *more, code=2)
        assert all(word in said for word in words), said

    refused("k differ", more=["--k", "1"])
    refused("is a part of another input", source=write_parts(tmp_path / "other_in", 2))
    refused("model differ", str(model), other, more=["--model", other])
    refused("is inside the input", output=f"{folder}/out/")
    refused("is inside the input", output=f"{folder}/")
    refused("--task is for parts", output=tmp_path / "x.csv", more=["--task", "1/2"])
    refused("I/N", more=["--task", "3/2"])
    refused("remove", more=["--overwrite"])
    refused("pattern with no table", source=f"{folder}/*.parquet")
    refused("--input - is one table", source="-")
    refused("nowhere.csv: No such file", source=tmp_path / "nowhere.csv")
    (tmp_path / "twice").mkdir()
    shutil.copy(folder / "part-00000.csv", tmp_path / "twice")
    refused("rename one", source=[folder / "part-00000.csv", tmp_path / "twice" / "part-00000.csv"])
    write_csv(folder / "part-00002.csv", ["occ1", "extra"], [["smith", "1"]])
    refused("part-00002.csv", "extra, note")
    refused("part-00002.csv", "extra", output=tmp_path / "x.csv")
    (tmp_path / "alien").mkdir()
    (folder / "part-00002.csv").unlink()
    (tmp_path / "alien" / "part-00000.csv").write_text("a\n")
    refused("is not a part written by predict", output=f"{tmp_path}/alien/")
    assert contents(tmp_path / "out") == before

    (tmp_path / "out" / "part-00001.csv").unlink()
    said = run_here(predict.main, "--join", tmp_path / "out", "--output", tmp_path / "j.csv", code=2)
    assert "parts missing: 1 of 2" in said
    part = tmp_path / "out" / "part-00001.csv"
    whole = (tmp_path / "out" / "part-00000.csv").read_bytes()
    for damaged, why in (
        (whole[:-2], "cut off within its last line: copy it again"),
        (whole + b"a,b\n", f"line 14 of a part cannot be read ({part}: cells in the row: 2"),
    ):
        part.write_bytes(damaged)
        assert why in run_here(predict.main, "--join", part.parent, "--output", tmp_path / "j.csv", code=2)
    said = run_here(predict.main, "--join", folder, "--output", tmp_path / "j.csv", code=2)
    assert "was not written by predict" in said


def test_advice_on_unusual_texts_takes_the_whole_folder(tmp_path):
    held = {"texts": 300, "maps": {"flat": [0.5, 0.0, 0.0, 0.3]}, "curves": {}, "known": 0.9}
    fitted = save_model(tmp_path / "run", hisco_blocky5(), CODES, confidence=held)
    said = code(fitted, write_parts(tmp_path / "in", 2), f"{tmp_path}/out/")
    joins, makes = re.findall(r"\n  histocc (.*)", said)[:2]
    assert joins == f"predict --join {tmp_path}/out/ --output coded.csv" and "review make coded.csv " in makes


def test_two_tasks_with_one_number_are_told_apart(model, tmp_path):  # noqa: F811
    folder = write_parts(tmp_path / "in", 1)
    held = tmp_path / "out" / "_part-00000.csv.parts"
    held.mkdir(parents=True)
    with run_lock(str(held)):
        assert "in use by another job" in code(model, folder, f"{tmp_path}/out/", code=2)


def test_a_row_that_cannot_be_read_is_listed_beside_its_part(model, tmp_path):  # noqa: F811
    folder = write_parts(tmp_path / "in", 2, 5)
    with open(folder / "part-00001.csv", "a", encoding="utf-8") as file:
        file.write('"smith" x,n\n')
    for _ in range(2):  # another run does not hide it
        said = code(model, folder, f"{tmp_path}/out/", code=1)
    assert "rows of 1 part could not be read" in said and "_part-00001.csv.rejected.csv" in said
    assert len(read(tmp_path / "out" / "part-00001.csv")) == 5
    said = run_here(predict.main, "--join", tmp_path / "out", "--output", tmp_path / "joined.csv")
    assert "; with unreadable rows: 1 " in said
    assert [row["line"] for row in read(tmp_path / "out" / "_part-00001.csv.rejected.csv")] == ["7"]
    code(model, folder, tmp_path / "x.csv", code=1)
    assert "part-00001.csv" in (tmp_path / "x.csv.rejected.csv").read_text()


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounts a disk for one process")
@pytest.mark.full
def test_two_machines_need_a_common_disk_for_one_table_alone(model, tmp_path):  # noqa: F811
    folder = write_parts(tmp_path / "in")
    (tmp_path / "out").mkdir()
    code(model, folder, f"{tmp_path}/one/")
    out, second = tmp_path / "out", tmp_path / "second"
    alone = f'mount -t tmpfs x {out} || exit 99; "$@"; code=$?; cp -r {out}/. {second}; exit $code'
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"WORLD_SIZE": "2", "LOCAL_RANK": "0"}

    def run_both(output):
        second.mkdir(exist_ok=True)
        flags = ["--model", model, "--input", folder, "--output", output, "--device", "cpu"]
        line = command("histocc.predict", *flags)
        started = []
        for rank in (0, 1):
            inside = ["unshare", "-m", "bash", "-c", alone, "bash", *line] if rank else line
            started.append(subprocess.Popen(inside, env=environment(RANK=str(rank), **common), **PIPED))
        said = [process.communicate(timeout=120)[0] for process in started]
        if started[1].returncode == 99 or "unshare" in said[1]:
            pytest.skip("this system lets nobody mount")
        return [process.returncode for process in started], said

    codes, said = run_both(f"{tmp_path}/out/coded.csv")
    assert codes == [2, 2] and "rank 1" in said[0] and "--output FOLDER/" in said[0], said
    codes, said = run_both(f"{tmp_path}/out/")
    assert codes == [0, 0] and "Task 2 of 2 (by RANK)" in said[1], said
    shutil.copytree(tmp_path / "second", tmp_path / "out", dirs_exist_ok=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "one")
