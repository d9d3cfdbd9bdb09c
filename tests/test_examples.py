"""The examples: other models on the same trainer, on one process and several, killed and resumed."""

import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import REPO, command, environment, greatest_difference, read_logs, run, run_inside

from examples import train_from_config, train_llada, train_prs_med
from examples.scenes import Scenes
from examples.segmentation import overlap, structure_loss
from examples.text import DRAWS, MaskedDraws, MaskedWindows, Windows, read_text
from examples.transformer import SIZES, Transformer

pytestmark = pytest.mark.processes
EXAMPLES = REPO / "examples"
WORDS = "the clerk of the mill wrote what each man and woman did for a living"


def text(number=4000, seed=0):
    generator = np.random.default_rng(seed)
    return " ".join(generator.choice(WORDS.split(), number))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder of two texts and a file that is none."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.txt").write_text(text(250))
    (folder / "inside").mkdir()
    (folder / "inside" / "b.txt").write_text(text(200, seed=1))
    (folder / "image.png").write_bytes(b"\x89PNG\0\0")
    return folder


COMMON = ["--device", "cpu", "--float64", "--global-batch-size", 12, "--num-epochs", 2, "--log-interval", 2]
COMMON += ["--eval-interval", 4, "--save-interval", 2]
CONFIG = """
[model]
name = "examples.segmentation:Segmenter"
width = 16
answers = 3
modalities = 3
[task]
name = "examples.train_prs_med:Segmentation"
[train]
name = "examples.scenes:Scenes"
number = 60
seed = 1
[val]
name = "examples.scenes:Scenes"
number = 10
seed = 2
"""


def flags_of(name, corpus):
    """(script, its flags) of a run of a few seconds."""
    if name == "train_llada":
        own = ["--data_dir", corpus, "--window", 32, "--val-windows", 2]
    elif name == "train_prs_med":
        own = ["--scenes", 60, "--val-scenes", 10, "--width", 16]
    else:
        config = corpus.with_suffix(".toml")  # beside the texts
        config.write_text(CONFIG)
        own = ["--config", config]
    return EXAMPLES / f"{name}.py", [*own, *COMMON]


NAMES = ["train_llada", "train_prs_med", "train_from_config"]
DEFAULT_FIRST = [NAMES[0], *(pytest.param(name, marks=pytest.mark.full) for name in NAMES[1:])]
LOSSES = {
    "train_llada": ("train_loss", "val_loss", "bits_per_byte"),
    "train_prs_med": ("train_loss", "train_loss_mask", "val_loss", "dice", "iou", "answer_acc"),
    "train_from_config": ("train_loss", "train_loss_mask", "val_loss", "dice", "iou", "answer_acc"),
}


@pytest.fixture(scope="module")
def whole_runs(corpus, tmp_path_factory):
    """name → the folder of its uninterrupted run on one process, made when it is asked for."""
    made = {}

    def whole(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name) / "whole"
            script, flags = flags_of(name, corpus)
            run(script, *flags, "--save-dir", folder)
            made[name] = folder
        return made[name]

    return whole


def same_checkpoints(folder, other):
    states = [torch.load(Path(each) / "last.bin", weights_only=True) for each in (folder, other)]
    assert states[0]["step"] == states[1]["step"]
    weights = [state["model"] for state in states]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    moments = [state["optimizer"]["state"] for state in states]
    for number, entry in moments[0].items():
        assert all(torch.equal(entry[part], moments[1][number][part]) for part in entry)


@pytest.mark.parametrize("name", DEFAULT_FIRST)
class TestRuns:
    @pytest.mark.parametrize(
        "processes, more",
        [
            (2, []),
            pytest.param(2, ["--batch-size", 2], marks=pytest.mark.full),
            pytest.param(2, ["--parallel", "fsdp"], marks=pytest.mark.full),
            pytest.param(4, [], marks=pytest.mark.full),
        ],
    )
    def test_losses_are_those_of_one_process(self, name, processes, more, corpus, whole_runs, tmp_path):
        script, flags = flags_of(name, corpus)
        run(script, *flags, *more, "--save-dir", tmp_path / "run", processes=processes)
        names = [f"train_{part}" if part == "loss" else part for part in LOSSES[name]]
        assert greatest_difference(whole_runs(name), tmp_path / "run", names) < 1e-9

    @pytest.mark.parametrize("processes", [None, pytest.param(2, marks=pytest.mark.full)])
    def test_killed_and_resumed_is_bitwise_equal(self, name, processes, corpus, whole_runs, tmp_path):
        script, flags = flags_of(name, corpus)
        flags = [*flags, "--save-dir", tmp_path / "run"]
        whole = whole_runs(name)
        if processes:
            whole = tmp_path / "whole"
            run(script, *flags[:-1], whole, processes=processes)
        started = subprocess.Popen(
            command(script, *flags, processes=processes),
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        until = time.monotonic() + 120
        while not list((tmp_path / "run").glob("[24].bin")) and time.monotonic() < until:
            time.sleep(0.02)
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()
        output = run(script, *flags, processes=processes)
        assert "Resuming from step" in output
        same_checkpoints(whole, tmp_path / "run")
        logs = [read_logs(folder) for folder in (whole, tmp_path / "run")]
        columns = ("step", "train_loss", "val_loss", "samples")
        assert [[row[name] for name in columns] for row in logs[0]] == [
            [row[name] for name in columns] for row in logs[1]
        ]
        epochs = [sorted(path.name for path in folder.glob("*.pt")) for folder in (whole, tmp_path / "run")]
        assert epochs[0] == epochs[1] == ["checkpoint_epoch_1.pt", "checkpoint_epoch_2.pt"]


def test_epoch_checkpoints_have_the_name_that_other_scripts_read(whole_runs):
    state = torch.load(whole_runs("train_llada") / "checkpoint_epoch_1.pt", weights_only=True)
    Transformer(*SIZES["tiny"]).double().load_state_dict(state["model_state_dict"])


class TestText:
    def test_the_weights_of_masked_tokens_add_up_to_one_on_average(self):
        data = np.frombuffer(text(20000).encode(), dtype=np.uint8)
        rows = MaskedWindows(data, 32, seed=5)
        found = rows.batch(np.arange(len(rows)), 3)
        total = (found["masked"] * found["weight"][:, None]).sum(1)
        assert abs(total.mean() - 1) < 4 * total.std() / len(total) ** 0.5 and total.std() > 0.1
        draws = MaskedDraws(data, 32, most=40)
        found = draws.batch(np.arange(len(draws)), 0)
        assert torch.allclose(
            (found["masked"] * found["weight"][:, None]).sum(1), torch.ones(40 * DRAWS).double()
        )
        counts = found["masked"].sum(1).reshape(40, DRAWS)
        assert (
            counts.min() == 1 and counts.max() == 32 and (counts.sort(1).values == torch.arange(1, 33)).all()
        )

    def test_masks_are_a_function_of_seed_epoch_and_row(self):
        data = np.frombuffer(text().encode(), dtype=np.uint8)
        rows, numbers = MaskedWindows(data, 64, seed=5), np.arange(40)
        one, again = rows.batch(numbers, 1), rows.batch(numbers[::-1].copy(), 1)
        assert all(torch.equal(one[name], again[name].flip(0)) for name in one)
        assert not torch.equal(one["masked"], rows.batch(numbers, 2)["masked"])
        assert not torch.equal(one["masked"], MaskedWindows(data, 64, seed=6).batch(numbers, 1)["masked"])

    def test_windows_are_the_text(self, corpus):
        train, val = read_text([str(corpus)])
        rows = Windows(val, 16)
        found = rows.batch(np.arange(len(rows)), 0)["tokens"].flatten().numpy()
        assert (found == val[: len(found)]).all() and len(val) - len(found) < 16
        assert abs(len(val) / (len(train) + len(val)) - 0.1) < 0.01

    def test_an_autoregressive_model_sees_nothing_ahead(self):
        torch.manual_seed(0)
        tokens = torch.randint(0, 256, (2, 20))
        other = tokens.clone()
        other[:, 12:] = 7
        for causal in (True, False):
            model = Transformer(*SIZES["tiny"], causal=causal)
            same = torch.equal(model(tokens)[:, :12], model(other)[:, :12])
            assert same == causal

    @pytest.mark.full
    def test_going_on_from_weights_and_sampling(self, corpus, tmp_path):
        script, flags = flags_of("train_llada", corpus)
        for objective in ("autoregressive", "diffusion"):
            more = ["--objective", objective, "--sample", 30, "--save-dir"]
            said = run(script, *flags, *more, tmp_path / objective)
            assert "bits_per_byte" in said and len(said.split("best.bin)\n")[-1].encode()) > 30
            again = run(script, *flags, *more, tmp_path / objective)  # nothing left to train
            assert "nothing to do" in again and again[-30:] == said[-30:]
            further = run(
                script, *flags, *more, tmp_path / f"{objective}2", "--model-name", tmp_path / objective
            )
            first, later = (
                next(row["train_loss"] for row in read_logs(tmp_path / name))
                for name in (objective, f"{objective}2")
            )
            assert later < first, further
            alone = run(script, *flags, *more, tmp_path / objective, "--eval-only")
            assert "validation at step" in alone


class TestImages:
    def test_structure_loss_is_that_of_its_formula(self):
        generator = torch.Generator().manual_seed(1)
        logits = torch.randn(2, 40, 40, generator=generator).double()
        mask = (torch.randn(2, 40, 40, generator=generator) > 0.5).double()
        for found, x, m in zip(structure_loss(logits, mask), logits, mask):
            padded = torch.zeros(70, 70).double()
            padded[15:55, 15:55] = m
            mean = padded.unfold(0, 31, 1).unfold(1, 31, 1).sum((2, 3)) / 31**2
            w, p = 1 + 5 * (mean - m).abs(), x.sigmoid()
            entropy = -(w * (m * p.log() + (1 - m) * (1 - p).log())).sum() / w.sum()
            both = (w * p * m).sum()
            expected = entropy + 1 - (both + 1) / ((w * (p + m)).sum() - both + 1)
            assert abs(found - expected) < 1e-12

    def test_overlap(self):
        mask = torch.tensor([[[1.0, 1], [0, 0]], [[0, 0], [0, 0]]])
        dice, iou = overlap(torch.tensor([[[5.0, -5], [5, -5]], [[-1, -1], [-1, -1]]]), mask)
        assert dice.tolist() == [0.5, 1] and iou.tolist() == [1 / 3, 1]

    def test_scenes_are_a_function_of_seed_and_row(self):
        scenes, numbers = Scenes(50, 3), np.arange(50)
        one, again = scenes.batch(numbers, 0), Scenes(50, 3).batch(numbers[::-1].copy(), 7)
        assert all(torch.equal(one[name], again[name].flip(0)) for name in one if name != "modality_weight")
        assert one["modality_weight"].unique().tolist() == [0.5]
        assert again["modality_weight"].unique().tolist() == [0.0]
        covered = one["mask"].mean((1, 2))
        assert covered.min() > 0.01 and covered.max() < 0.15
        assert len({scenes.asked(number) for number in range(50)}) > 15
        shuffled = Scenes(50, 3, shuffled=True).batch(numbers, 0)
        assert torch.equal(shuffled["image"], one["image"])
        assert not torch.equal(shuffled["question"], one["question"])

    @pytest.mark.full
    def test_images_of_ones_own(self, tmp_path):
        image = pytest.importorskip("PIL.Image")
        scenes = Scenes(30, 1)
        found = scenes.batch(np.arange(30), 0)
        lines = ["image,mask,question,answer"]
        for i in range(30):
            pixels = (found["image"][i].permute(1, 2, 0) * 255).byte().numpy()
            image.fromarray(pixels).save(tmp_path / f"{i}.png")
            image.fromarray((found["mask"][i] * 255).byte().numpy()).save(tmp_path / f"m{i}.png")
            lines.append(f'{i}.png,m{i}.png,"{scenes.asked(i)}",{scenes.answers[found["answer"][i]]}')
        (tmp_path / "questions.csv").write_text("\n".join(lines))
        flags = ["--data_root", tmp_path, "--width", 16, *COMMON, "--checkpoint_dir", tmp_path / "run"]
        said = run(EXAMPLES / "train_prs_med.py", *flags)
        assert "dice" in said and "Finished at step" in said
        for i, name, damage, expected in (
            (1, "m3.png", lambda path: path.unlink(), "no such file"),
            (2, "4.png", lambda path: image.new("RGB", (32, 64)).save(path), "the same size"),
            (3, "5.png", lambda path: path.write_bytes(b"none"), "cannot be read as an image"),
        ):
            before = (tmp_path / name).read_bytes()
            damage(tmp_path / name)
            code, said = run_inside(train_prs_med.main, *flags[:-1], tmp_path / f"bad{i}")
            assert code == 2 and name in said and expected in said and said.count("error:") == 1
            assert not (tmp_path / f"bad{i}").exists()
            (tmp_path / name).write_bytes(before)


TEXT, IMAGES, CONFIGURED = train_llada.main, train_prs_med.main, train_from_config.main


@pytest.mark.parametrize(
    "main, flags, expected",
    [
        (TEXT, ["--data_dir", "{}/empty"], "empty: no text there"),
        (TEXT, ["--data_dir", "{}/short.txt"], "fewer than a window of 64"),
        (TEXT, ["--model_name", "{}/empty"], "--model-name {}/empty: no checkpoint there"),
        (TEXT, ["--epochs", "0"], "--num-epochs/--epochs: '0' is not a whole number"),
        (IMAGES, ["--data_root", "{}/empty"], "empty/questions.csv: no such file"),
        (IMAGES, ["--data_root", "{}/latin"], "latin/questions.csv: cannot be read as CSV in UTF-8"),
        (IMAGES, ["--data_root", "{}/short"], "short/questions.csv, row 2: no value question, answer"),
        (IMAGES, ["--width", "20"], "--width: invalid choice: 20"),
        (CONFIGURED, [], "--config is missing"),
        (CONFIGURED, ["--config", '"nowhere:Net"'], "[model]: nowhere:Net: cannot be imported"),
        (CONFIGURED, ["--config", '"os:nothing"'], "the module os has no nothing"),
        (CONFIGURED, ["--config", '"os:sep"'], "os:sep is a str, not a class or a function"),
        (CONFIGURED, ["--config", '"collections:Counter"'], "not a torch.nn.modules.module.Module"),
        (CONFIGURED, ["--config", '"torch.nn:Linear"'], "missing a required argument: 'in_features'"),
    ],
)
def test_bad_input_is_one_message_and_leaves_nothing(main, flags, expected, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.txt").write_text("short")
    for name, line in (("short", b"b.png,c.png"), ("latin", b"b.png,c.png,o\xf9?,left")):
        (tmp_path / name).mkdir()
        table = b"image,mask,question,answer\na.png,b.png,where?,left\n" + line
        (tmp_path / name / "questions.csv").write_bytes(table)
    if flags[:1] == ["--config"]:
        (tmp_path / "c.toml").write_text(CONFIG.replace('"examples.segmentation:Segmenter"', flags[1]))
        flags = ["--config", "{}/c.toml"]
    before = sorted(tmp_path.rglob("*"))
    flags = [flag.format(tmp_path) for flag in flags]
    code, said = run_inside(main, *flags, "--device", "cpu", "--save-dir", tmp_path / "run")
    assert code == 2 and expected.format(tmp_path) in said and said.count("error:") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_another_run_in_the_folder_is_named(whole_runs, corpus):
    folder = whole_runs("train_llada")
    script, flags = flags_of("train_llada", corpus)
    code, said = run_inside(train_prs_med.main, *COMMON, "--save-dir", folder)
    assert code == 2 and "it is a run of train_llada.py, not of train_prs_med.py" in said
    code, said = run_inside(train_llada.main, *flags, "--save-dir", folder, "--window", 16)
    assert code == 2 and "--window was 32, now it is 16" in said
    code, said = run_inside(
        train_llada.main, *flags[2:], "--save-dir", folder, "--data_dir", corpus / "a.txt"
    )
    assert code == 2 and "a run on other data" in said


LLADA, PRS_MED = "examples/train_llada.py", "examples/train_prs_med.py"
DOCS, SCENES = REPO / "docs", REPO / "configs" / "scenes.toml"


@pytest.mark.parametrize(
    "name, script, words, expected",
    [
        ("launch_training.sh", LLADA, [2, DOCS], f"--data_dir {DOCS} --save-dir ./output"),
        ("launch_training.sh", LLADA, [2], "--distributed --save-dir ./output"),
        (
            "run_multi_gpu_train.sh",
            PRS_MED,
            [DOCS, 2],
            f"--data_root {DOCS} --save-dir ./output --lr-scaling linear",
        ),
        (
            "scripts/train_multi_gpu.sh",
            "",
            [SCENES, 2],
            f"examples/train_from_config.py --distributed --config {SCENES}",
        ),
    ],
)
def test_launchers_start_them(name, script, words, expected, tmp_path):
    done = subprocess.run(
        [REPO / name, *map(str, words), "--print-only"],
        env=environment(**({"SCRIPT": str(REPO / script)} if script else {})),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,  # where ./output is
    )
    assert done.returncode == 0 and expected in done.stdout, done.stdout
