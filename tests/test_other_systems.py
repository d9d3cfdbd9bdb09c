"""Systems without what POSIX alone has, such as Windows; see `other_system`."""

import subprocess
import sys

import pytest
from helpers import FINETUNE, REPO, TINY, environment, write_rows

from histocc.runtime.errors import UserError
from histocc.runtime.world import init_world

USE_FROM_PYTHON = """
import sys
from histocc import OccCANINE
print(OccCANINE(sys.argv[1], device="cpu", verbose=False).predict(["blacksmith"], lang="en"))
"""
DATA = ["data.csv", "--formatter", "hisco", "--target-cols", "hisco_1", "hisco_2", "--language-col", "lang"]
TRAIN = [FINETUNE, "--dataset", *DATA, *TINY, "--batch-size", "8", "--save-path", "run"]
CODE = ["--column", "occ1", "--language-column", "lang", "--output", "coded.csv"]


def on_other_system(folder, *command):
    done = subprocess.run(
        [sys.executable, REPO / "tests" / "other_system.py", *command],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.processes
def test_one_process_does_all_that_a_user_asks_for(tmp_path):
    write_rows(tmp_path / "data.csv", 40)
    (tmp_path / "texts.csv").write_text("occ1,lang\nblacksmith,en\nfisker,da\n")
    (tmp_path / "use.py").write_text(USE_FROM_PYTHON)
    on_other_system(tmp_path, "-m", "histocc.prepare", *DATA, "--save-path", "report")
    assert "nothing was trained" in on_other_system(tmp_path, *TRAIN, "--dry-run")
    on_other_system(tmp_path, *TRAIN, "--max-steps", "2")
    assert "Resuming from step 2" in on_other_system(tmp_path, *TRAIN, "--max-steps", "3")
    on_other_system(tmp_path, "-m", "histocc.predict", "--model", "run", "--input", "texts.csv", *CODE)
    assert (tmp_path / "coded.csv").read_text().count("\n") == 3
    on_other_system(tmp_path, "-m", "histocc.evaluate", "--model", "run", "--data", "data.csv")
    on_other_system(tmp_path, "-m", "histocc.review", "make", "coded.csv", "--output", "sheet.csv")
    on_other_system(tmp_path, "-m", "histocc.export", "run", "exported.bin", "--to", "published")
    on_other_system(tmp_path, "-m", "histocc.watch", "run", "--once")
    on_other_system(tmp_path, "-m", "histocc.doctor", "--device", "cpu")
    assert "prob_1" in on_other_system(tmp_path, "use.py", "run")


def test_several_processes_on_windows_are_one_message(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="WSL"):
        init_world(True)
