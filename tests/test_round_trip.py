"""From a file to the ranks' shares and back: every row exactly once, whatever the rows, ranks, batch,
accumulation and start.
"""

import csv
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from helpers import examples, write_csv
from hypothesis import given
from hypothesis import strategies as st

from histocc.data import prepare as prep
from histocc.data.arrays import PreparedData
from histocc.data.config import PrepareSettings
from histocc.data.dataset import RowEncoding, TextChanges, TextRows
from histocc.data.noise import Augmenter
from histocc.data.tables import read_chunks
from histocc.formatter import make_formatter
from histocc.text import as_is
from histocc.trainer.batches import BatchLoader, BatchPlan, MicroBatches

HISCO = make_formatter("hisco", ["hisco_1", "hisco_2"])
# Whatever a cell may hold; no NUL, which is rejected, and nothing that reads like rows of the table.
TEXT = st.text(
    st.characters(exclude_categories=("Cs",), exclude_characters="\0,\r"), min_size=1, max_size=12
).filter(as_is)
CODES = st.sampled_from(
    [("61110", ""), ("1110", "83110"), ("-1", ""), ("83110", "83110"), ("99999", " 61110 ")]
)
ROWS = st.lists(st.tuples(TEXT, CODES, st.sampled_from(["en", "da", ""])), min_size=1, max_size=40)


def codes_of(codes: tuple[str, str]) -> tuple[str, ...]:
    return tuple(
        dict.fromkeys(code.strip().zfill(5) if code != "-1" else code for code in codes if code.strip())
    )


def prepared(folder: str, rows) -> PreparedData:
    path = write_csv(
        Path(folder) / "data.csv",
        ("occ1", "hisco_1", "hisco_2", "lang"),
        [(text, *codes, lang) for text, codes, lang in rows],
    )
    settings_ = PrepareSettings(
        [path], HISCO.to_dict(), HISCO.target_cols, share_val=0.0, language_col="lang"
    )
    return PreparedData.open(prep.prepare(settings_, folder, lambda *_: None))


@examples(40)
@given(
    rows=ROWS,
    total=st.integers(1, 17),
    processes=st.integers(1, 4),
    micro=st.integers(0, 5),
    groups=st.integers(1, 4),
    epoch=st.integers(0, 2),
    data=st.data(),
)
def test_every_row_comes_back_exactly_once(rows, total, processes, micro, groups, epoch, data):
    with tempfile.TemporaryDirectory() as folder:
        found = prepared(folder, rows)
        plan = BatchPlan(len(found.train), total, processes, micro, groups, 1)
        first = data.draw(st.integers(0, plan.steps_per_epoch))
        joined, before, steps = Counter(), Counter(), set()
        for rank in range(processes):
            dataset = MicroBatches(TextRows(found.train, found, RowEncoding(HISCO)), plan, rank, 7)
            for start, counter in ((first, joined), (0, before)):
                batches = list(BatchLoader(dataset).at(epoch, start))
                steps.add((start, len(batches), sum(batch["last_micro_batch"] for batch in batches)))
                for batch in batches:
                    counter.update(rows_in(batch, found.codes))
        assert len(steps) == len({start for start, *_ in steps}), "ranks must meet in every pass"
        assert before == Counter(
            (f"{lang or 'unk'}[SEP]{as_is(text)}", codes_of(codes)) for text, codes, lang in rows
        )
        assert joined.total() == len(rows) - min(first * total, len(rows)) and not joined - before


def rows_in(batch: dict, codes: list[str]):
    for ids, mask, numbers, weight in zip(
        batch["input_ids"], batch["attention_mask"], batch["targets_linear"], batch["weights"]
    ):
        if weight:
            yield (
                "".join(map(chr, ids[mask].tolist()[1:-1])),
                tuple(codes[n] for n in numbers.tolist() if n >= 0),
            )


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    """Makes a rank's noisy micro-batches of 37 rows."""
    found = prepared(
        str(tmp_path_factory.mktemp("data")),
        [(f"{'gammel ' * (i % 5)}smed nr {i}", ("61110", ""), "da") for i in range(37)],
    )

    def steps(plan: BatchPlan, epoch: int, start: int) -> list[Counter]:
        """Rows of each step from `start` on, whichever rank has them."""
        joined = [Counter() for _ in range(plan.steps_per_epoch - start)]
        for rank in range(plan.processes):
            changes = TextChanges(augmenter=Augmenter(3, augmentation_prob=0.8))
            texts = TextRows(found.train, found, RowEncoding(HISCO), changes)
            dataset = MicroBatches(texts, plan, rank, 7)
            for number, rows in enumerate(joined):
                for batch in dataset[epoch, start + number]:
                    rows.update(rows_in(batch, found.codes))
        return joined

    return steps


@examples(25)
@given(
    total=st.integers(1, 17),
    processes=st.integers(1, 4),
    micro=st.integers(1, 5),
    epoch=st.integers(0, 2),
    first=st.integers(0, 3),
)
def test_noise_of_a_resumed_epoch_is_that_of_a_whole_one(noisy, total, processes, micro, epoch, first):
    one, many = BatchPlan(37, total), BatchPlan(37, total, processes, micro, 3, 1)
    first = min(first, one.steps_per_epoch)
    assert noisy(many, epoch, first) == noisy(one, epoch, 0)[first:]


CELLS = st.text(st.sampled_from('ab"\n\r, '), max_size=6)


@examples(200)
@given(st.lists(st.tuples(CELLS, CELLS), max_size=30), st.sampled_from(["\n", "\r\n"]), st.integers(1, 7))
def test_lines_are_those_where_rows_begin(rows, line_end, chunk):
    """However the cells are broken into lines: as Python's csv module counts them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.csv"
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator=line_end, quoting=csv.QUOTE_ALL)
            writer.writerows([("a", "b"), *rows])
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.reader(file)
            ends = [reader.line_num for _ in reader]
        expected = dict(zip([end + 1 for end in ends[:-1]], rows))
        with_chunks = {}
        import histocc.data.tables as table_files

        whole, table_files.CHUNK = table_files.CHUNK, chunk
        try:
            for part in read_chunks(str(path), ["a", "b"]):
                with_chunks.update(zip(part.lines.tolist(), zip(*part.columns)))
                with_chunks.update(
                    {line: expected[line] for line, kind, _ in part.faults if kind == "rows inside a cell"}
                )
        finally:
            table_files.CHUNK = whole
        assert with_chunks == expected
