"""What the tests of preparation share: settings, a prepared folder read back, and what is refused."""

import csv
from pathlib import Path

import numpy as np
import pytest
from helpers import write_csv

from histocc.data import prepare as prep
from histocc.data.arrays import PreparedData
from histocc.data.config import PrepareSettings, file_problems
from histocc.formatter import make_formatter
from histocc.runtime.errors import UserError

HEADER = ("occ1", "hisco_1", "hisco_2")


def quiet(*_):
    pass


def settings_for(train, *, kind="hisco", cols=("hisco_1",), block_size=5, allow_short=False, **more):
    formatter = make_formatter(kind, list(cols), block_size, allow_short=allow_short)
    train = [train] if isinstance(train, (str, Path)) else train
    more = {"share_val": None if "val_files" in more else 0.0, **more}
    files = [str(path) for path in train]
    return PrepareSettings(train_files=files, formatter=formatter.to_dict(), target_cols=list(cols), **more)


class Result:
    """A prepared folder, read back as plain Python; the counts of its report add up."""

    def __init__(self, folder: str):
        self.folder = Path(folder)
        self.data = PreparedData.open(folder)
        self.codes, self.report = self.data.codes, self.data.report
        self.train, self.val = (list(self.rows(part)) for part in (self.data.train, self.data.val))
        self.rejected = self.table("rejected_rows.csv")[1:]
        report, kept = self.report, len(self.train) + len(self.val)
        assert (report["train_rows"], report["val_rows"]) == (len(self.train), len(self.val))
        assert report["rows"] == kept + report["test_rows"] + len(self.rejected)
        assert sum(report["languages"].values()) == kept
        assert report["rejected_rows"] == len(self.rejected) == sum(report["rejected"].values())

    def rows(self, part):
        """(text, language, codes) of each row."""
        for i in range(len(part)):
            points, _ = part.texts(np.array([i]))
            codes = [self.codes[number] for number in part.codes[i] if number >= 0]
            yield "".join(map(chr, points)), self.data.languages[part.language[i]], codes

    def table(self, name):
        with open(self.folder / name, encoding="utf-8", newline="") as file:
            return list(csv.reader(file))

    @property
    def texts(self):
        return [text for text, _, _ in self.train]

    @property
    def reasons(self):
        return [(int(row[1]), *row[2:4]) for row in self.rejected]


def codes_of(result: Result) -> list[list[str]]:
    return [codes for *_, codes in result.train]


def written(path: Path, content: str | bytes | list) -> str:
    if isinstance(content, list):
        return write_csv(path, content[0], content[1:])
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def prepare(tmp_path, content: str | bytes | list, **options) -> Result:
    """Prepares a file of this content, or of these rows."""
    what = settings_for(written(tmp_path / "data.csv", content), **options)
    assert file_problems(what) == []
    return Result(prep.prepare(what, str(tmp_path / "out"), quiet))


def refusal(tmp_path, content: str | bytes, **options) -> str:
    """The message with which a file of this content is refused; nothing may stay behind."""
    folder = tmp_path / "refused"
    (folder / "out").mkdir(parents=True, exist_ok=True)
    with pytest.raises(UserError) as caught:
        prepare(folder, content, **options)
    assert list((folder / "out").iterdir()) == []
    return str(caught.value)


def problems(tmp_path, content: str | bytes, **options) -> list[str]:
    return file_problems(settings_for(written(tmp_path / "data.csv", content), **options))
