"""Published models behave as published: codes as a plain reference of the published program gives them, from
every form of weights, and keys with gaps too; what is no model is refused.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from helpers import REPO

from histocc import export
from histocc.formatter import BlockyFormatter, hisco_key
from histocc.model.mixer import Seq2SeqMixerOccCANINE, model_config
from histocc.predict.coder import Coder
from histocc.published import formats, models
from histocc.published.formats import Given, codes_of_key, hub_name
from histocc.runtime.errors import UserError

pytest.importorskip("transformers")
pytest.importorskip("unidecode")
from benchmarks.parity import compared, hisco_program, rows_to_code
from benchmarks.published_program import PublishedProgram

REAL = Path(os.environ.get("HISTOCC_REAL_DATA") or REPO.parent / "shared" / "data") / "occupations_en.csv"
TINY = model_config("tiny").to_dict()
GENERAL = BlockyFormatter("gpf", ["a"])
COMMA_KEY = [f"{i},{i * 7 % 300},{-i % 40}" for i in range(40)] + ["5", "6,1"]
PLAIN_KEY = [f"{i:03d}" for i in range(60)] + ["a1b", "?"]
DIGITS = list("0123456789-")


def save(program: PublishedProgram, path, **more) -> str:
    torch.save({**program.published(), **more} if program.decoder is not None else program.published(), path)
    return str(path)


def general_program(
    key: list[str], separator: str, tokens: list[str] | None = None, kind: str = "mix"
) -> PublishedProgram:
    size = max(len(code.split(",") if separator else code) for code in key)
    tokens, form = tokens or list(GENERAL.map_char_idx), {"separator": separator, "kind": kind}
    torch.manual_seed(2)  # for the biases, which torch initialises
    return PublishedProgram(tokens, key, 2, size, hisco=False, **form, **TINY).spread(5)


def check(program: PublishedProgram, coder: Coder, pairs: list, full: int = 6) -> dict:
    """The same codes in every row, but for ties that the last bits decide."""
    found = compared(program, coder, pairs, 64, full)
    assert all(
        found["equal"][name] + found["ties"][name] == rows and found["ties"][name] <= max(1, rows / 100)
        for name, rows in found["rows"].items()
    ), found
    assert max(found["difference"].values()) < 1e-3
    return found


def load(path, **given) -> Coder:
    return Coder.load(str(path), given=Given(**given))


@pytest.fixture(scope="module")
def made_up():
    pairs = rows_to_code(None, 120)
    assert len({language for _, language in pairs}) >= 5
    assert all(text != text.lower() or not text.isascii() for text, _ in pairs)
    return pairs + [(" blanks around ", "en"), ("x" * 300, "da"), ("a", "unk"), ("3 farmers, £5", "fr")]


@pytest.mark.parametrize("kind", ["mix", "seq2seq", "flat"])
@pytest.mark.full
def test_hisco_weights_of_each_kind(tmp_path, made_up, kind):
    program = hisco_program("tiny", kind)
    path = save(program, tmp_path / "model.bin")
    weights = torch.load(path, weights_only=True)
    # as the published ones, which bring none
    torch.save({name: value for name, value in weights.items() if name != "key"}, path)
    coder = load(path)
    assert (coder.system, coder.thresholds.source) == ("hisco", "published")
    assert coder.codes == list(hisco_key())
    found, n = check(program, coder, made_up), len(made_up)
    expected = {"greedy": n * (kind != "flat"), "flat": n * (kind != "seq2seq"), "full": 6 * (kind != "flat")}
    assert found["rows"] == expected and (kind == "flat" or found["distinct"] > 30)
    for decoder, lacking in (("greedy", "flat"), ("full", "flat"), ("flat", "seq2seq")):
        if kind == lacking:
            message = f"decoder {decoder}: this model (has no linear decoder|has only the linear decoder)"
            with pytest.raises(UserError, match=message):
                coder.code(["smed"], ["da"], decoder)
        else:
            assert coder.code(["smed"], ["da"], decoder)[0].conf is not None


@pytest.mark.skipif(not REAL.exists(), reason="the real rows are not here")
@pytest.mark.full
def test_real_rows(tmp_path):
    program = hisco_program("tiny")
    check(program, load(save(program, tmp_path / "model.bin")), rows_to_code(str(REAL), 0)[::16])


@pytest.mark.full
def test_the_size_that_is_published(tmp_path, made_up):
    program = hisco_program("base")
    coder = Coder.load(save(program, tmp_path / "model.bin"), batch_size=16)
    found = compared(program, coder, made_up[:12], 12, 0)
    assert found["equal"] == found["rows"] and found["rows"]["greedy"] == 12


def test_general_purpose_weights(tmp_path, made_up):
    for name, key, separator, tokens in (
        ("comma", COMMA_KEY, ",", None),
        ("plain", PLAIN_KEY, "", None),
        ("chars", PLAIN_KEY[:60], "", DIGITS),
    ):
        program = general_program(key, separator, tokens)
        chars = {"chars": tokens} if tokens else {}
        path = save(program, tmp_path / f"{name}.bin", **chars)
        with pytest.raises(UserError, match="--target-cols"):
            load(path)
        coder = load(path, target_cols=["icem_1", "icem_2"])
        assert (coder.system, coder.formatter.block_size, coder.formatter.max_num_codes) == ("icem", 3, 2)
        check(program, coder, made_up[:15], full=2)


def test_a_folder_as_the_hub_has_it(tmp_path, made_up):
    from safetensors.torch import save_file

    program = general_program(PLAIN_KEY[:60], "", DIGITS)
    weights = program.published()
    content = {name: value.contiguous() for name, value in weights["model"].items()}
    save_file(content, tmp_path / "model.safetensors")
    config = {"model_domain": "Multilingual_CANINE", "num_classes": [16] * 8, "num_classes_flat": 60}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "key.json").write_text(json.dumps(weights["key"]))
    (tmp_path / "chars.json").write_text(json.dumps(DIGITS))
    coder = load(tmp_path, system="ISCO68A")
    assert coder.system == "ISCO68A" and coder.formatter.target_cols == ["ISCO68A_1", "ISCO68A_2"]
    check(program, coder, made_up[:15], full=2)


# ---- what goes out comes in again


def codes_of(path, pairs, **given) -> dict:
    coder = Coder.load(str(path), given=Given(**given))
    texts, languages = zip(*pairs)
    found = {}
    for decoder in ("greedy", "flat", "topk", "full"):
        try:
            found[decoder] = coder.code(list(texts), list(languages), decoder)
        except UserError:
            found[decoder] = None
    return found


@pytest.mark.parametrize("form, name", [("published", "model.bin"), ("safetensors", "model.safetensors")])
@pytest.mark.parametrize("kind", ["mix", "seq2seq", "flat", "general"])
@pytest.mark.full
def test_exported_again_they_code_the_same_bit_for_bit(tmp_path, made_up, kind, form, name):
    general = kind == "general"
    program = general_program(COMMA_KEY, ",") if general else hisco_program("tiny", kind)
    path = save(program, tmp_path / "first.bin")
    given = {"target_cols": ["x_1", "x_2"]} if general else {}
    before = codes_of(path, made_up[:60], **given)
    out, again = tmp_path / "out" / name, tmp_path / "again" / name
    first = export.ExportConfig(model=path, to=form, output=str(out), **given)
    said = export.export(first)[1]
    assert "published program would code differently" in said  # its size alone
    export.export(export.ExportConfig(model=str(out), to=form, output=str(again)))
    assert codes_of(out, made_up[:60]) == codes_of(again, made_up[:60]) == before and any(before.values())
    with pytest.raises(UserError, match="exists; --overwrite replaces it"):
        export.export(first)


@pytest.mark.full
def test_for_the_published_program_it_refuses_or_writes_what_that_codes_equally(
    tmp_path, made_up, monkeypatch
):
    path = save(hisco_program("tiny"), tmp_path / "first.bin")
    with pytest.raises(UserError, match="--model-size base$"):
        how = {"to": "published", "for_published_program": True}
        export.export(export.ExportConfig(model=path, output=str(tmp_path / "no.bin"), **how))
    assert not (tmp_path / "no.bin").exists()
    monkeypatch.setattr(models, "has_size", lambda *_: True)  # else as large as the published ones
    key = [f"{i:03d}" for i in range(60)]
    for kind in ("mix", "seq2seq", "flat", "general"):
        general = kind == "general"
        program, other = (general_program(key, "") if general else hisco_program("tiny", kind) for _ in "ab")
        path, out = save(program, tmp_path / f"{kind}.bin"), tmp_path / f"{kind} out.bin"
        columns = ["x_1", "x_2"] if general else None
        export.export(export.ExportConfig(model=path, output=str(out), target_cols=columns, **how))
        content = torch.load(out, weights_only=True)
        # by which that program tells its formats apart
        assert len(content) < 10 or "basemodel.pooler.dense.bias" in content
        with torch.no_grad():
            for value in other.parameters():
                value.zero_()
        flat = {formats.flat_name(name): value for name, value in content.items()}
        other.load_state_dict(flat if kind == "flat" else content["model"], strict=True)
        check(other, load(out), made_up[:30], full=2)


HISCO_KEY, HISCO = {code: i for i, code in enumerate(hisco_key())}, BlockyFormatter("hisco")
GENERAL_5 = BlockyFormatter("gpf", ["a"], 5, allow_short=True)


@pytest.mark.parametrize(
    "change, key, formatter, reason",
    [
        ({}, HISCO_KEY, HISCO, None),
        ({"memory_mask": True}, HISCO_KEY, HISCO, "--no-memory-mask"),
        ({"target_mask": True}, HISCO_KEY, HISCO, "--published-target-mask"),
        ({"text": "as-is"}, HISCO_KEY, HISCO, "--clean-text ascii-lower"),
        ({}, {"01110": 0, "61110": 1}, HISCO, "--key hisco"),
        ({}, {"12345": 0, "12": 1}, GENERAL_5, "filled up with zeros"),
        ({}, {"123": 0}, GENERAL_5, "no code fills its block: --block-size 3"),
    ],
)
def test_each_difference_to_the_published_program_is_named(change, key, formatter, reason):
    config = {**model_config("base").to_dict(), "memory_mask": False, "target_mask": False, "max_len": 128}
    config |= {"text": "ascii-lower", "decoder_dim_feedforward": 768, **change}
    found = list(export.differences({"config": config, "key": key}, formatter))
    assert len(found) == (reason is not None) and all(reason in line for line in found)


def test_a_safetensors_export_that_lost_its_metadata_is_completed_from_the_files_beside_it(tmp_path, made_up):
    from safetensors.torch import load_file, save_file

    path = save(hisco_program("tiny"), tmp_path / "first.bin")
    out = tmp_path / "out" / "model.safetensors"
    export.export(export.ExportConfig(model=path, to="safetensors", output=str(out)))
    before = codes_of(out, made_up[:5])
    save_file(load_file(out), out, {"format": "pt"})
    assert codes_of(out, made_up[:5]) == before


# ---- what others have published: files, keys and names

KEY = {"61110": 0, "64100": 1, "83110": 2, "51020": 3, "-1": 4}
NAN = float("nan")


def mixer(codes: int = 5) -> Seq2SeqMixerOccCANINE:
    torch.manual_seed(3)
    return Seq2SeqMixerOccCANINE(HISCO.num_classes, codes, config=model_config("tiny"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Random weights in every published form."""
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("published")
    model = mixer()
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
        config = {"model_type": "canine", **TINY}
        (folder / name / "config.json").write_text(json.dumps(config))
    encoder = {f"canine.{key}": value for key, value in model.encoder.state_dict().items()}
    torch.save(encoder, folder / "pytorch_model.bin")
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
    found = formats.read_published(models.find_weights(str(folder / name), name))
    assert found.kind == kind and found.codes == ([] if kind == "encoder" else list(KEY))
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_hidden_layers": 2}
    assert sizes.items() <= found.config.items()
    expected = mixer().state_dict()
    shapes = {name: tensor.shape for name, tensor in found.weights.items()}
    assert shapes.items() <= {name: tensor.shape for name, tensor in expected.items()}.items()
    assert {name.partition(".")[0] for name in expected.keys() - shapes} == lacking


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
    with pytest.raises(UserError, match="x.bin.* different codes 0 … 1, .*'000'"):
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
    assert "model.bin: outputs without a code, never predicted: 1 of 5\n" in capsys.readouterr().err
    assert coder.codes == ["61110", "83110", "51020", "-1"]
    texts = (["smed", "farmer"], ["da", "en"])
    assert (coder.probabilities(*texts) == whole.probabilities(*texts)[:, [0, 2, 3, 4]]).all()
    assert all(answer.codes[0] == "64100" for answer in whole.code(*texts, "flat"))
    for decoder in ("flat", "topk", "both"):
        assert all({*answer.codes} <= {*coder.codes} for answer in coder.code(*texts, decoder))
    assert coder.code(*texts, "greedy") == whole.code(*texts, "greedy")
    content = formats.load_content(file := str(tmp_path / "model.bin"))
    first = models.initial_weights(file, content, given.key and given.key(), None)
    assert list(first["key"]) == coder.codes and len(first["model"]["linear_decoder.bias"]) == 4


def test_what_is_no_model_is_refused(tmp_path):
    torch.save({"weight": torch.zeros(2)}, tmp_path / "other.bin")
    torch.save({"model": {}, "x": Path("x")}, tmp_path / "code.bin")
    (tmp_path / "damaged.safetensors").write_bytes(b"1234567890")
    for name, message in (
        ("other.bin", "holds no weights of a CANINE model; it has weight"),
        ("damaged.safetensors", "damaged.safetensors: cannot be read"),
        ("code.bin", "refused, since it holds objects that could run code"),
    ):
        with pytest.raises(UserError, match=message):
            formats.read_published(str(tmp_path / name))


def test_names_on_the_hub():
    for name, expected in (
        ("OccCANINE_s2s_mix", "Christianvedel/OccCANINE_s2s_mix"),
        ("Christianvedel/OccCANINE_s2s", "Christianvedel/OccCANINE_s2s"),
        ("occ-canine-v1", "Christianvedel/OccCANINE"),
        ("google/canine-s", "google/canine-s"),
    ):
        assert hub_name(name) == expected


def test_names_of_the_published_package():
    from histocc import DATASETS, EvalEngine, eval_metrics
    from histocc.formatter import construct_finetune_formatter, construct_general_purpose_formatter
    from histocc.prediction_assets import THRESHOLD_LOOKUP, ModelName, ModelType, SystemType, load_keys

    assert ModelName.__args__[0] == "OccCANINE" and "mix" in ModelType.__args__ and SystemType
    assert eval_metrics.EvalEngine is EvalEngine and THRESHOLD_LOOKUP["da"] == 0.24
    assert len(load_keys()) == 1919 and len(DATASETS["toydata"]()) == 10_000
    for construct in (construct_finetune_formatter, construct_general_purpose_formatter):
        formatter = construct(5, ["a", "b"])
        assert formatter.clean_pred(formatter.transform_label("12&345")) == "12&345"
