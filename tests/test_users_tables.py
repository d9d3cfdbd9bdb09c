"""Tables in the forms that historians have them: read rightly, said, or refused by name."""

import sys
from pathlib import Path

import pytest
from preparing import Result, prepare, problems, quiet, settings_for

from histocc import prepare as command
from histocc.data import prepare as prep
from histocc.data import tables
from histocc.data.config import columns_of, file_problems, settings_from
from histocc.data.report import report_lines
from histocc.formatter import hisco_key
from histocc.job.config import finetune_parser
from histocc.runtime.errors import UserError

FILES = Path(__file__).parent / "data" / "tables"


def read(tmp_path, name: str, *flags: str) -> tuple[Result, str]:
    """(a table prepared with these flags, what is said of it)"""
    path = str(FILES / name)
    args, problems = finetune_parser().parse_args([f"--dataset={path}", "--share-val", "0", *flags]), []
    settings = settings_from(args, columns_of(args, path, problems), [path], [], problems)
    result = Result(prep.prepare(settings, str(tmp_path / "out"), quiet))
    return result, "\n".join(report_lines(result.report))


def refused(tmp_path, name: str, *flags: str) -> str:
    with pytest.raises(UserError) as caught:
        read(tmp_path, name, *flags)
    return str(caught.value)


# ---- encodings


def without_charset_normalizer(monkeypatch):
    monkeypatch.setitem(sys.modules, "charset_normalizer", None)
    tables._detected.cache_clear()


def test_code_pages_are_read_by_name_and_never_as_windows_1252(tmp_path, monkeypatch):
    without_charset_normalizer(monkeypatch)
    for page, texts in {
        "cp1250": ["kovář", "řezník"],
        "cp1251": ["крестьянин", "кузнец"],
        "cp1253": ["γεωργός", "ράπτης"],
        "cp1254": ["çiftçi", "dülger"],
    }.items():
        message = refused(tmp_path, f"{page}.csv")
        assert "is not UTF-8 (line 2), and its code page cannot be told. --encoding NAME reads it" in message
        assert "  cp1252: '" in message and f"  {page}: '{texts[0]}" in message
        result, _ = read(tmp_path, f"{page}.csv", "--encoding", page)
        assert result.texts[:2] == texts and result.rejected == []


def test_charset_normalizer_is_asked_where_it_is_installed(tmp_path):
    pytest.importorskip("charset_normalizer")
    tables._detected.cache_clear()
    result, said = read(tmp_path, "cp1251.csv")
    assert "cp1251.csv was read as" in said and "since it is not UTF-8: '" in said
    assert result.report["files"][0]["encoding"] != "UTF-8"


@pytest.mark.parametrize(
    "texts",
    [
        ["væver", "gårdmand", "bødker", "skrædder"],
        ["Bürgermeister", "Schlösser", "Fährmann"],
        ["tonnelier à Orléans", "maçon", "forgeron, né à Liège"],
        ["smiður", "bóndi", "þjónn", "húsfreyja"],
        ["shoemaker’s apprentice", "“smith”", "café keeper"],
    ],
)
def test_windows_1252_is_recognized_by_the_letters_of_its_languages(tmp_path, texts):
    content = "occ1,hisco_1\n" + "".join(f'"{text}",61110\n' for text in texts)
    result = prepare(tmp_path, content.encode("cp1252"))
    assert result.texts == texts
    said = "\n".join(report_lines(result.report))
    assert "Note: data.csv was read as Windows-1252, since it is not UTF-8: " in said and "--encoding" in said


def test_what_no_code_page_explains_is_refused(tmp_path, monkeypatch):
    without_charset_normalizer(monkeypatch)
    for text, page in (("værksted, bødker, gårdmand", "cp850"), ("væver, gårdmand, bødker", "mac_roman")):
        [message] = problems(tmp_path, f'occ1,hisco_1\n"{text}",61110\n'.encode(page))
        assert f"{page}: '{text.split(',')[0]}'" in message
        tables._detected.cache_clear()
    mixed = "væver,61110\n".encode() * 9 + "væver,61110\n".encode("cp1252")
    [message] = problems(tmp_path, b"occ1,hisco_1\n" + mixed)
    assert "is not UTF-8 in line 11, as 9 other lines are" in message


# ---- what programs write around the rows


def test_what_programs_write_around_the_rows(tmp_path):
    result, said = read(tmp_path, "written_by_R.csv")
    assert result.texts == ["smith", "baker", "wheelwright"] and result.codes == ["77610", "83110", "95410"]
    assert "has rows with one cell more than names: the first was taken for R's row names" in said
    result, said = read(tmp_path, "excel.csv")  # sep=;
    assert result.texts == ["smed", "væver"] and "Windows-1252" in said
    [chunk] = tables.read_chunks(str(FILES / "excel.csv"), ["occ1"])
    assert chunk.lines.tolist() == [3, 4]
    problem = file_problems(settings_for(FILES / "comment.csv", cols=("hisco_1",)))[0]
    assert "has no column 'occ1'" in problem
    assert "Its names seem to be in line 2: remove the lines above" in problem


# ---- codes


def test_words_for_no_further_code(tmp_path):
    result, said = read(tmp_path, "second_code.csv")
    assert [len(codes) for *_, codes in result.train] == [1] * 5 + [2] and result.rejected == []
    assert "Note: 5 cells such as NA or null" in said
    content = "occ1,hisco_1,hisco_2\na,61,.\n"
    options = {"kind": "gpf", "cols": ("hisco_1", "hisco_2"), "block_size": 2, "allow_short": True}
    kept = prepare(tmp_path, content, fixed_codes=["61", "."], **options)
    assert kept.train == [("a", "unk", ["61", "."])]  # the key has it


def test_codes_as_the_book_prints_them(tmp_path):
    result, said = read(tmp_path, "book.csv")
    assert [codes for *_, codes in result.train] == [["63120"], ["06105"], ["83110"], ["79100"], ["-1"]]
    assert "Note: 4 codes were rewritten" in said and "'6-31.20'" in said


def test_codes_as_spreadsheets_leave_them(tmp_path):
    assert "83.110" in (message := refused(tmp_path, "numbers.csv")) and "number format" in message
    result, said = read(tmp_path, "numbers.csv", "--drop-bad-labels")
    codes = {"civil engineer": ["02210"], "baker": ["77610"], "no occupation": ["-1"], "farmer": ["61110"]}
    assert {text: codes for text, _, codes in result.train} == codes
    assert [row[2] for row in result.reasons] == ["83.110", "7,712E+04"] and "3 codes were rewritten" in said


def test_codes_that_hisco_does_not_have(tmp_path):
    result, said = read(tmp_path, "ipums.csv")
    assert "Note: 2 codes are none of the 1,919 of HISCO" in said and "'98999', '12345'" in said
    assert result.report["codes_unknown"] == 2 and len(result.train) == 5
    rejected, _ = read(tmp_path, "ipums.csv", "--key", "hisco")
    assert rejected.texts == ["no occupation", "farmer", "smith"] and rejected.codes == list(hisco_key())
    recoded, said = read(tmp_path, "ipums.csv", "--recode", "99999=-1,98999=-1")
    assert [codes for *_, codes in recoded.train][:2] == [["-1"]] * 2
    assert "2 codes were replaced" in said and "1 codes are none of the 1,919" in said
    assert "--recode: code '7' has 1 tokens" in refused(tmp_path, "ipums.csv", "--recode", "99999=7")


def test_several_codes_in_one_cell(tmp_path):
    assert "several codes in one cell? --code-separator ';' separates them" in refused(
        tmp_path, "one_cell.csv"
    )
    result, _ = read(tmp_path, "one_cell.csv", "--code-separator", ";&,/")
    codes = [["61110", "83110"], ["51020", "77810"], ["83110", "64100"], ["79100", "55130"], ["61110"]]
    assert [codes for *_, codes in result.train] == codes
    assert result.data.max_codes == 5 and result.rejected == []
    content = "occ1,hisco_1\na,61110;83110;77610;51020;79100;64100\nb,61110\n"
    few = prepare(tmp_path, content, code_separator=";")
    assert few.texts == ["b"] and few.report["rejected"] == {"too many codes": 1}


# ---- languages and texts


def test_languages_whatever_their_case_and_region(tmp_path):
    result, said = read(tmp_path, "langs.csv")
    assert result.report["languages"] == {"da": 5, "en": 1} and result.report["languages_renamed"] == 5
    assert "'DA', 'Danish', 'dan', 'da-DK', 'EN'" in said


def test_composed_and_decomposed_letters_are_the_same(tmp_path):
    composed, decomposed = (read(tmp_path, name)[0] for name in ("nfc.csv", "nfd.csv"))
    assert composed.train == decomposed.train and composed.data.alphabet == decomposed.data.alphabet
    assert (composed.report["texts_composed"], decomposed.report["texts_composed"]) == (0, 8)


def test_characters_that_nobody_sees(tmp_path):
    result, said = read(tmp_path, "invisible.csv")
    assert result.texts == ["smith"] * 5 + ["smith\xa0senior"] and result.report["texts_composed"] == 6
    assert result.report["rejected"] == {"empty text": 2}


def test_letters_that_were_broken_and_made_lower_case(tmp_path):
    result, said = read(tmp_path, "lowercased_mojibake.csv")
    assert result.report["letters_broken"] == 6 and result.texts[2] == "employã© olie-mij."


def test_texts_that_repeat_the_row_above(tmp_path):
    result, said = read(tmp_path, "dittos.csv")
    assert result.report["dittos"] == 6 and len(result.train) == 8 and result.texts[6] == "〃"
    assert "dittos.csv lines 3, 5, 6, 7, 8 …: 'do.', 'ditto'" in said
    filled, said = read(tmp_path, "dittos.csv", "--ditto")
    assert filled.texts == ["blacksmith"] * 2 + ["baker"] * 6 and "6 descriptions such as do." in said
    ascii_only, _ = read(tmp_path, "dittos.csv", "--clean-text", "ascii-lower")
    assert ascii_only.texts[6] == '"'  # as the package Unidecode has it


def test_rows_without_a_description(tmp_path):
    plain, _ = read(
        tmp_path, "published_training_rows.csv", "--target-cols", "hisco_1", "--formatter", "hisco"
    )
    assert plain.report["rejected"] == {"empty text": 1} and len(plain.train) == 2
    kept, said = read(tmp_path, "published_training_rows.csv", "--empty-text", "-1")
    assert kept.train[0] == ("", "da", ["-1"]) and len(kept.train) == 3
    assert "Note: 1 rows without a description are kept" in said
    other = prepare(tmp_path, "occ1,hisco_1\n ,61110\nsmith,83110\n", empty_text="-1")
    assert other.texts == ["smith"] and "another than -1" in other.rejected[0][4]


def test_the_command_says_what_was_repaired(tmp_path, capsys):
    flags = ["--formatter", "hisco", "--target-cols", "hisco_1", "--share-val", "0", "--encoding", "cp1251"]
    assert command.main([str(FILES / "cp1251.csv"), *flags, "--save-path", str(tmp_path / "out")]) == 0
    flags = ["--save-path", str(tmp_path), "--encoding", "base64"]
    assert command.main([str(FILES / "cp1251.csv"), *flags]) == 2
    assert "is not an encoding" in capsys.readouterr().err
