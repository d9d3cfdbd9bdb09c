"""Nothing that worked on one process breaks with several: proved by running it.

Runs under pytest, and on its own: `python tests/test_multi_gpu_compatibility.py`.
"""

import argparse
import inspect
import os
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import numpy as np
import torch
from helpers import (
    FINETUNE,
    REPO,
    TINY,
    all_tests,
    ended,
    free_port,
    read_logs,
    run,
    run_here,
    start_forked,
    write_rows,
)
from torch import nn

import finetune
import train_mixer
from histocc import (
    BlockOrderInvariantLoss,
    LossMixer,
    OrderInvariantSeq2SeqCrossEntropy,
    Seq2SeqMixerOccCANINE,
)
from histocc.formatter import PAD_IDX, hisco_blocky5
from histocc.model.mixer import model_config
from histocc.seq2seq_mixer_engine import evaluate, train, train_one_epoch

SCRIPTS = (
    (finetune, ["--dataset", "x"]),
    (train_mixer, ["--train-data", "x", "--val-data", "y", "--save-dir", "z"]),
)
# values of flags that take neither a number nor one of a list
OF_A_KIND = {"config": [str(REPO / "configs/published_size.toml")], "encoding": ["cp850"], "recode": ["1=2"]}
OF_A_KIND |= {"leave_out": ["source=Lund"], "seq2seq_weight": ["0.7"], "share_val": ["0.7"]}


def test_every_flag_takes_hyphens_or_underscores():
    for script, required in SCRIPTS:
        parser = script.get_args_parser()
        shown = parser.format_help(True)
        for action in parser._actions:
            if action.dest in ("help", "version") or action.help == argparse.SUPPRESS:
                continue
            fraction = action.type is not None and isinstance(action.default, float)
            value = ["0.7"] if fraction else ["7"]
            value = [] if action.nargs == 0 else [action.choices[-1]] if action.choices else value
            value = OF_A_KIND.get(action.dest, value)
            assert not action.option_strings or action.option_strings[0] in shown and action.help
            for flag in (x for x, of in parser._option_string_actions.items() if of is action):
                spelled = "--" + flag[2:].replace("-", "_")
                ways = [[flag, *value], [spelled, *value], *([[f"{spelled}={value[0]}"]] if value else [])]
                first, *others = (vars(parser.parse_args([*required, *way])) for way in ways)
                assert all(other == first for other in others) and first[action.dest] != action.default


def test_values_keep_their_underscores_and_signs():
    line = "--dataset d --save_path=my_out/_x --target_cols a_b c_d --missing_code -1"
    args = finetune.get_args_parser().parse_args(line.split())
    assert (args.save_path, args.target_cols, args.missing_code) == ("my_out/_x", ["a_b", "c_d"], "-1")


def test_engine_signatures_keep_their_names():
    names = ["model", "data_loader", "loss_fn", "optimizer", "device", "scheduler", "current_step"]
    parameters = inspect.signature(train_one_epoch).parameters
    assert list(parameters)[:7] == names
    defaults = {"epoch": 0, "log_interval": 100, "distributed": False, "is_main_process": True, "world": None}
    for name, default in defaults.items():
        assert parameters[name].default == default
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
    names = [name.replace("data_loader", "data_loaders") for name in names[:6]]
    assert list(inspect.signature(train).parameters)[:6] == names


def test_arguments_of_other_engines_are_named_with_what_to_pass():
    told = {"save_dir": "pass save=", "scaler": "pass precision=", "x": "leave it out"}
    for call, count in ((train_one_epoch, 7), (evaluate, 4), (train, 7)):
        for name, instead in told.items():
            try:
                said = str(call(*[None] * count, **{name: None}))
            except TypeError as error:
                said = str(error)
            assert f"{call.__name__}() has no {name}: {instead}" in said


def hand_made_batches(n_batches=3, rows=4):
    """Batches as any DataLoader of the published kind gives them: four tensors, nothing else."""
    generator = torch.Generator().manual_seed(0)
    formatter = hisco_blocky5()
    labels = map(formatter.transform_label, ("61110", "41025&83110", "-1", "80110"))
    targets = torch.from_numpy(np.stack([*labels]))
    for _ in range(n_batches):
        yield {
            "input_ids": torch.randint(97, 123, (rows, 32), generator=generator),
            "attention_mask": torch.ones(rows, 32),
            "targets_seq2seq": targets,
            "targets_linear": torch.eye(rows),
        }


def parts():
    torch.manual_seed(0)
    model = Seq2SeqMixerOccCANINE(hisco_blocky5().num_classes, 4, config=model_config("tiny"))
    sequences = BlockOrderInvariantLoss(PAD_IDX, nb_blocks=5, block_size=5)
    loss_fn = LossMixer(sequences, nn.BCEWithLogitsLoss(), seq2seq_weight=0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, loss_fn, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def test_one_step_alone_is_the_plain_step():
    """The engine's step is the textbook one: mean loss, backward, clip at 1, AdamW."""
    (model, loss_fn, optimizer, scheduler), (plain, _, plain_optimizer, _) = parts(), parts()
    batch = next(hand_made_batches())
    torch.manual_seed(1)
    rows = []
    train_one_epoch(model, [batch], loss_fn, optimizer, "cpu", scheduler, 0, log_interval=1, log=rows.append)
    assert len(rows) == 1
    plain.train()
    target = batch["targets_seq2seq"].long()
    torch.manual_seed(1)
    given = target[:, :-1]
    outputs = plain(batch["input_ids"], batch["attention_mask"], given, None, given == PAD_IDX)
    loss_fn(*outputs, target, batch["targets_linear"]).backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    plain_optimizer.step()
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(model.parameters(), plain.parameters()))


def test_any_model_and_criterion_of_the_same_shape_run():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.seq, self.flat = nn.Embedding(20, 19), nn.Linear(1, 4)

        def forward(self, input_ids, attention_mask, target, target_mask, target_padding_mask):
            return self.seq(target), self.flat(attention_mask.float().mean(1, keepdim=True))

    class Criterion(nn.Module):  # a plain mean, as other projects write it
        def forward(self, out_seq2seq, out_linear, target_seq2seq, target_linear):
            sequences = OrderInvariantSeq2SeqCrossEntropy(PAD_IDX)(out_seq2seq, target_seq2seq)
            return sequences + nn.BCEWithLogitsLoss()(out_linear, target_linear)

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = list(hand_made_batches(8))
    first = evaluate(model, batches, Criterion(), "cpu")["val_loss"]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    loaders = {"data_loader_train": batches}
    last = train(model, loaders, Criterion(), optimizer, "cpu", schedule, total_steps=16)
    assert last == 16 and evaluate(model, batches, Criterion(), "cpu")["val_loss"] < first


def test_the_same_command_runs_on_one_process_and_on_two():
    """finetune.py: plain, with the variables of torchrun, and ranks started by hand with --local_rank as
    launchers before torchrun pass it.
    """
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--dataset", write_rows(Path(folder) / "d.csv", 40), "--target-cols", "hisco_1", *TINY]
        flags += ["--formatter", "hisco", "--num-epochs", 1, "--global-batch-size", 16, "--log-interval", 1]
        flags += ["--encoder-dropout", 0, "--float64"]
        said = {"one": run_here(finetune.main, *flags, "--save-path", f"{folder}/one")}
        if all_tests():
            said["two"] = run(FINETUNE, *flags, "--save-path", f"{folder}/two", processes=2)
        common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        flags += ["--save-path", f"{folder}/hand", "--distributed"]
        log = Path(folder) / "log"
        ranks = []
        for r in (0, 1):
            ranks += start_forked(FINETUNE, [*flags, f"--local_rank={r}"], log, RANK=str(r), **common)
        codes, said["hand"] = ended(ranks, 240), log.read_text()
        assert codes == [0, 0], said["hand"]
        for name, output in said.items():  # rank 0 alone speaks
            for words in ("Distributed environment: MULTI_CPU", "Backend: gloo"):
                assert output.count(words) == (name != "one")
        one, *others = ([row["train_loss"] for row in read_logs(f"{folder}/{name}")] for name in said)
        assert all(np.allclose(one, other, rtol=1e-9, atol=0) for other in others)
        assert os.path.isfile(f"{folder}/hand/best.bin")


def main() -> int:
    """All tests of this file, by pytest where it is installed and one after the other where it is not; the
    exit code.
    """
    try:
        import pytest
    except ImportError:
        tests = [value for name, value in globals().items() if name.startswith("test_")]
        for test in tests:
            test()
            print(f"{test.__name__}: passed", flush=True)
        print(f"{len(tests)} passed")
        return 0
    return pytest.main(["-p", "no:cacheprovider", "-v", "--rootdir", str(REPO), __file__])


if __name__ == "__main__":
    sys.exit(main())
