"""The examples: other models on the same trainer, on one process and several, killed and resumed."""

import numpy as np
import pytest
import torch
from helpers import (
    REPO,
    full,
    greatest_difference,
    read_logs,
    run,
    run_here,
    start_forked,
    state_of,
    wait_until,
)

from examples import train_from_config, train_llada, train_prs_med
from examples.scenes import Scenes
from examples.segmentation import overlap, structure_loss
from examples.text import DRAWS, MaskedDraws, MaskedWindows, Windows, read_data
from examples.transformer import SIZES, Transformer

pytestmark = pytest.mark.processes
WORDS = ["clerk", "of", "the", "mill", "wrote", "what", "man", "and", "woman", "did", "for", "a", "living"]
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
IMAGE_LOSSES = ("train_loss", "train_loss_mask", "val_loss", "dice", "iou", "answer_acc")
LOSSES = {
    "train_llada": ("train_loss", "val_loss", "bits_per_byte"),
    "train_prs_med": IMAGE_LOSSES,
    "train_from_config": IMAGE_LOSSES,
}
TEXT, *OTHERS = LOSSES


def text(number=4000, seed=0):
    return " ".join(np.random.default_rng(seed).choice(WORDS, number))


def bytes_of(text):
    return np.frombuffer(text.encode(), dtype=np.uint8)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder of two texts and a file that is none."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.txt").write_text(text(250))
    (folder / "inside").mkdir()
    (folder / "inside" / "b.txt").write_text(text(200, seed=1))
    (folder / "image.png").write_bytes(b"\x89PNG\0\0")
    folder.with_suffix(".toml").write_text(CONFIG)
    return folder


def flags_of(name, corpus):
    """(script, its flags) of a run of a few seconds."""
    of_script = {
        "train_llada": ["--data_dir", corpus, "--window", 32, "--val-windows", 2],
        "train_prs_med": ["--scenes", 60, "--val-scenes", 10, "--width", 16],
        "train_from_config": ["--config", corpus.with_suffix(".toml")],
    }
    return REPO / "examples" / f"{name}.py", [*of_script[name], *COMMON]


@pytest.fixture(scope="module")
def whole_runs(corpus, tmp_path_factory):
    """(name, number of processes) → the folder of its uninterrupted run, made when it is asked for."""
    made = {}

    def whole(name, processes=None):
        if (name, processes) not in made:
            made[name, processes] = folder = tmp_path_factory.mktemp(name) / "whole"
            script, flags = flags_of(name, corpus)
            if processes:
                run(script, *flags, "--save-dir", folder, processes=processes)
            else:
                run_here(globals()[name].main, *flags, "--save-dir", folder)
        return made[name, processes]

    return whole


@pytest.mark.parametrize("name", [TEXT, *map(full, OTHERS)])
class TestRuns:
    @pytest.mark.parametrize(
        "processes, more", [(2, []), full(2, ["--parallel", "fsdp"]), full(4, ["--batch-size", 2])]
    )
    def test_losses_are_those_of_one_process(self, name, processes, more, corpus, whole_runs, tmp_path):
        script, flags = flags_of(name, corpus)
        run(script, *flags, *more, "--save-dir", tmp_path / "run", processes=processes)
        assert greatest_difference(whole_runs(name), tmp_path / "run", LOSSES[name]) < 1e-9

    @pytest.mark.parametrize("processes", [None, full(2)])
    def test_killed_and_resumed_is_bitwise_equal(self, name, processes, corpus, whole_runs, tmp_path):
        script, flags = flags_of(name, corpus)
        flags = [*flags, "--save-dir", tmp_path / "run"]
        whole = whole_runs(name, processes)
        more = ["--distributed"] if processes else []
        ranks = start_forked(script, [*flags, *more], tmp_path / "said", processes)
        wait_until(lambda: list((tmp_path / "run").glob("[24].bin")), (tmp_path / "said").read_text, 120)
        for rank in ranks:
            rank.kill()
            rank.join()
        said = run(script, *flags, processes=processes)
        assert all(x in said for x in ("Resuming from step", "Dataset: ", "Model: ", "Model parameters: "))
        states, logs, epochs = [], [], []
        for folder in (whole, tmp_path / "run"):
            states.append(state_of(folder))
            columns = ("step", "train_loss", "val_loss", "samples")
            logs.append([[row[column] for column in columns] for row in read_logs(folder)])
            epochs.append(sorted(path.name for path in folder.glob("*.pt")))
        assert states[0]["step"] == states[1]["step"] and logs[0] == logs[1]
        assert epochs[0] == epochs[1] == ["checkpoint_epoch_1.pt", "checkpoint_epoch_2.pt"]
        held = [[state["model"], state["optimizer"]["state"]] for state in states]
        torch.testing.assert_close(*held, rtol=0, atol=0)


class TestText:
    def test_epoch_checkpoints_have_the_name_that_other_scripts_read(self, whole_runs):
        state = state_of(whole_runs(TEXT), "checkpoint_epoch_1.pt")
        Transformer(*SIZES["tiny"]).double().load_state_dict(state["model_state_dict"])

    def test_the_weights_of_masked_tokens_add_up_to_one_on_average(self):
        def totals(batch):
            return (batch["masked"] * batch["weight"][:, None]).sum(1)

        data = bytes_of(text(20000))
        rows, draws = MaskedWindows(data, 32, seed=5), MaskedDraws(data, 32, most=40)
        total = totals(rows.batch(np.arange(len(rows)), 3))
        assert abs(total.mean() - 1) < 4 * total.std() / len(total) ** 0.5 and total.std() > 0.1
        drawn = draws.batch(np.arange(len(draws)), 0)
        assert torch.allclose(totals(drawn), torch.ones(40 * DRAWS).double())
        counts = drawn["masked"].sum(1).reshape(40, DRAWS).sort(1).values
        assert (counts == torch.arange(1, 33)).all()

    def test_masks_are_a_function_of_seed_epoch_and_row(self):
        rows, numbers = MaskedWindows(bytes_of(text()), 64, seed=5), np.arange(40)
        one, again = rows.batch(numbers, 1), rows.batch(numbers[::-1].copy(), 1)
        assert all(torch.equal(one[name], again[name].flip(0)) for name in one)
        assert not torch.equal(one["masked"], rows.batch(numbers, 2)["masked"])
        other = MaskedWindows(bytes_of(text()), 64, seed=6)
        assert not torch.equal(one["masked"], other.batch(numbers, 1)["masked"])

    def test_windows_are_the_text(self, corpus):
        train, val, *_, files = read_data([str(corpus)])
        rows = Windows(val, 16)
        tokens = rows.batch(np.arange(len(rows)), 0)["tokens"].flatten().numpy()
        assert (tokens == val[: len(tokens)]).all() and len(val) - len(tokens) < 16
        assert abs(len(val) / (len(train) + len(val)) - 0.1) < 0.01 and "left out: image.png" in files

    def test_tokens_are_the_arrays_of_a_folder(self, tmp_path):
        (tmp_path / "metadata.json").write_text('{"vocab_size": 5000}')
        for i in range(2):
            np.save(tmp_path / f"shard_{i}.npy", np.arange(i, 5000, 2, dtype=np.uint16).reshape(50, 50))
        train, val, *_ = read_data([str(tmp_path)])
        assert sorted([*train, *val]) == list(range(5000)) and len(val) == 500
        np.save(tmp_path / "val.npy", np.arange(300))
        flags = ["--data_dir", tmp_path, "--max-steps", 1, "--val-windows", 1, "--sample", 3]
        flags += ["--window", 16, "--global-batch-size", 4]
        said = run_here(train_llada.main, *flags, "--device", "cpu", "--save-dir", tmp_path / "run")
        assert "5,000 tokens for training, 300 for validation" in said and "bits_per_token" in said

    def test_an_autoregressive_model_sees_nothing_ahead(self):
        torch.manual_seed(0)
        tokens = torch.randint(0, 256, (2, 20))
        other = tokens.clone()
        other[:, 12:] = 7
        for causal in (True, False):
            model = Transformer(*SIZES["tiny"], causal=causal)
            assert torch.equal(model(tokens)[:, :12], model(other)[:, :12]) == causal

    @pytest.mark.full
    @pytest.mark.parametrize("objective", ["autoregressive", "diffusion"])
    def test_going_on_from_weights_and_sampling(self, corpus, tmp_path, objective):
        script, flags = flags_of(TEXT, corpus)
        more = [*flags, "--objective", objective, "--sample", 30, "--save-dir"]
        said = run(script, *more, tmp_path / "first")
        assert "bits_per_byte" in said and len(said.split("best.bin)\n")[-1].encode()) > 30
        again = run(script, *more, tmp_path / "first")  # nothing left to train
        assert "nothing to do" in again and again[-30:] == said[-30:]
        run(script, *more, tmp_path / "second", "--model-name", tmp_path / "first")
        first, second = (read_logs(tmp_path / name)[0]["train_loss"] for name in ("first", "second"))
        assert second < first
        assert "validation at step" in run(script, *more, tmp_path / "first", "--eval-only")


class TestImages:
    def test_structure_loss_is_that_of_its_formula(self):
        generator = torch.Generator().manual_seed(1)
        logits = torch.randn(2, 40, 40, generator=generator).double()
        mask = (torch.randn(2, 40, 40, generator=generator) > 0.5).double()
        for loss, x, m in zip(structure_loss(logits, mask), logits, mask):
            padded = torch.zeros(70, 70).double()
            padded[15:55, 15:55] = m
            mean = padded.unfold(0, 31, 1).unfold(1, 31, 1).sum((2, 3)) / 31**2
            w, p = 1 + 5 * (mean - m).abs(), x.sigmoid()
            entropy = -(w * (m * p.log() + (1 - m) * (1 - p).log())).sum() / w.sum()
            both = (w * p * m).sum()
            assert abs(loss - (entropy + 1 - (both + 1) / ((w * (p + m)).sum() - both + 1))) < 1e-12

    def test_overlap(self):
        mask = torch.tensor([[[1.0, 1], [0, 0]], [[0, 0], [0, 0]]])
        dice, iou = overlap(torch.tensor([[[5.0, -5], [5, -5]], [[-1, -1], [-1, -1]]]), mask)
        assert dice.tolist() == [0.5, 1] and iou.tolist() == [1 / 3, 1]

    def test_scenes_are_a_function_of_seed_and_row(self):
        scenes, numbers = Scenes(50, 3), np.arange(50)
        one, again = scenes.batch(numbers, 0), Scenes(50, 3).batch(numbers[::-1].copy(), 7)
        assert all(torch.equal(one[name], again[name].flip(0)) for name in one if name != "modality_weight")
        weights = [batch["modality_weight"].unique().tolist() for batch in (one, again)]
        assert weights == [[0.5], [0.0]]
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
        batch = scenes.batch(np.arange(30), 0)
        lines = ["image,mask,question,answer"]
        for i in range(30):
            pixels = (batch["image"][i].permute(1, 2, 0) * 255).byte().numpy()
            image.fromarray(pixels).save(tmp_path / f"{i}.png")
            image.fromarray((batch["mask"][i] * 255).byte().numpy()).save(tmp_path / f"m{i}.png")
            lines.append(f'{i}.png,m{i}.png,"{scenes.asked(i)}",{scenes.answers[batch["answer"][i]]}')
        (tmp_path / "questions.csv").write_text("\n".join(lines))
        flags = ["--data_root", tmp_path, "--width", 16, *COMMON, "--checkpoint_dir"]
        said = run(REPO / "examples" / "train_prs_med.py", *flags, tmp_path / "run")
        assert "dice" in said and "Finished at step" in said
        (tmp_path / "m3.png").unlink()
        image.new("RGB", (32, 64)).save(tmp_path / "14.png")
        (tmp_path / "25.png").write_bytes(b"none")
        for rows, name, expected in (
            (slice(0, 5), "m3.png", "no such file"),
            (slice(10, 16), "14.png", "the same size"),
            (slice(20, 30), "25.png", "cannot be read as an image"),
        ):
            (tmp_path / "questions.csv").write_text("\n".join([lines[0], *lines[1:][rows]]))
            said = run_here(train_prs_med.main, *flags, tmp_path / "bad", code=2)
            assert name in said and expected in said and not (tmp_path / "bad").exists()


LLADA, IMAGES, CONFIGURED = train_llada.main, train_prs_med.main, train_from_config.main


@pytest.mark.parametrize(
    "main, flags, expected",
    [
        (LLADA, ["--data_dir", "{}/empty"], "empty: no text there"),
        (LLADA, ["--data_dir", "{}/short.txt"], "fewer than a window of 64"),
        (LLADA, ["--data_dir", "{}/short.txt", "{}/latin/a.npy"], "a.npy: is a binary file, not text"),
        (LLADA, ["--data_dir", "{}/latin"], "latin/metadata.json: arrays of tokens need this file"),
        (LLADA, ["--data_dir", "{}/short"], "short/a.npy: holds ids from 0 to 6, outside a vocabulary of 5"),
        (LLADA, ["--model_name", "{}/empty"], "--model-name {}/empty: no checkpoint there"),
        (IMAGES, ["--image_size", "64"], "images keep their size; resize the files"),
        (IMAGES, ["--data_root", "{}/empty"], "empty/questions.csv: no such file"),
        (IMAGES, ["--data_root", "{}/latin"], "latin/questions.csv: cannot be read as CSV in UTF-8"),
        (IMAGES, ["--data_root", "{}/short"], "short/questions.csv, row 2: no value question, answer"),
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
        np.save(tmp_path / name / "a.npy", np.arange(7))
    (tmp_path / "short" / "metadata.json").write_text('{"vocab_size": 5}')
    if flags[:1] == ["--config"]:
        (tmp_path / "c.toml").write_text(CONFIG.replace('"examples.segmentation:Segmenter"', flags[1]))
        flags = ["--config", "{}/c.toml"]
    before = sorted(tmp_path.rglob("*"))
    flags = [flag.format(tmp_path) for flag in flags]
    said = run_here(main, *flags, "--device", "cpu", "--save-dir", tmp_path / "run", code=2)
    assert expected.format(tmp_path) in said
    assert sorted(tmp_path.rglob("*")) == before


def test_another_run_in_the_folder_is_named(whole_runs):
    said = run_here(train_prs_med.main, *COMMON, "--save-dir", whole_runs(TEXT), code=2)
    assert "script was 'train_llada.py', now it is 'train_prs_med.py'" in said
