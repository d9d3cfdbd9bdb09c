"""Data sets by their published names: functions that return a table."""

from histocc.formatter import hisco_key
from histocc.predict.tables import as_table
from histocc.sample.generate import rows

TOY_ROWS = 10_000


def keys():
    """The HISCO key: columns code (number of the linear output) and hisco. The titles of the published table
    are not ours to give."""
    return as_table({"code": list(range(len(hisco_key()))), "hisco": list(hisco_key())})


def toydata():
    """Made-up rows of registers in six languages, columns occ1, lang, hisco_1, hisco_2, hisco_3; other rows
    than the published ones."""
    columns = zip(*rows(TOY_ROWS, seed=1))
    return as_table(
        {
            name: [cell or None for cell in column]
            for name, column in zip(("occ1", "lang", "hisco_1", "hisco_2", "hisco_3"), columns)
        }
    )


DATASETS = {"keys": keys, "toydata": toydata}
