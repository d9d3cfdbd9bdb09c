"""What a run takes from the weights that it starts from: text rule, key, linear decoder; and how it is
resumed.
"""

import json

import pytest
import torch
from helpers import FINETUNE, TRAIN_MIXER, run, run_inside, words, write_csv, write_rows

import finetune
from histocc import export
from histocc.evaluate import __main__ as evaluate
from histocc.formatter import BlockyFormatter, hisco_key
from histocc.job import data as job_data
from histocc.model.mixer import Seq2SeqMixerOccCANINE, model_config
from histocc.published import models
from histocc.runtime.errors import UserError

TITLES = [
    ("Væver", "75400"),
    ("Smed og Gårdmand", "83110"),
    ("WINE MERCHANT", "41025"),
    ("Tjenestepige", "54020"),
    ("Høker", "41030"),
]
SMALL = words(
    "--device cpu --num-epochs 1 --batch-size 16 --learning-rate 1e-9 --share-val 0.3 --log-interval 1"
    " --save-interval 2 --ngrams none"
)


def titles(path, n=48, more=()):
    """Rows with capitals and national letters; `more`: further pairs of a text and a code."""
    pairs = [*TITLES, *more]
    return write_csv(
        path,
        ("occ1", "hisco_1", "lang"),
        [(f"{pairs[i % len(pairs)][0]} {i}", pairs[i % len(pairs)][1], "da") for i in range(n)],
    )


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A file as the published HISCO models are: 1,919 outputs and no key."""
    torch.manual_seed(1)
    model = Seq2SeqMixerOccCANINE(BlockyFormatter("hisco").num_classes, 1919, config=model_config("tiny"))
    path = tmp_path_factory.mktemp("published") / "hisco.bin"
    torch.save({"model": model.state_dict(), "step": 1}, path)
    return str(path)


def rows_of(state, codes):
    return torch.stack([state["model"]["linear_decoder.weight"][state["key"][code]] for code in codes])


@pytest.mark.processes
@pytest.mark.full
def test_a_published_model_keeps_its_outputs_and_its_text_rule(published, tmp_path):
    data = titles(tmp_path / "data.csv", more=[("Maskinfører", "99998")])
    common = [
        "--dataset",
        data,
        *words("--formatter hisco --target-cols hisco_1 --language-col lang --initial-checkpoint"),
        published,
        *SMALL,
    ]
    output = run(FINETUNE, *common, "--save-path", tmp_path / "out", "--max-steps", 1)
    assert (
        "Codes: 1,920 (hisco, columns hisco_1), the first 1,919 those of the initial checkpoint" in output
        and "Texts: ascii-lower" in output
    )
    assert (
        "1,919 of 1,920 codes keep their weights in the linear decoder" in output
        and "; texts: ascii-lower" in output
    )
    output = run(FINETUNE, *common, "--save-path", tmp_path / "out")  # resumed, from the run's own files
    assert "Resuming from step 1" in output and "Finished at step" in output
    state, first = (
        torch.load(path, weights_only=True) for path in (tmp_path / "out" / "last.bin", published)
    )
    assert (
        list(state["key"]) == [*hisco_key(), "99998"]
        and state["config"]["text"] == "ascii-lower"
        and state["kept_codes"] == 1919
    )
    assert not state["config"]["memory_mask"] and state["config"]["target_mask"]
    assert torch.allclose(rows_of(state, hisco_key()), first["model"]["linear_decoder.weight"], atol=1e-6)
    (prepared,) = (tmp_path / "out" / "prepared").glob("*/train.chars")
    assert (
        bytes(prepared.read_bytes()[::4]).decode().islower()
        and b"v\0\0\0a\0\0\0e\0\0\0v\0\0\0e\0\0\0r" in prepared.read_bytes()
    )

    output = run(
        FINETUNE,
        *common,
        "--save-path",
        tmp_path / "small",
        *words("--shrink-key --clean-text as-is --max-steps 1"),
    )
    state = torch.load(tmp_path / "small" / "last.bin", weights_only=True)
    assert (
        sorted(state["key"]) == sorted({code for _, code in TITLES} | {"99998"})
        and state["config"]["text"] == "as-is"
    )
    assert torch.allclose(
        rows_of(state, ["75400", "41030"]),
        rows_of({**first, "key": {c: i for i, c in enumerate(hisco_key())}}, ["75400", "41030"]),
        atol=1e-6,
    )
    stripped = write_csv(
        tmp_path / "key.csv",
        ["hisco", "code"],
        [(code.lstrip("0") if code != "00000" else code, i) for i, code in enumerate(hisco_key())],
    )
    run(
        FINETUNE,
        *[titles(tmp_path / "known.csv") if part == data else part for part in common],
        "--save-path",
        tmp_path / "keyed",
        "--key",
        stripped,
        "--max-steps",
        1,
    )
    keyed = torch.load(tmp_path / "keyed" / "last.bin", weights_only=True)  # as spreadsheets leave a key
    assert list(keyed["key"]) == list(hisco_key())
    assert torch.allclose(
        keyed["model"]["linear_decoder.weight"], first["model"]["linear_decoder.weight"], atol=1e-6
    )
    assert "5 of 6 codes keep their weights" in output and "the first" not in output
    assert "--shrink-key was True, now it is False" in run(
        FINETUNE, *common, "--save-path", tmp_path / "small", "--clean-text", "as-is", code=2
    )
    said = run(
        FINETUNE,
        *common,
        "--save-path",
        tmp_path / "out",
        *words("--memory-mask --published-target-mask --clean-text as-is"),
        code=2,
    )
    assert (
        "--memory-mask was False, now it is True" in said
        and "--published-target-mask was False, now it is True" in said
    )
    assert "--clean-text was 'ascii-lower', now it is 'as-is'" in said


@pytest.mark.processes
@pytest.mark.full
def test_a_key_names_the_outputs_of_a_file_that_holds_none(tmp_path):
    torch.manual_seed(1)
    codes = [code for _, code in TITLES] + ["00000"]
    model = Seq2SeqMixerOccCANINE(BlockyFormatter("hisco").num_classes, 6, config=model_config("tiny"))
    torch.save({"model": model.state_dict()}, tmp_path / "six.bin")
    key = write_csv(
        tmp_path / "key.csv", ["system_code", "code"], [(code, i) for i, code in enumerate(codes)]
    )
    other = write_csv(
        tmp_path / "other.csv", ["system_code", "code"], [(code, i) for i, code in enumerate(codes[:4])]
    )
    common = [
        "--dataset",
        titles(tmp_path / "data.csv"),
        *words("--formatter hisco --target-cols hisco_1 --language da"),
        *SMALL,
        "--initial-checkpoint",
        tmp_path / "six.bin",
    ]
    output = run(FINETUNE, *common, "--save-path", tmp_path / "out", "--key", key)
    state = torch.load(tmp_path / "out" / "last.bin", weights_only=True)
    assert list(state["key"]) == codes and "the key differs" not in output
    assert torch.allclose(state["model"]["linear_decoder.weight"], model.linear_decoder.weight, atol=1e-6)
    said = run(FINETUNE, *common, "--save-path", tmp_path / "no", "--key", other, code=2)
    assert "has 6 outputs, and its key 4 codes: name the key that belongs to it" in said
    output = run(FINETUNE, *common, "--save-path", tmp_path / "none", "--max-steps", 1)
    assert "0 of 5 codes keep their weights" in output and "--initial-key names its codes" in output
    state = run(
        FINETUNE, *common, "--save-path", tmp_path / "added", *words("--max-steps 1 --initial-key"), key
    ) and torch.load(tmp_path / "added" / "last.bin", weights_only=True)
    assert list(state["key"]) == codes  # and new ones could have come behind them


@pytest.mark.processes
@pytest.mark.full
def test_published_weights_are_validated_alone_and_exported_they_train_alike(published, tmp_path):
    data = titles(tmp_path / "data.csv")
    common = ["--dataset", data, *words("--formatter hisco --target-cols hisco_1"), *SMALL]
    output = run(
        FINETUNE, *common, "--initial-checkpoint", published, "--save-path", tmp_path / "no", "--eval-only"
    )
    assert "validation at step 0: loss" in output
    export.export(published, "published", str(tmp_path / "again.bin"))
    for name, file in (("one", published), ("two", tmp_path / "again.bin")):
        run(FINETUNE, *common, "--initial-checkpoint", file, "--save-path", tmp_path / name, "--max-steps", 2)
    one, two = (torch.load(tmp_path / name / "last.bin", weights_only=True) for name in ("one", "two"))
    assert one["config"] == two["config"] and all(
        torch.equal(value, two["model"][name]) for name, value in one["model"].items()
    )
    code, said = run_inside(finetune.main, *common, "--save-path", tmp_path, "--eval-only")
    torch.save(torch.load(published, weights_only=True), tmp_path / "last.bin")
    code, said = run_inside(finetune.main, *common, "--save-path", tmp_path, "--eval-only")
    assert code == 2 and "the checkpoint knows other codes than the data; pass --key" in said


@pytest.mark.processes
@pytest.mark.full
def test_a_run_of_ours_keeps_its_codes_too(tmp_path):
    train, val = write_rows(tmp_path / "train.csv", 24), write_rows(tmp_path / "val.csv", 8, 300)
    run(
        TRAIN_MIXER,
        "--train-data",
        train,
        "--val-data",
        val,
        "--model-size",
        "tiny",
        *[flag for flag in SMALL if flag not in ("--share-val", "0.3")],
        "--save-dir",
        tmp_path / "first",
    )
    first = torch.load(tmp_path / "first" / "last.bin", weights_only=True)
    data = titles(tmp_path / "data.csv")
    common = ["--dataset", data, *words("--formatter hisco --target-cols hisco_1"), *SMALL, "--max-steps", 1]
    run(FINETUNE, *common, "--initial-checkpoint", tmp_path / "first", "--save-path", tmp_path / "second")
    second = torch.load(tmp_path / "second" / "last.bin", weights_only=True)
    new = sorted({code for _, code in TITLES} - first["key"].keys())
    assert list(second["key"]) == [*first["key"], *new] and new and second["config"]["text"] == "as-is"
    assert torch.allclose(rows_of(second, first["key"]), rows_of(first, first["key"]), atol=1e-6)
    output = run(
        FINETUNE,
        *[flag if flag != "hisco" else "gpf" for flag in common],
        "--initial-checkpoint",
        tmp_path / "first",
        "--save-path",
        tmp_path / "third",
    )
    assert "--formatter hisco --block-size 5 keeps it" in output
    assert list(torch.load(tmp_path / "third" / "last.bin", weights_only=True)["key"]) == sorted(
        {code for _, code in TITLES}
    )


@pytest.mark.processes
@pytest.mark.full
def test_numbers_of_the_hisco_key_need_no_file(tmp_path):
    numbers = {code: i for i, code in enumerate(hisco_key())}
    rows = [(f"{text} {i}", numbers[code], "", "da") for i, (text, code) in enumerate(TITLES * 8)]
    data = write_csv(tmp_path / "data.csv", ("occ1", "code1", "code2", "lang"), rows)
    run(
        FINETUNE,
        "--dataset",
        data,
        *words("--formatter hisco --model-size tiny"),
        *SMALL,
        "--save-path",
        tmp_path / "out",
        "--max-steps",
        1,
    )
    state = torch.load(tmp_path / "out" / "last.bin", weights_only=True)
    assert sorted(state["key"]) == sorted({code for _, code in TITLES}) and state["formatter"][
        "target_cols"
    ] == ["code1", "code2"]
    # The same numbers mean the same codes when the model is evaluated, though its own outputs are numbered
    # otherwise.
    said = run(
        FINETUNE,
        "--dataset",
        write_csv(tmp_path / "wrong.csv", ("occ1", "code1"), [("smed", "83110"), ("weaver", "1110")]),
        *words("--formatter hisco --model-size tiny"),
        *SMALL,
        "--save-path",
        tmp_path / "no",
        "--drop-bad-labels",
        code=2,
    )
    # never 1110 as a number
    assert "hold numbers of the HISCO key: rename them if they hold codes" in said
    titles_of = write_csv(
        tmp_path / "codes.csv",
        ("occ1", "hisco_1", "lang"),
        [(row[0], hisco_key()[row[1]], row[3]) for row in rows],
    )
    figures = []
    for name, flags in (
        ("numbers", ["--data", data]),
        ("codes", ["--data", titles_of, "--target-cols", "hisco_1"]),
    ):
        code, said = run_inside(
            evaluate.main,
            "--model",
            tmp_path / "out",
            *flags,
            "--output",
            tmp_path / name,
            *words("--device cpu --resamples 20"),
        )
        assert code == 0, said
        figures.append(json.loads((tmp_path / name / "report.json").read_text())["validation"])
    assert figures[0] == figures[1]


@pytest.mark.processes
def test_what_the_published_program_shall_code_is_trained_for_it(tmp_path):
    output = run(
        FINETUNE,
        "--dataset",
        titles(tmp_path / "data.csv"),
        *words("--formatter hisco --target-cols hisco_1 --model-size tiny"),
        *SMALL,
        *words("--max-steps 2 --clean-text ascii-lower"),
        *words("--no-memory-mask --published-target-mask --key hisco --save-path"),
        tmp_path / "out",
    )
    assert "Codes: 1,919" in output
    _, formatter, state = models.load_model(str(tmp_path / "out"))
    assert list(export.differences(state, formatter)) == [
        "its encoder has another size than google/canine-s: --model-size base"
    ]


def test_the_published_target_mask_is_the_float_that_torch_adds():
    """In training the published decoder adds 1 to the score of PAD; in decoding it masks nothing but what
    comes later.
    """
    pytest.importorskip("transformers")
    from benchmarks.parity import hisco_program

    program = hisco_program("tiny")
    ours = Seq2SeqMixerOccCANINE(
        BlockyFormatter("hisco").num_classes,
        1919,
        config=model_config("tiny"),
        memory_mask=False,
        target_mask=False,
    ).eval()
    ours.load_state_dict(program.state_dict())
    target = (
        torch.tensor(BlockyFormatter("hisco").transform_label("61110&-1")).long()[None, :-1].expand(3, -1)
    )
    memory = torch.randn(3, 12, 128)
    with torch.no_grad():
        expected = program.decoder(memory, target, (target == 1).float())
        assert torch.allclose(ours.decode(memory, target), expected, atol=1e-4)
        ours.decoder.target_mask = True
        assert not torch.allclose(ours.decode(memory, target), expected, atol=1e-2)


@pytest.mark.parametrize(
    "columns, name",
    [
        (["OCC1950_1"], "OCC1950"),
        (["OCC1950_1", "OCC1950_2"], "OCC1950"),
        (["code1", "code2"], "code"),
        (["occ1950"], "occ1950"),
        (["psti"], "psti"),
        (["icem_1", "icem_10"], "icem"),
        (["a", "b"], "a"),
    ],
)
def test_names_of_systems(columns, name):
    assert models.system_name(BlockyFormatter("gpf", columns)) == name


@pytest.mark.processes
def test_the_folder_of_another_trainer_is_left_alone(published, tmp_path):
    """Its last.bin has no settings: never a word of overwriting it."""
    content = torch.load(published, weights_only=True)
    torch.save(
        {**content, "optimizer": {}, "scheduler": {}, "key": {code: i for i, code in enumerate(hisco_key())}},
        tmp_path / "last.bin",
    )
    before = (tmp_path / "last.bin").read_bytes()
    said = run(
        FINETUNE,
        "--dataset",
        titles(tmp_path / "data.csv"),
        *words("--formatter hisco --target-cols hisco_1"),
        *SMALL,
        "--save-path",
        tmp_path,
        code=2,
    )
    assert (
        f"--initial-checkpoint {tmp_path}/last.bin and another --save-path" in said
        and "overwrite" not in said
    )
    assert (tmp_path / "last.bin").read_bytes() == before


def test_a_data_set_may_be_a_folder(tmp_path):
    from histocc.job.data import dataset_files

    assert dataset_files("x.csv") == (["x.csv"], [])
    write_csv(tmp_path / "train.csv", ["a"], [])
    assert dataset_files(str(tmp_path)) == ([str(tmp_path / "train.csv")], [])
    write_csv(tmp_path / "val.csv", ["a"], [])
    assert dataset_files(str(tmp_path)) == ([str(tmp_path / "train.csv")], [str(tmp_path / "val.csv")])
    write_csv(tmp_path / "more.csv", ["a"], [])
    with pytest.raises(UserError, match=r"a folder with 3 tables .*train_mixer.py --train-data A B"):
        dataset_files(str(tmp_path))


@pytest.mark.processes
def test_finetune_takes_a_folder_with_train_and_val(tmp_path):
    write_rows(tmp_path / "train.csv", 24)
    write_rows(tmp_path / "val.csv", 8, 300)
    output = run(
        FINETUNE,
        "--data_dir",
        tmp_path,
        *words("--formatter hisco --model-size tiny"),
        *SMALL,
        "--save-path",
        tmp_path / "out",
        "--max-steps",
        1,
    )
    assert "24 rows for training, 8 for validation" in output


def test_a_seq2seq_model_gives_the_key_of_its_system(published, tmp_path):
    content = torch.load(published, weights_only=True)
    torch.save(
        {
            "model": {
                name: value
                for name, value in content["model"].items()
                if not name.startswith("linear_decoder")
            }
        },
        tmp_path / "s2s.bin",
    )
    args = finetune.get_args_parser().parse_args(
        [*words("--dataset x.csv --initial-checkpoint"), str(tmp_path / "s2s.bin")]
    )
    assert list(job_data.initial_weights(args)["key"]) == list(hisco_key())


@pytest.mark.parametrize(
    "flags, beside, message",
    [
        ([], {"61110": 0, "64100": 1}, "hisco.bin: has 1,919 outputs, and its key 2 codes"),
        (["--initial-key", "two.csv"], None, "has 1,919 outputs, and its key 2 codes: .*--initial-key"),
    ],
)
def test_a_key_of_another_size_is_refused_wherever_it_comes_from(published, tmp_path, flags, beside, message):
    (tmp_path / "hisco.bin").symlink_to(published)
    if beside:
        (tmp_path / "key.json").write_text(json.dumps(beside))
    two = write_csv(tmp_path / "two.csv", ["system_code", "code"], [("61110", 0), ("64100", 1)])
    args = finetune.get_args_parser().parse_args(
        [
            *words("--dataset x.csv --initial-checkpoint"),
            str(tmp_path / "hisco.bin"),
            *[two if flag == "two.csv" else flag for flag in flags],
        ]
    )
    with pytest.raises(UserError, match=message):
        job_data.initial_weights(args)


@pytest.mark.processes
def test_a_general_purpose_model_is_fine_tuned_with_its_tokens(tmp_path, monkeypatch):
    """From the object, with a DataFrame: formatter, tokens and key are those of the file; new codes stand
    behind them.
    """
    pandas = pytest.importorskip("pandas")
    from histocc import OccCANINE

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(1)
    digits, key = [*"0123456789-"], [f"{i:03d}" for i in range(40)]
    formatter = BlockyFormatter("gpf", ["icem_1", "icem_2"], 3, allow_short=True, chars=digits)
    model = Seq2SeqMixerOccCANINE(formatter.num_classes, 40, config=model_config("tiny"))
    torch.save(
        {"model": model.state_dict(), "key": {code: i for i, code in enumerate(key)}, "chars": digits},
        tmp_path / "icem.bin",
    )
    mod = OccCANINE("icem.bin", device="cpu", hf=False, system="icem", target_cols=["icem_1", "icem_2"])
    assert mod.system == "icem" and mod.coder.clean("Æ") == "ae"
    frame = pandas.DataFrame(
        {
            "occ1": [f"Væver {i}" for i in range(40)],
            "icem_1": [f"{i % 7:03d}" for i in range(39)] + ["999"],
            "icem_2": [None, *(["001"] * 39)],
            "lang": "da",
        }
    )
    before = frame.copy()
    assert (
        mod.finetune(
            frame,
            "out",
            "occ1",
            "da",
            "lang",
            num_epochs=1,
            batch_size=16,
            share_val=0.0,
            learning_rate=1e-9,
            max_steps=1,
        )
        is mod
    )
    state = torch.load("out/last.bin", weights_only=True)
    assert (
        frame.equals(before)
        and state["formatter"] == {**formatter.to_dict(), "chars": digits, "allow_short": False}
        and state["system"] == "icem"
    )
    assert list(state["key"]) == [*key, "999"] and state["config"]["text"] == "ascii-lower"
    assert all(
        torch.allclose(value, model.state_dict()[name], atol=1e-6)
        for name, value in state["model"].items()
        if name.startswith("decoder.")
    )
    assert (
        list(mod.predict("væver", "da"))[:2]
        and mod.formatter.chars == tuple(digits)
        and not mod.model.memory_mask
    )

    mod = OccCANINE("icem.bin", device="cpu", target_cols=["icem_1", "icem_2"])
    numbers = pandas.DataFrame(
        {
            "occ1": [f"smed {i}" for i in range(40)],
            "icem_1": [101.0 + i % 7 for i in range(40)],
            "icem_2": [float("nan"), *([102.0] * 39)],
        }
    )
    mod.finetune(
        numbers,
        save_path="floats",
        num_epochs=1,
        batch_size=16,
        share_val=0.0,
        learning_rate=1e-9,
        max_steps=1,
    )
    assert list(torch.load("floats/last.bin", weights_only=True)["key"]) == [
        *key,
        *(f"{code}" for code in range(101, 108)),
    ]


class Small(torch.nn.Module):
    """As much of a model as `load_initial_weights` looks at."""

    ngrams, memory_mask = None, True

    def __init__(self, codes: int, width: int = 2):
        super().__init__()
        self.encoder, self.linear_decoder = torch.nn.Linear(3, 2), torch.nn.Linear(width, codes)


@pytest.mark.parametrize(
    "first, width, kept",
    [
        ("abcd", 2, {"d": 3, "b": 1}),
        ("dxb", 2, {"d": 0, "x": 1, "b": 2}),
        ("xy", 2, {"x": 0}),
        ("pq", 2, {}),
        ("", 2, {}),
        ("dx", 3, {}),
    ],
)
def test_rows_of_the_codes_that_both_keys_hold_are_kept(first, width, kept):
    formatter, codes = BlockyFormatter("gpf", ["a"], 1), list("dxb")
    torch.manual_seed(1)
    model, other = Small(3).double(), Small(len(first) or 4, width)
    before, given = ({n: t.clone() for n, t in each.state_dict().items()} for each in (model, other))
    state = {"model": {**given, "more": torch.zeros(1)}, "key": {code: i for i, code in enumerate(first)}}
    said = []
    models.load_initial_weights(
        model, {**state, "what": "it", "formatter": None}, codes, formatter, False, said.append
    )
    assert torch.equal(model.encoder.weight, given["encoder.weight"].double())
    for i, code in enumerate(codes):
        for name in ("linear_decoder.weight", "linear_decoder.bias"):
            expected = given[name][kept[code]].double() if code in kept else before[name][i]
            assert torch.equal(model.state_dict()[name][i], expected), (name, code)
    assert any("in the checkpoint" in line or "unused" in line for line in said)
    assert any(f"{len(kept)} of 3 codes keep" in line for line in said) == (list(first) != codes)
