"""Several machines: nodes without a shared file system prepare their own data, and must agree. Two processes
in folders of their own stand for two nodes; two launchers do so in MULTI_GPU_TRAINING.md (test_guides).
"""

import os
import re
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from helpers import REPO, TINY, TRAIN_MIXER, ended, free_port, run, start_forked, state_of, write_rows

from histocc.runtime import checkpoint
from histocc.runtime.files import OwnFiles
from histocc.trainer.script import newest_of_nodes

pytestmark = pytest.mark.processes
EVALUATE, PREDICT = (REPO / "histocc" / name / "__main__.py" for name in ("evaluate", "predict"))
NODE = f"""
import os, runpy, sys
os.chdir(sys.argv.pop(1))
sys.path[0] = {str(REPO)!r}
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def run_on_nodes(folders, *args, code, script=TRAIN_MIXER, second=()):
    """Starts the script in each folder, as a launcher on each of two nodes does; returns the outputs. second:
    further flags of the second node.
    """
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    variables |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    logs, nodes = [folder / "output" for folder in folders], []
    for rank, (folder, log) in enumerate(zip(folders, logs)):
        (folder / "node.py").write_text(NODE)
        log.write_text("")
        more = second if rank else ()
        node = [folder / "node.py", [folder, script, "--distributed", *args, *more], log]
        nodes += start_forked(*node, RANK=str(rank), **variables)
    codes, outputs = ended(nodes, 120), [log.read_text(encoding="utf-8") for log in logs]
    assert codes == [code, code], "\n".join(outputs)
    return outputs


@pytest.fixture
def folders(tmp_path):
    for name in ("a", "b"):
        os.mkdir(tmp_path / name)
        write_rows(tmp_path / name / "train.csv", 12)
        write_rows(tmp_path / name / "val.csv", 4, 50)
    return [tmp_path / "a", tmp_path / "b"]


FLAGS = ["--train-data", "train.csv", "--val-data", "val.csv", "--save-dir", "run", *TINY]
FLAGS += ["--batch-size", 4, "--num-epochs", 1]


@pytest.mark.full
def test_each_node_prepares_its_own_and_a_run_goes_on_though_one_alone_has_the_checkpoint(folders):
    """And whichever node rank 0 is given."""
    flags = [*FLAGS, "--dropout", 0.1, "--log-interval", 1]
    first, second = run_on_nodes(folders, *flags, "--save-dir", "whole", code=0)
    assert "Nodes: 2" in first and "Finished at step 2" in first and "Finished" not in second
    prepared = [os.listdir(folder / "whole" / "prepared") for folder in folders]
    assert prepared[0] == prepared[1] and len(prepared[0]) == 1
    assert os.listdir(folders[1] / "whole") == ["prepared"]  # rank 0 alone writes the files of the run
    run_on_nodes(folders, *flags, "--max-steps", 1, code=0)
    first, second = run_on_nodes(folders[::-1], *flags, code=0)
    assert "Resuming from step 1" in first and "Finished at step 2" in first and "Finished" not in second
    whole, other = state_of(folders[0] / "whole"), state_of(folders[1] / "run")
    assert other["step"] == 2
    torch.testing.assert_close(whole["model"], other["model"], rtol=0, atol=0)
    # what is replaced is so on every node
    first, _ = run_on_nodes(folders, *flags, "--overwrite", "--seed", 7, "--max-steps", 1, code=0)
    assert "Resuming" not in first and not (folders[1] / "run" / "last.bin").exists()
    assert state_of(folders[0] / "run")["step"] == 1


def test_the_newest_checkpoint_of_all_nodes_is_sent_to_each(tmp_path):
    asked = SimpleNamespace(save_path="", overwrite=False)
    for name, step in (("a", 9), ("b", 10)):
        (tmp_path / name).mkdir()
        state = {"model": {}, "step": step, "position": {"launchers": []}}
        checkpoint.save(OwnFiles(str(tmp_path / name)), ["last.bin"], state)

    def newest(order):
        world = Mock(gather=lambda x: [x], node_leaders=lambda: [0, 4, 8])
        world.run_on = lambda _, work: [work() for asked.save_path in (str(tmp_path / x) for x in order)]
        world.broadcast.side_effect = lambda state, source: {**state, "source": source}
        return newest_of_nodes(asked, world, checkpoint.load)

    for order, source in (("abc", 4), ("bca", 0), ("cab", 8)):
        state, is_on_main = newest(order)
        assert (state["step"], state["source"], is_on_main) == (10, source, source == 0)
    assert newest("bbb")[1] and "source" not in newest("bbb")[0] and newest("ccc") == (None, False)


@pytest.mark.full
def test_a_checkpoint_on_the_node_of_rank_0_is_handed_to_the_other(folders):
    """To be validated and reported on; where rank 0 does not see it, all end with a message."""
    train, val, save_dir = (folders[0] / name for name in ("train.csv", "val.csv", "run"))
    run(TRAIN_MIXER, *FLAGS, "--train-data", train, "--val-data", val, "--save-dir", save_dir)
    first, second = run_on_nodes(folders, *FLAGS, "--eval-only", code=0)
    assert "validation at step 3" in first and not second
    report = ["--model", "run", "--data", "val.csv"]
    first, second = run_on_nodes(folders, *report, script=EVALUATE, code=0)
    assert f"Report: {os.path.join('run', 'evaluation', 'report.md')}" in first and not second
    first, second = run_on_nodes(folders[::-1], *FLAGS, "--eval-only", code=2)
    assert first.count("error: --eval-only: run: no checkpoint there") == 1 and "error" not in second
    first, second = run_on_nodes(folders[::-1], *report, script=EVALUATE, code=2)
    assert first.count("error: run: no checkpoint there") == 1 and "error" not in second


def test_a_node_that_is_started_otherwise_is_named_with_both_values(folders):
    """Other flags and other data end every command at its start; what concerns one process alone does not."""
    assert (folders[0] / "train.csv").read_bytes() == (folders[1] / "train.csv").read_bytes()
    write_rows(folders[1] / "val.csv", 5, 50)
    predict = ["--input", "train.csv", "--output", "coded.csv", "--input-col", "occ1"]
    for script, flags, second, said in (
        (TRAIN_MIXER, FLAGS, "--lr 1e-4", r"--learning-rate: None for rank 0 on \S+, 0.0001 for rank 1 on "),
        (
            TRAIN_MIXER,
            FLAGS,
            "--num-workers 1",
            r"checksum of val.csv: '\w{8}' for rank 0 .*' for rank 1 on ",
        ),
        (PREDICT, predict, "--k 3", r"--k: None for rank 0 on \S+, 3 for rank 1 on "),
    ):
        outputs = "".join(run_on_nodes(folders, *flags, second=second.split(), script=script, code=2))
        assert outputs.count("error:") == 1 and "Traceback" not in outputs, outputs
        assert re.search(said, outputs) and "num-workers" not in outputs, outputs
        assert not (folders[0] / "run").exists() and not (folders[0] / "coded.csv.parts").exists()


@pytest.mark.full
def test_no_data_on_a_node_and_a_file_that_only_rank_0_has_are_named(folders):
    (folders[1] / "val.csv").unlink()
    first, second = run_on_nodes(folders, *FLAGS, code=2)
    assert first.count("error: rank 1: val.csv: no such file") == 1 and "error" not in second
    write_rows(folders[1] / "val.csv", 4, 50)
    (folders[0] / "words.csv").write_text("word,freq\nsmith,3\n")
    first, second = run_on_nodes(folders, *FLAGS, "--fn-word-freq", "words.csv", code=2)
    assert "error" not in first and second.count("error: rank 1: words.csv: no such file") == 1
