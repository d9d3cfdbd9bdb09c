"""Published models behave as published: codes as a plain reference of the published program gives them, from
every form of weights.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from helpers import REPO

from histocc import export
from histocc.formatter import BlockyFormatter, hisco_key
from histocc.model.mixer import model_config
from histocc.predict.coder import Coder
from histocc.published import formats, models
from histocc.published.formats import Given
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
    return PublishedProgram(
        tokens or list(GENERAL.map_char_idx),
        key,
        2,
        size,
        hisco=False,
        separator=separator,
        kind=kind,
        **TINY,
    ).spread(5)


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
    assert len({language for _, language in pairs}) >= 5 and all(
        text != text.lower() or not text.isascii() for text, _ in pairs
    )
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
    assert (
        coder.codes == list(hisco_key())
        and coder.system == "hisco"
        and coder.thresholds.source == "published"
    )
    found = check(program, coder, made_up)
    assert found["rows"] == {
        "greedy": len(made_up) * (kind != "flat"),
        "flat": len(made_up) * (kind != "seq2seq"),
        "full": 6 * (kind != "flat"),
    }
    assert kind == "flat" or found["distinct"] > 30
    for decoder, lacking in (("greedy", "flat"), ("full", "flat"), ("flat", "seq2seq")):
        if kind == lacking:
            with pytest.raises(
                UserError, match=f"decoder {decoder}: this model (has no linear decoder|is a flat classifier)"
            ):
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
        with pytest.raises(UserError, match="does not say how many codes it writes: --target-cols"):
            load(path)
        coder = load(path, target_cols=["icem_1", "icem_2"])
        assert (coder.system, coder.formatter.block_size, coder.formatter.max_num_codes) == ("icem", 3, 2)
        check(program, coder, made_up[:40])


def test_a_folder_as_the_hub_has_it(tmp_path, made_up):
    """Weights, config.json with the positions, key.json and chars.json beside it."""
    from safetensors.torch import save_file

    program = general_program(PLAIN_KEY[:60], "", DIGITS)
    weights = program.published()
    save_file(
        {name: value.contiguous() for name, value in weights["model"].items()}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text(
        json.dumps({"model_domain": "Multilingual_CANINE", "num_classes": [16] * 8, "num_classes_flat": 60})
    )
    (tmp_path / "key.json").write_text(json.dumps(weights["key"]))
    (tmp_path / "chars.json").write_text(json.dumps(DIGITS))
    coder = load(tmp_path, system="ISCO68A")
    assert coder.system == "ISCO68A" and coder.formatter.target_cols == ["ISCO68A_1", "ISCO68A_2"]
    check(program, coder, made_up[:40])
    for content, message in (
        ({"001": 0, "002": 0}, "must number its 2 different codes 0 … 1"),
        ({str(i): i for i in range(58)}, "60 outputs, and its key 58 codes"),
    ):
        (tmp_path / "key.json").write_text(json.dumps(content))
        with pytest.raises(UserError, match=message):
            load(tmp_path)


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
    path = save(
        general_program(COMMA_KEY, ",") if general else hisco_program("tiny", kind), tmp_path / "first.bin"
    )
    given = {"target_cols": ["x_1", "x_2"]} if general else {}
    before = codes_of(path, made_up[:60], **given)
    out, again = tmp_path / "out" / name, tmp_path / "again" / name
    # its size alone
    assert (
        "published program would code otherwise"
        in export.export(path, form, str(out), given=Given(**given))[1]
    )
    export.export(str(out), form, str(again))
    assert codes_of(out, made_up[:60]) == codes_of(again, made_up[:60]) == before and any(before.values())
    with pytest.raises(UserError, match="exists; --overwrite replaces it"):
        export.export(path, form, str(out), given=Given(**given))


@pytest.mark.full
def test_for_the_published_program_it_refuses_or_writes_what_that_codes_equally(
    tmp_path, made_up, monkeypatch
):
    path = save(hisco_program("tiny"), tmp_path / "first.bin")
    with pytest.raises(
        UserError, match="otherwise with it:\n  its encoder has another size .*--model-size base$"
    ):
        export.export(path, "published", str(tmp_path / "no.bin"), True)
    assert not (tmp_path / "no.bin").exists()
    monkeypatch.setattr(models, "has_size", lambda *_: True)  # else as large as the published ones
    key = [f"{i:03d}" for i in range(60)]
    for kind in ("mix", "seq2seq", "flat", "general"):
        general = kind == "general"
        program, other = (general_program(key, "") if general else hisco_program("tiny", kind) for _ in "ab")
        path, out = save(program, tmp_path / f"{kind}.bin"), tmp_path / f"{kind} out.bin"
        given = Given(target_cols=["x_1", "x_2"]) if general else Given()
        export.export(path, "published", str(out), True, given)
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
    export.export(path, "safetensors", str(out))
    before = codes_of(out, made_up[:20])
    save_file(load_file(out), out, {"format": "pt"})
    assert codes_of(out, made_up[:20]) == before
