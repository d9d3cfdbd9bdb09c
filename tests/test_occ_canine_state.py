"""The object as a whole: copies, threads that share it, and what fine-tuning that does not end leaves."""

# ruff: noqa: F811

import copy
import multiprocessing
import os
import pickle
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from helpers import write_rows
from second_device import DEVICE, second_device
from test_occ_canine_arguments import LANGUAGES, TEXTS, coder, no_pandas  # noqa: F401
from test_predict import CODES, make_model, model  # noqa: F401  a checkpoint of random weights

from histocc import occ_canine
from histocc.formatter import hisco_blocky5
from histocc.occ_canine import OccCANINE
from histocc.predict.coder import Coder
from histocc.runtime.errors import UserError
from histocc.runtime.signals import Stopped, stop_request

# ---- copies


def same(one: OccCANINE, other: OccCANINE) -> bool:
    return all(
        one.predict(TEXTS, LANGUAGES, prediction_type=kind)
        == other.predict(TEXTS, LANGUAGES, prediction_type=kind)
        for kind in ("greedy", "flat", "topk")
    )


def test_copies_give_the_same_codes(coder):
    coder.predict(TEXTS, prediction_type="topk")  # what is computed once is not carried along
    for other in (pickle.loads(pickle.dumps(coder)), copy.deepcopy(coder)):
        assert same(coder, other) and repr(other) == repr(coder) and other.codes == coder.codes
        assert other.model is other.coder.model is not coder.model
        other.batch_size = 1
        assert coder.batch_size == coder.coder.batch_size == 2 and other.coder.batch_size == 1
    weights = sum(value.numel() * value.element_size() for value in coder.model.state_dict().values())
    assert len(pickle.dumps(coder)) < 1.3 * weights + 300_000


def test_a_copy_whose_gpu_is_not_there_is_on_the_cpu(coder):
    other = OccCANINE.__new__(OccCANINE)
    with pytest.warns(UserWarning, match="was on cuda:99, is on the CPU now"):
        other.__setstate__({**pickle.loads(pickle.dumps(coder)).__getstate__(), "device": "cuda:99"})
    assert other.device == other.coder.device == torch.device("cpu") and same(coder, other)


def test_weights_of_another_device_are_copied_to_the_cpu(monkeypatch):
    key = {code: i for i, code in enumerate(CODES)}
    state = {"key": key, "languages": ["unk", "da", "en"], "config": {"max_len": 128, "text": "as-is"}}
    expected = Coder(make_model(), hisco_blocky5(), state).code(TEXTS, LANGUAGES)
    with second_device(monkeypatch):
        there = Coder(make_model().to(DEVICE), hisco_blocky5(), state)
        pickled = pickle.dumps(there)
        assert all(value.device == DEVICE for value in there.model.state_dict().values())
    back = pickle.loads(pickled)
    assert back.device == torch.device("cpu") and back.code(TEXTS, LANGUAGES) == expected


@pytest.mark.processes
def test_another_process_gets_it(coder):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(coder.predict, (TEXTS, LANGUAGES), {"get_dict": True})
    for row, expected in zip(found, coder.predict(TEXTS, LANGUAGES), strict=True):
        assert row == {
            name: pytest.approx(value, rel=1e-4) if isinstance(value, float) else value
            for name, value in expected.items()
        }


# ---- threads


def test_threads_take_turns(model):  # noqa: F811
    coder = OccCANINE(model, device="cpu", batch_size=1)
    texts = [f"smed {i}" for i in range(6)]
    expected, inside, most = coder.predict(texts, "da"), [], []

    def check():  # before each batch
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.01)
        inside.pop()

    coder.coder.check = check
    coder.model.train()  # in evaluation mode only while codes are computed
    found = [None] * 3

    def predict(i):
        found[i] = coder.predict(texts, "da")

    threads = [threading.Thread(target=predict, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for size in (3, 2, 1) * 5:  # changed while they run
        coder.batch_size = size
        time.sleep(0.005)
    for thread in threads:
        thread.join()
    assert max(most) == 1 < len(most) and coder.model.training
    for rows in found:
        assert [row["hisco_1"] for row in rows] == [row["hisco_1"] for row in expected]
        assert [row["conf"] for row in rows] == pytest.approx([row["conf"] for row in expected], rel=1e-3)


# ---- fine-tuning


def test_arguments_of_finetune(coder, tmp_path):
    data = write_rows(tmp_path / "data.csv", 20)
    wrong = {
        "save_path": b"x",
        "input_col": ["occ1"],
        "target_cols": {"a"},
        "num_epochs": "",
        "language": b"en",
    }
    for name, value in {**wrong, "freeze_encoder": "no", "initial_checkpoint": False}.items():
        with pytest.raises(UserError, match=f"'{name}': "):
            coder.finetune(data, **{"save_path": tmp_path / "out", name: value})
    for name in ("help", "version", "foo"):
        with pytest.raises(UserError, match=f"'{name}': there is no such flag"):
            coder.finetune(data, save_path=tmp_path / "out", **{name: True})
    with pytest.raises(UserError, match="'num_epoch': there is no such flag; the nearest is 'num_epochs'"):
        coder.finetune(data, num_epoch=3)
    for dataset in (None, [1], {"occ1": ["a"]}, 3, object()):
        with pytest.raises(UserError, match="^dataset: "):
            coder.finetune(dataset, save_path=tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["data.csv"]


@pytest.mark.frames
def test_frames_that_are_no_data_set(coder, tmp_path):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"occ1": ["a"], "hisco_1": ["22222"]})
    for dataset in (pandas.DataFrame(), frame[:0], pandas.concat([frame, frame], axis=1)):
        with pytest.raises(UserError, match="DataFrame.csv"):
            coder.finetune(dataset, save_path=tmp_path / "out")


def test_what_is_none_is_not_given(coder, tmp_path, monkeypatch):
    given, data = [], write_rows(tmp_path / "data.csv", 20)
    monkeypatch.setattr(OccCANINE, "_train", lambda self, args, device: given.append(args))
    none = {"initial_checkpoint": None, "device": None}
    coder.finetune(
        data,
        tmp_path / "out",
        language="da",
        language_col="lang",
        target_cols="hisco_1",
        num_epochs=2,
        **none,
    )
    args = given[0]
    assert (args.initial_checkpoint, args.num_epochs, args.device) == (coder.file, 2, "cpu")
    assert (args.language, args.language_col, args.target_cols) == (None, "lang", ["hisco_1"])


@pytest.mark.parametrize("how", ["error", "signal", "stop_after", "damaged"])
def test_the_weights_stay_where_finetuning_does_not_end(model, tmp_path, monkeypatch, how):  # noqa: F811
    coder = OccCANINE(model, device="cpu")
    expected = coder.predict(TEXTS, LANGUAGES)
    other = tmp_path / "out"

    def ends(*_):
        other.mkdir(exist_ok=True)
        (other / "last.bin").write_bytes(
            b"half a file" if how == "damaged" else (Path(model) / "last.bin").read_bytes()
        )
        if how == "error":
            raise RuntimeError("out of memory")
        if how == "signal":
            stop_request().signal = signal.SIGINT
        if how in ("signal", "stop_after"):
            stop_request().deadline = 0.0
            raise Stopped

    monkeypatch.setattr(occ_canine.train, "train", ends)

    def finetune():
        coder.finetune(write_rows(tmp_path / "data.csv", 20), other, target_cols=["hisco_1"], share_val=0)

    if how == "stop_after":
        with pytest.warns(UserWarning, match="stopped by --stop-after: these are the weights from before"):
            finetune()
    elif how == "signal":
        with pytest.raises(KeyboardInterrupt), pytest.warns(UserWarning, match="stopped by SIGINT"):
            finetune()
    else:
        with pytest.raises({"error": RuntimeError, "damaged": UserError}[how]):
            finetune()
    assert (coder.name, coder.file) == (model, f"{model}/last.bin")
    assert coder.predict(TEXTS, LANGUAGES) == expected
