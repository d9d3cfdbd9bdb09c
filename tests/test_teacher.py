"""Students: rows with a teacher's answers, the loss that learns from them, and runs with --teacher: the same
on any number of processes, resumed to the bit, and clear about what does not fit.
"""

import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import TINY, all_tests, greatest_difference, read_logs, run, run_here, write_csv, write_rows

import train_mixer
from histocc.data.arrays import TEACHER_OUTPUTS, PreparedData
from histocc.data.dataset import RowEncoding
from histocc.formatter import PAD_IDX, hisco_blocky5
from histocc.job import teacher as asking
from histocc.model.loss import (
    MEAN,
    ROWS,
    BlockOrderInvariantLoss,
    DistillationLoss,
    LinearLoss,
    LossMixer,
    at_outputs,
)
from histocc.predict.coder import Coder
from histocc.runtime import checkpoint

COLUMNS = ["--target-cols", "hisco_1", "hisco_2", "--language-col", "lang"]
HEADER = ("occ1", "hisco_1", "hisco_2", "lang")
LOSSES = ("train_loss", "train_loss_linear", "train_loss_seq2seq", "val_loss")
EXACT = ["--dropout", "0", "--encoder-dropout", "0", "--float64", "--num-workers", "0"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Rows, and texts without labels: new ones, some twice, some that are trained or validated on."""
    folder = tmp_path_factory.mktemp("rows")
    train, val = write_rows(folder / "train.csv", 96), write_rows(folder / "val.csv", 24, 96)
    texts = [(f"farmer and weaver no {i}", "en") for i in range(40)]
    texts += [*texts[:5], ("WINE merchant no 1", "da"), ("wine  merchant no 1", "nl")]
    texts += [("tailor no 103", "da"), ("", "en")]
    return train, val, write_csv(folder / "texts.csv", ("occ1", "lang"), texts)


def flags(files, folder, *more):
    train, val, _ = files
    return ["--train-data", train, "--val-data", val, "--save-dir", folder, *COLUMNS, *TINY, *more]


@pytest.fixture(scope="module")
def teacher(files, tmp_path_factory):
    """A run that knows a little."""
    folder = tmp_path_factory.mktemp("teacher") / "run"
    more = ["--ngrams", "auto", "--batch-size", "32", "--num-epochs", "2", "--quiet"]
    run("train_mixer.py", *flags(files, folder, *more))
    return folder


def student(files, folder, teacher, *more):
    rest = ["--batch-size", "32", "--num-epochs", "2", "--log-interval", "1"]
    return flags(files, folder, "--teacher", teacher, "--unlabelled", files[2], *rest, *more)


# ---- the loss ----


def outputs(rows=6, codes=7, blocks=2, seed=0):
    torch.manual_seed(seed)
    target = torch.full((rows, blocks * 5 + 2), PAD_IDX)
    target[:, 0], target[:, -1], target[:, 1:6] = 2, 3, torch.randint(8, 18, (rows, 5))
    linear = F.one_hot(torch.randint(0, codes, (rows,)), codes).double()
    return torch.randn(rows, blocks * 5 + 1, 19).double(), torch.randn(rows, codes).double(), target, linear


def criterion(kind):
    return DistillationLoss(BlockOrderInvariantLoss(PAD_IDX, 2, 5), LinearLoss(kind), 0.3)


def of_teacher(*values):
    return dict(zip(DistillationLoss.batch_entries, values, strict=True))


@pytest.mark.parametrize("kind", [MEAN, ROWS])
def test_without_a_teacher_it_is_the_usual_loss(kind):
    loss_fn = criterion(kind)
    usual = LossMixer(loss_fn.loss_fn_seq2seq, loss_fn.loss_fn_linear, 0.3).per_sample(*outputs())
    found = loss_fn.per_sample(*outputs())
    assert all(torch.equal(found[name], usual[name]) for name in usual)
    codes, logits = torch.arange(7).expand(6, 7), torch.randn(6, 7)
    zero = loss_fn.per_sample(*outputs(), **of_teacher(codes, logits, torch.zeros(6), torch.ones(6)))
    assert all(torch.allclose(zero[name], usual[name], rtol=1e-12) for name in usual)


def test_the_soft_loss_is_the_cross_entropy_towards_the_teacher():
    """By hand, with every output of the teacher; and where both agree there is nothing to learn."""
    out, logits, target, linear = outputs()
    teacher, codes = torch.randn(6, 7).double(), torch.arange(7).expand(6, 7)
    weights = torch.ones(6), torch.full((6,), 0.25)
    found = criterion(ROWS).per_sample(out, logits, target, linear, **of_teacher(codes, teacher, *weights))
    single = F.binary_cross_entropy_with_logits(logits, teacher.sigmoid(), reduction="none").sum(1)
    ranked = -(teacher.softmax(1) * logits.log_softmax(1)).sum(1)
    assert torch.allclose(found["loss_linear"], single + ranked, rtol=1e-10)
    usual = criterion(ROWS).per_sample(out, logits, target, linear)
    assert torch.allclose(found["loss_seq2seq"], 0.25 * usual["loss_seq2seq"], rtol=1e-6)
    assert torch.allclose(found["loss"], 0.3 * found["loss_seq2seq"] + 0.7 * found["loss_linear"], rtol=1e-10)
    same = teacher.clone().requires_grad_()
    agreed = criterion(ROWS).per_sample(out, same, target, linear, **of_teacher(codes, teacher, *weights))
    agreed["loss_linear"].sum().backward()
    assert same.grad.abs().max() < 1e-12


def test_codes_that_the_student_lacks_are_left_out():
    codes, values = torch.tensor([[2, -1, 0], [-1, -1, 1]]), torch.tensor([[0.5, 9.0, 0.25], [9.0, 9.0, 1.0]])
    assert at_outputs(codes, values, 4).tolist() == [[0.25, 0, 0.5, 0], [0, 1, 0, 0]]


# ---- the rows ----


@pytest.fixture(scope="module")
def taught_run(files, teacher, tmp_path_factory):
    """A student's run, and what it said."""
    folder = tmp_path_factory.mktemp("student") / "run"
    return folder, run("train_mixer.py", *student(files, folder, teacher))


def taught_data(folder):
    state = checkpoint.load(os.path.join(folder, "last.bin"))
    return PreparedData.open(os.path.join(folder, "prepared", state["position"]["fingerprint"]))


def written_as(data, rows):
    """Return the sequences of codes that are given by their numbers, [N, S]; none: PAD alone."""
    formatter, none = hisco_blocky5(), [2, *[PAD_IDX] * 25, 3]
    labels = ["&".join(data.codes[number] for number in row if number >= 0) for row in rows]
    return np.array([formatter.transform_label(label) if label else none for label in labels])


def test_every_text_is_asked_and_none_that_is_validated_on(taught_run):
    data, said = taught_data(taught_run[0]), taught_run[1]
    assert len(data.train) == 96 + 41 and len(data.val) == 24
    assert "41 texts of 48 rows; left out: 5 repeated, 1 texts of labelled rows, 1 texts" in said
    assert "asked as unk: nl" in said and "1 × empty text" in said
    texts = data.train.strings(np.arange(len(data.train)))
    assert texts[96:] == [f"farmer and weaver no {i}" for i in range(40)] + ["wine  merchant no 1"]
    assert data.languages[data.train.language[-1]] == "nl"
    assert not set(data.val.strings(np.arange(24))) & set(texts)
    answers = data.train.teacher_of(np.arange(len(data.train)))
    assert answers["labelled"].tolist() == [True] * 96 + [False] * 41
    assert (data.train.codes[96:] == answers["written"][96:]).all()


def test_answers_are_those_of_both_decoders_of_the_teacher(taught_run, teacher):
    data, coder = taught_data(taught_run[0]), Coder.load(str(teacher))
    rows = np.arange(len(data.train))
    texts = data.train.strings(rows)
    languages = [data.languages[number] for number in data.train.language]
    logits, coded = coder.probabilities(texts, languages, logits=True), coder.code(texts, languages, "both")
    number = {code: i for i, code in enumerate(coder.codes)}
    for answer, one, row in zip(data.train.teacher_of(rows), coded, logits, strict=True):
        known = [code for code in one.codes if code in data.codes]
        assert [data.codes[i] for i in answer["written"] if i >= 0] == known
        assert answer["prob"] == pytest.approx(one.conf if known == one.codes else 0.0, rel=1e-4, abs=1e-6)
        asked = [number[data.codes[i]] for i in answer["codes"] if i >= 0]
        assert sorted(np.round(row[asked], 2)) == sorted(np.round(-np.sort(-row)[:TEACHER_OUTPUTS], 2))
        assert answer["logits"][: len(asked)] == pytest.approx(row[asked], rel=1e-3, abs=2e-3)


def test_a_batch_mixes_true_codes_and_the_teachers_by_epoch_and_row(taught_run):
    data = taught_data(taught_run[0])
    rows = asking.TaughtRows(data.train, data, RowEncoding(hisco_blocky5()), weight=0.5, seed=3)
    everyone = np.arange(len(data.train))
    batch = rows.batch(everyone, 0)
    again = rows.batch(everyone[::-1].copy(), 0)
    assert all(torch.equal(batch[name], again[name].flip(0)) for name in batch if name != "input_ids")
    assert batch["teacher_weights"].tolist() == [0.5] * 96 + [1.0] * 41
    answers = data.train.teacher_of(everyone)
    own, written = (written_as(data, codes) for codes in (data.train.codes, answers["written"]))
    drawn, sure = batch["seq2seq_weights"].numpy() == answers["prob"], answers["prob"][:96] > 0
    assert not drawn[:96][~sure].any() and 0.2 < drawn[:96][sure].mean() < 0.8 and drawn[96:].all()
    assert (batch["targets_seq2seq"].numpy() == np.where(drawn[:, None], written, own)).all()
    assert (batch["seq2seq_weights"].numpy()[~drawn] == 1).all()
    other = rows.batch(everyone, 1)["seq2seq_weights"].numpy()
    assert (other != batch["seq2seq_weights"].numpy()).any()
    piece = rows.piece(batch, np.array([1, 100]))
    assert torch.equal(piece["teacher_logits"], batch["teacher_logits"][[1, 100]])


def test_rows_with_codes_that_the_teacher_lacks_have_these_alone(taught_run, monkeypatch):
    data = taught_data(taught_run[0])
    code = int(data.train.codes[3, 0])
    monkeypatch.setitem(data.report["teacher"], "unknown_codes", [code])
    rows = asking.TaughtRows(data.train, data, RowEncoding(hisco_blocky5()), weight=1.0, seed=3)
    batch = rows.batch(np.arange(96), 0)
    own = (np.asarray(data.train.codes[:96]) == code).any(1)
    assert batch["teacher_weights"].tolist() == np.where(own, 0.0, 1.0).tolist() and 3 < own.sum() < 60
    targets = written_as(data, data.train.codes[:96])
    assert (batch["targets_seq2seq"].numpy()[own] == targets[own]).all()
    assert (batch["seq2seq_weights"].numpy()[own] == 1).all()


# ---- runs ----

# train_mixer.py with small pieces, which so many processes of each node answer
PIECES = """
import train_mixer
from histocc.job import teacher
from histocc.runtime import signals

teacher.PIECE, teacher.usable_cores = 16, lambda: {cores}
teacher.torch.get_num_threads = lambda: {cores}
if __name__ == "__main__":
    signals.start_listening()
    train_mixer.main()
"""


@pytest.mark.processes
def test_the_same_on_any_number_of_processes(files, teacher, tmp_path):
    """In nine pieces: by one process, by three forked ones of one, and by those of two ranks."""
    script, found = tmp_path / "pieces.py", []
    for processes, cores in ((None, 1), (None, 3), (2, 2)):
        script.write_text(PIECES.format(cores=cores))
        folder, more = tmp_path / f"{processes}_{cores}", ["--batch-size", 32 // (processes or 1), *EXACT]
        more += ["--prepare-only"] if cores == 3 or not all_tests() else []
        run(script, *student(files, folder, teacher, *more), processes=processes)
        [path] = folder.glob("prepared/*/train.teacher")
        found.append(path.read_bytes())
    assert found[0] == found[1] == found[2] and len(found[0]) == 137 * (16 * 6 + 5 * 4 + 4 + 1)
    if all_tests():
        assert greatest_difference(tmp_path / "None_1", tmp_path / "2_2", LOSSES) < 1e-9


@pytest.mark.processes
@pytest.mark.full
def test_resumed_to_the_bit(files, teacher, taught_run, tmp_path):
    folder = tmp_path / "run"
    run("train_mixer.py", *student(files, folder, teacher, "--max-steps", 4))
    said = run("train_mixer.py", *student(files, folder, teacher))
    assert "Teacher: its answers are in" in said
    first, resumed = (checkpoint.load(str(path / "last.bin"))["model"] for path in (taught_run[0], folder))
    assert all(torch.equal(first[name], resumed[name]) for name in first)
    assert greatest_difference(folder, taught_run[0], ["train_loss"]) == 0


@pytest.mark.full
def test_what_the_teacher_says_changes_what_is_learned(files, teacher, taught_run, tmp_path):
    """Also what n-grams are fitted to, which regression on its answers as if certain would overrule."""
    more = ["--distillation-weight", "0.9", "--ngrams", "auto", "--ngram-passes", "2"]
    said = run("train_mixer.py", *student(files, tmp_path / "run", teacher, *more))
    assert "Fitted in" in said and taught_data(tmp_path / "run").train.teacher is not None
    losses = [read_logs(folder)[-1]["train_loss_linear"] for folder in (tmp_path / "run", taught_run[0])]
    assert abs(losses[0] - losses[1]) > 1e-3 * losses[1]
    alone = student(files, tmp_path / "alone", teacher, "--ngrams", "auto", "--model-size", "ngrams")
    said = run("train_mixer.py", *alone)
    assert "Fitted in" in said and "ridge regression" not in said


def test_answers_that_are_there_are_not_asked_for_again(files, teacher, tmp_path, monkeypatch):
    """Work that ends in the middle is resumed; on macOS one process does it, on any number of cores."""
    monkeypatch.setattr(asking, "PIECE", 16)
    monkeypatch.setattr(asking, "usable_cores", lambda: 3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(sys, "platform", "darwin")
    asked, end_after = [], 3

    def answers(self, texts, languages, answer=asking.Teacher.answers):
        if len(asked) == end_after:
            raise asking.UserError("the end")
        asked.append(tuple(texts))
        return answer(self, texts, languages)

    monkeypatch.setattr(asking.Teacher, "answers", answers)
    command = student(files, tmp_path / "run", teacher, "--prepare-only")
    assert "the end" in run_here(train_mixer.main, *command, code=2)
    first, end_after = list(asked), 99
    asked.clear()
    run_here(train_mixer.main, *command)
    assert len(asked) == 6 and not set(first) & set(asked)
    asked.clear()
    assert "its answers are in" in run_here(train_mixer.main, *command) and not asked


def test_codes_and_systems_that_differ(files, teacher, tmp_path):
    """The teacher's codes come first; with a fixed key those that it lacks are counted; none in common is an
    error.
    """
    key = write_csv(tmp_path / "key.csv", ("system_code", "code"), [("61110", 0), ("41025", 1), ("99999", 2)])
    few = write_csv(tmp_path / "few.csv", HEADER, [("farmer", "61110", "", "en")] * 4)
    some = (few, few, files[2])
    said = run("train_mixer.py", *student(some, tmp_path / "fixed", teacher, "--key", key, "--prepare-only"))
    assert "6 of its codes are none of the student's" in said
    [path] = Path(tmp_path).glob("fixed/prepared/*/train.teacher")
    answers = PreparedData.open(str(path.parent)).train.teacher
    assert set(answers["codes"].ravel().tolist()) == {-1, 0, 1}
    said = run("train_mixer.py", *student(some, tmp_path / "first", teacher, "--max-steps", 1))
    assert "the first 8 those of the teacher" in said
    other = write_csv(tmp_path / "other.csv", ("system_code", "code"), [("99999", 0)])
    nine = write_csv(tmp_path / "nine.csv", HEADER, [("x", "99999", "", "en")])
    unknown = student((nine, nine, files[2]), tmp_path / "none", teacher, "--key", other)
    assert "with some of its 1 codes" in run_here(train_mixer.main, *unknown, code=2)


def test_a_student_cleans_texts_as_its_teacher(files, tmp_path):
    """Which it says in its own checkpoint, so that it can be resumed and codes as it was trained."""
    first, second = tmp_path / "first", tmp_path / "second"
    run("train_mixer.py", *flags(files, first, "--clean-text", "ascii-lower", "--max-steps", 1))
    for steps in (1, 2):
        said = run("train_mixer.py", *student(files, second, first, "--max-steps", steps))
    assert "its answers are in" in said and Coder.load(str(second)).text_rule == "ascii-lower"


def test_what_cannot_teach_is_refused(files, teacher, taught_run, tmp_path):
    lacking = write_csv(tmp_path / "texts.csv", ("text", "lang"), [("farmer", "en")])
    weights = checkpoint.load(str(teacher / "last.bin"))["model"]
    encoder = {name[8:]: value for name, value in weights.items() if name.startswith("encoder.")}
    torch.save(encoder, tmp_path / "encoder.bin")
    shutil.copytree(taught_run[0], tmp_path / "run")
    for more, message in (
        (["--unlabelled", files[2]], "--unlabelled needs --teacher"),
        (["--teacher", teacher, "--distillation-weight", 2], "--distillation-weight"),
        (["--teacher", tmp_path / "nowhere.bin"], "--teacher"),
        (["--teacher", teacher, "--unlabelled", lacking], "has no column 'occ1'"),
        (["--teacher", tmp_path / "encoder.bin"], "encoder"),
        (["--teacher", teacher, "--save-dir", teacher, "--overwrite"], "in the folder of the run itself"),
        (["--save-dir", tmp_path / "run", "--batch-size", 32, "--num-epochs", 2], "--teacher was"),
    ):
        assert message in run_here(train_mixer.main, *flags(files, tmp_path / "other", *more), code=2), more
