"""Whatever happens to the files of a prepared folder: the data are the same as before, or one message says
what is wrong."""

import json
import os
import shutil

import pytest
from helpers import mutations, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from preparing import settings_for

from histocc.data import prepare as preparing
from histocc.data.arrays import FILES, META, PreparedData
from histocc.runtime.errors import UserError

PARTS = ("train", "val")
VALUES = st.sampled_from([None, "", "x", 0, -1, 10**9, 1e308, True, [], {}, ["61110"], {"x": 1}])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(settings, save folder, prepared folder, its content by name)"""
    folder = tmp_path_factory.mktemp("prepared")
    chosen = settings_for(write_rows(folder / "data.csv", 40), cols=("hisco_1", "hisco_2"), share_val=0.2)
    prepared = preparing.prepare(chosen, str(folder / "run"), lambda line: None)
    return (
        chosen,
        folder / "run",
        prepared,
        {name: open(os.path.join(prepared, name), "rb").read() for name in os.listdir(prepared)},
    )


@st.composite
def damage(draw):
    """(what is done to which file, with what)"""
    kind = draw(
        st.sampled_from(
            [
                "flip",
                "overwrite",
                "cut",
                "append",
                "delete",
                "swap",
                "folder",
                "pipe",
                "link",
                "entry",
                "remove entry",
                "empty",
            ]
        )
    )
    return kind, draw(st.integers(0, 1 << 30)), draw(st.binary(min_size=1, max_size=16)), draw(VALUES)


def apply(kind, number, some, value, folder, whole):
    names = sorted(whole)
    name = META if "entry" in kind else names[number % len(names)]
    path, content = os.path.join(folder, name), bytearray(whole[name])
    if "entry" in kind:
        meta = json.loads(content)
        entry = sorted(meta)[number % len(meta)]
        if kind == "entry":
            meta[entry] = value
        else:
            del meta[entry]
        content = json.dumps(meta).encode()
    elif kind == "flip" and content:
        content[number % len(content)] ^= 1 << number % 8
    elif kind == "overwrite" and content:
        at = number % len(content)
        content[at : at + len(some)] = some[: len(content) - at]
    elif kind == "cut":
        content = content[: number % (len(content) + 1)]
    elif kind == "append":
        content += some
    elif kind == "empty":
        content = b""
    elif kind == "swap":
        content = whole[names[number // len(names) % len(names)]]
    os.unlink(path)
    if kind == "folder":
        os.mkdir(path)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        os.symlink(os.path.join(folder, names[0]) if name != names[0] else "nowhere", path)
    elif kind != "delete":
        with open(path, "wb") as file:
            file.write(content)


@settings(max_examples=mutations(0.34), deadline=None, derandomize=True)
@given(damages=st.lists(damage(), min_size=1, max_size=2))
def test_prepared_data_are_the_same_or_refused(made, damages):
    chosen, save, folder, whole = made
    for kind, number, some, value in damages:
        if all(os.path.isfile(os.path.join(folder, name)) for name in whole):
            apply(kind, number, some, value, folder, whole)
    said = []
    try:
        found = PreparedData.open(preparing.prepare(chosen, str(save), said.append))
    except UserError as error:
        assert folder in str(error)  # something else than a file stands in the way: it stays
        shutil.rmtree(folder)
        preparing.prepare(chosen, str(save), said.append)
        return
    now = {name: open(os.path.join(folder, name), "rb").read() for name in os.listdir(folder)}
    assert {name: now.get(name) for name in whole} == whole and set(now) <= {*FILES, *whole}
    assert len(found.train) + len(found.val) == 40
    if any(kind in ("delete", "empty", "cut") for kind, *_ in damages):
        assert len(said) > 0
