"""Weights of the published tools: every form is read, keys with gaps too; what is no model is refused."""

import json
import sys

import pytest
import torch
from helpers import write_rows

from histocc.formatter import hisco_blocky5
from histocc.model.mixer import Seq2SeqMixerOccCANINE, model_config
from histocc.predict.coder import Coder
from histocc.published import formats, models
from histocc.published.formats import Given, codes_of_key, hub_name
from histocc.runtime.errors import UserError

transformers = pytest.importorskip("transformers")
from benchmarks.reference_model import Reference

KEY = {"61110": 0, "64100": 1, "83110": 2, "51020": 3, "-1": 4}
NAN = float("nan")


def reference(codes: int = 5) -> Reference:
    torch.manual_seed(3)
    model = Reference(model_config("tiny"), 19, codes, 128).eval()
    ours = Seq2SeqMixerOccCANINE(hisco_blocky5().num_classes, codes, config=model_config("tiny"))
    model.decoder.positional_encoding.pos_embedding.copy_(ours.decoder.positional_encoding.pos_embedding)
    return model


def difference(model: Reference, ours: Seq2SeqMixerOccCANINE) -> float:
    """The largest one between their logits."""
    ids, mask = torch.randint(97, 122, (4, 128)), torch.arange(128) < torch.tensor([9, 40, 77, 128])[:, None]
    target = torch.tensor(hisco_blocky5().transform_label("61110&-1"))[None, :-1].long().expand(4, -1)
    with torch.no_grad():
        hidden = model.encoder(input_ids=ids * mask, attention_mask=mask.long())
        expected = (
            model.decoder(hidden.last_hidden_state, target, target == 1),
            model.linear_decoder(hidden.pooler_output),
        )
        return max(float((a - b).abs().max()) for a, b in zip(expected, ours(ids * mask, mask, target)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Random weights in every published form."""
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("published")
    model = reference()
    weights = model.state_dict()
    torch.save({"model": weights, "key": KEY, "step": 7}, folder / "mixer.bin")
    wrapped = {f"module.{name}": value for name, value in weights.items()}
    torch.save({"model": wrapped, "key": {v: k for k, v in KEY.items()}}, folder / "wrapped.bin")
    flat = {
        name.replace("encoder.", "basemodel.", 1).replace("linear_decoder", "out"): value
        for name, value in weights.items()
        if not name.startswith("decoder.")
    }
    torch.save({"model": flat, "key": KEY}, folder / "flat.bin")
    for prefix, name in (("canine.", "prefixed"), ("", "bare")):
        (folder / name).mkdir()
        content = {prefix + key: value for key, value in model.encoder.state_dict().items()}
        save_file({**content, "cls.other_head": torch.zeros(2)}, folder / name / "model.safetensors")
        config = {"model_type": "canine", **model_config("tiny").to_dict()}
        (folder / name / "config.json").write_text(json.dumps(config))
    torch.save(
        {f"canine.{key}": value for key, value in model.encoder.state_dict().items()},
        folder / "pytorch_model.bin",
    )
    write_rows(folder / "train.csv", 12)
    write_rows(folder / "val.csv", 6, 500)
    return folder


@pytest.mark.parametrize(
    "name, kind, lacking",
    [
        ("mixer.bin", "mixer", set()),
        ("wrapped.bin", "mixer", set()),
        ("flat.bin", "flat", {"decoder"}),
        ("prefixed", "encoder", {"decoder", "linear_decoder"}),
        ("bare", "encoder", {"decoder", "linear_decoder"}),
        ("pytorch_model.bin", "encoder", {"decoder", "linear_decoder"}),
    ],
)
def test_every_form_is_read(folder, name, kind, lacking):
    found = formats.read(models.find_weights(str(folder / name), name))
    assert found.kind == kind and found.codes == ([] if kind == "encoder" else list(KEY))
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_hidden_layers": 2}
    assert sizes.items() <= found.config.items()
    expected = Seq2SeqMixerOccCANINE(hisco_blocky5().num_classes, 5, config=model_config("tiny")).state_dict()
    shapes = {name: tensor.shape for name, tensor in found.weights.items()}
    assert shapes.items() <= {name: tensor.shape for name, tensor in expected.items()}.items()
    assert {name.partition(".")[0] for name in expected.keys() - shapes} == lacking


def test_an_imported_mixer_gives_the_logits_of_the_reference(folder):
    found = formats.read(str(folder / "mixer.bin"))
    config = {**found.config, "memory_mask": False, "target_mask": True}
    ours = models.build_model(config, hisco_blocky5(), 5).eval()
    ours.load_state_dict(found.weights)
    assert difference(reference(), ours) < 1e-4


# ---- keys


@pytest.mark.parametrize(
    "key, codes",
    [
        ({"000": 0, "001": 1, "-1": 2}, ["000", "001", "-1"]),
        ({"0": "000", "1": "001", "2": "-1"}, ["000", "001", "-1"]),
        ({0: "000", 1: "001", 2: "-1"}, ["000", "001", "-1"]),
        ({"001": "1", "-1": "2", "000": "0"}, ["000", "001", "-1"]),
        ({"590": 0, NAN: 1, "083": 2}, ["590", "", "083"]),
        ({"590": 0, "083": 2}, ["590", "", "083"]),  # NaN twice is one entry
        ({0: "590", 1: None, 2: "083"}, ["590", "", "083"]),
        ({"590": 0, " ": 1, "nan": 2, None: 3}, ["590", "", "", ""]),
    ],
)
def test_a_key_is_read_in_either_direction(key, codes):
    assert codes_of_key("x.bin", key) == codes


@pytest.mark.parametrize(
    "numbers", [(0.0, 1.0), ([0], [1]), (-1, 0), (True, False), (0, 3), (0, 0), (None, 1), (0, 10**17)]
)
def test_a_key_whose_numbers_are_none_is_refused(numbers):
    with pytest.raises(UserError, match="must number its 2 different codes 0 … 1, .* it begins with '000'"):
        codes_of_key("x.bin", dict(zip(("000", "001"), numbers)))


@pytest.mark.parametrize(
    "key",
    [
        {"61110": 0, NAN: 1, "83110": 2, "51020": 3, "-1": 4},
        {"61110": 0, "83110": 2, "51020": 3, "-1": 4},
        {"61110": 0, "nan": 1, "83110": 2, "51020": 3, "-1": 4},
        "system_code,code\n61110,0\n,1\n83110,2\n51020,3\n-1,4\n",
    ],
    ids=["NaN", "one code fewer", "nan", "key.csv"],
)
def test_an_output_without_a_code_is_never_answered(folder, tmp_path, capsys, key):
    content = torch.load(folder / "mixer.bin", weights_only=True)
    content["model"]["linear_decoder.bias"][1] = 50.0  # the most probable of all
    plain, given = tmp_path / "plain.bin", Given()
    torch.save({**content, "key": KEY}, plain)
    if isinstance(key, str):
        from histocc.data.rows import key_reader

        (tmp_path / "key.csv").write_text(key)
        key, given = None, Given(key=key_reader(str(tmp_path / "key.csv")))
    torch.save({**content, "key": key}, tmp_path / "model.bin")
    coder, whole = Coder.load(str(tmp_path / "model.bin"), given=given), Coder.load(str(plain))
    assert capsys.readouterr().err.splitlines() == [
        f"{tmp_path}/model.bin: 1 of 5 outputs have no code: never answered"
    ]
    assert coder.codes == ["61110", "83110", "51020", "-1"]
    texts = (["smed", "farmer"], ["da", "en"])
    kept = [0, 2, 3, 4]
    assert (coder.probabilities(*texts) == whole.probabilities(*texts)[:, kept]).all()
    assert all(answer.codes[0] == "64100" for answer in whole.code(*texts, "flat"))
    for decoder in ("flat", "topk", "both"):
        assert all({*answer.codes} <= {*coder.codes} for answer in coder.code(*texts, decoder))
    assert coder.code(*texts, "greedy") == whole.code(*texts, "greedy")
    first = models.initial_weights(str(tmp_path / "model.bin"), given.key and given.key(), None)
    assert list(first["key"]) == coder.codes and len(first["model"]["linear_decoder.bias"]) == 4


# ---- what is refused


def test_what_is_no_model_and_what_would_run_code_is_refused(tmp_path):
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


def test_names_on_the_hub(monkeypatch):
    for name, expected in (
        ("OccCANINE_s2s_mix", "Christianvedel/OccCANINE_s2s_mix"),
        ("Christianvedel/OccCANINE_s2s", "Christianvedel/OccCANINE_s2s"),
        ("occ-canine-v1", "Christianvedel/OccCANINE"),
        ("google/canine-s", "google/canine-s"),
    ):
        assert hub_name(name) == expected
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match="pip install huggingface_hub"):
        models.find_weights("someone/a-model", "--model")
    with pytest.raises(UserError, match="--model x: no checkpoint there"):
        models.find_weights("./nowhere/at/all", "--model x")


def test_names_of_the_published_package():
    from histocc import DATASETS, EvalEngine, eval_metrics
    from histocc.formatter import construct_finetune_formatter, construct_general_purpose_formatter
    from histocc.prediction_assets import THRESHOLD_LOOKUP, ModelName, ModelType, SystemType, load_keys

    assert ModelName.__args__[0] == "OccCANINE" and "mix" in ModelType.__args__ and SystemType
    assert eval_metrics.EvalEngine is EvalEngine and THRESHOLD_LOOKUP["da"] == 0.24
    assert len(load_keys()) == 1919 and len(DATASETS["toydata"]()) == 10_000
    for formatter in (
        construct_finetune_formatter(5, ["a", "b"]),
        construct_general_purpose_formatter(5, ["a", "b"]),
    ):
        ids = formatter.transform_label("12&345")
        assert formatter.clean_pred(ids) == "12&345"
