"""Weights that come from the published tools and go to them: what is read, what is said, and the same
logits.
"""

import json
import sys

import pytest
import torch
from helpers import TINY, TRAIN_MIXER, run, write_rows

from histocc import export
from histocc.formatter import BlockyFormatter, hisco_blocky5
from histocc.job import initial_weights
from histocc.model.mixer import Seq2SeqMixerOccCANINE, model_config
from histocc.published import formats, models
from histocc.runtime.errors import UserError

transformers = pytest.importorskip("transformers")
from benchmarks.reference_model import Reference


def reference(codes: int = 5, vocabulary: int = 19) -> Reference:
    torch.manual_seed(3)
    model = Reference(model_config("tiny"), vocabulary, codes, 128).eval()
    ours = Seq2SeqMixerOccCANINE(hisco_blocky5().num_classes, codes, config=model_config("tiny"))
    model.decoder.positional_encoding.pos_embedding.copy_(ours.decoder.positional_encoding.pos_embedding)
    return model


KEY = {"61110": 0, "64100": 1, "83110": 2, "51020": 3, "-1": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Random weights in every published form."""
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("published")
    model = reference()
    weights = model.state_dict()
    torch.save({"model": weights, "key": KEY, "step": 7}, folder / "mixer.bin")
    torch.save(
        {
            "model": {f"module.{name}": value for name, value in weights.items()},
            "key": {v: k for k, v in KEY.items()},
        },
        folder / "wrapped.bin",
    )
    torch.save(
        {
            "model": {
                name.replace("encoder.", "basemodel.", 1).replace("linear_decoder", "out"): value
                for name, value in weights.items()
                if not name.startswith("decoder.")
            },
            "key": KEY,
        },
        folder / "flat.bin",
    )
    for prefix, name in (("canine.", "prefixed"), ("", "bare")):
        (folder / name).mkdir()
        content = {prefix + key: value for key, value in model.encoder.state_dict().items()}
        save_file({**content, "cls.other_head": torch.zeros(2)}, folder / name / "model.safetensors")
        (folder / name / "config.json").write_text(
            json.dumps({"model_type": "canine", **model_config("tiny").to_dict()})
        )
    torch.save(
        {f"canine.{key}": value for key, value in model.encoder.state_dict().items()},
        folder / "pytorch_model.bin",
    )
    write_rows(folder / "train.csv", 12)
    write_rows(folder / "val.csv", 6, 500)
    return folder


@pytest.mark.parametrize(
    "name, kind",
    [
        ("mixer.bin", "mixer"),
        ("wrapped.bin", "mixer"),
        ("flat.bin", "flat"),
        ("prefixed", "encoder"),
        ("bare", "encoder"),
        ("pytorch_model.bin", "encoder"),
    ],
)
def test_every_form_is_read(folder, name, kind):
    found = formats.read(formats.find_weights(str(folder / name)))
    assert found.kind == kind and found.key == ({} if kind == "encoder" else KEY)
    assert (
        found.config["hidden_size"] == 128
        and found.config["num_attention_heads"] == 2
        and found.config["num_hidden_layers"] == 2
    )
    ours = Seq2SeqMixerOccCANINE(hisco_blocky5().num_classes, 5, config=model_config("tiny"))
    new, unused = initial_weights.load_matching(ours, found.weights)
    assert (
        unused == []
        and {entry.partition(".")[0] for entry in new}
        == {"mixer": set(), "flat": {"decoder"}, "encoder": {"decoder", "linear_decoder"}}[kind]
    )


def test_an_imported_mixer_gives_the_logits_of_the_reference(folder):
    found = formats.read(str(folder / "mixer.bin"))
    formatter = hisco_blocky5()
    ours = models.build_model(
        {**found.config, "memory_mask": False, "target_mask": True}, formatter, 5
    ).eval()
    ours.load_state_dict(found.weights)
    ids, mask = torch.randint(97, 122, (4, 128)), torch.arange(128) < torch.tensor([9, 40, 77, 128])[:, None]
    target = torch.tensor(formatter.transform_label("61110&-1"))[None, :-1].long().expand(4, -1)
    model = reference()
    with torch.no_grad():
        output = model.encoder(input_ids=ids * mask, attention_mask=mask.long())
        expected = (
            model.decoder(output.last_hidden_state, target, target == 1),
            model.linear_decoder(output.pooler_output),
        )
        got = ours(ids * mask, mask, target)
    assert max(float((a - b).abs().max()) for a, b in zip(expected, got)) < 1e-4


@pytest.mark.processes
@pytest.mark.full
def test_training_starts_from_them_and_their_weights_come_out_again(folder):
    flags = [
        "--train-data",
        folder / "train.csv",
        "--val-data",
        folder / "val.csv",
        *[flag for flag in TINY if flag not in ("--model-size", "tiny")],
        "--num-epochs",
        1,
        "--batch-size",
        12,
        "--learning-rate",
        1e-9,
    ]
    output = run(
        TRAIN_MIXER, *flags, "--save-dir", folder / "from mixer", "--initial-checkpoint", folder / "mixer.bin"
    )
    assert (
        "mixer.bin, a mixer" in output
        and "the key differs: " in output
        and "--memory-mask makes it faster" in output
    )
    output = run(
        TRAIN_MIXER,
        *flags,
        "--save-dir",
        folder / "from encoder",
        "--initial-checkpoint",
        folder / "prefixed",
    )
    assert (
        "an encoder alone" in output
        and "new, with random weights: all" in output
        and "tensors of decoder" in output
    )
    state = torch.load(folder / "from mixer" / "last.bin", weights_only=True)
    assert state["config"]["memory_mask"] is False
    assert (
        torch.load(folder / "from encoder" / "last.bin", weights_only=True)["config"]["memory_mask"] is True
    )

    for form, name in (("published", "out.bin"), ("safetensors", "out.safetensors")):
        assert export.main([str(folder / "from mixer"), "--to", form, str(folder / "export" / name)]) == 0
        back = formats.read(str(folder / "export" / name))
        assert back.kind == "mixer" and back.key == state["key"] and back.config["intermediate_size"] == 512
        model = Reference(model_config("tiny"), 19, len(state["key"]), 128).eval()
        model.load_state_dict(back.weights, strict=True)  # the names of transformers and torch, all of them
        ids, mask = torch.randint(97, 122, (3, 128)), torch.arange(128) < torch.tensor([9, 40, 128])[:, None]
        target = (
            torch.tensor(BlockyFormatter.from_dict(state["formatter"]).transform_label("61110"))[None, :-1]
            .long()
            .expand(3, -1)
        )
        ours, _, _ = models.load_model(str(folder / "from mixer" / "last.bin"))
        with torch.no_grad():
            hidden = model.encoder(input_ids=ids * mask, attention_mask=mask.long())
            expected = (
                model.decoder(hidden.last_hidden_state, target, target == 1),
                model.linear_decoder(hidden.pooler_output),
            )
            assert (
                max(float((a - b).abs().max()) for a, b in zip(expected, ours(ids * mask, mask, target)))
                < 1e-4
            )
    assert (
        export.main([str(folder / "from mixer"), "--to", "published", str(folder / "export" / "out.bin")])
        == 2
    )


def test_what_is_no_model_and_what_would_run_code_is_refused(folder, tmp_path):
    torch.save({"weight": torch.zeros(2)}, tmp_path / "other.bin")
    with pytest.raises(UserError, match="holds no weights of a CANINE model; it has weight"):
        formats.read(str(tmp_path / "other.bin"))
    (tmp_path / "damaged.safetensors").write_bytes(b"1234567890")
    with pytest.raises(UserError, match="damaged.safetensors: cannot be read"):
        formats.read(str(tmp_path / "damaged.safetensors"))

    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"model": {}, "x": Evil()}, tmp_path / "evil.bin")
    with pytest.raises(UserError, match="refused, since it holds objects that could run code"):
        formats.read(str(tmp_path / "evil.bin"))
    assert not (tmp_path / "ran").exists()


def test_a_name_that_is_neither_here_nor_on_the_hub(monkeypatch):
    import argparse

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match="pip install huggingface_hub"):
        initial_weights.initial_file(argparse.Namespace(initial_checkpoint="someone/a-model"))
    with pytest.raises(UserError, match="no checkpoint there"):
        initial_weights.initial_file(argparse.Namespace(initial_checkpoint="./nowhere/at/all"))
