"""Tables → checked, memory-mapped arrays, once: what every process of a run then maps and nobody parses
again.

Nothing is dropped or changed without a count: each rejected row stands in `rejected_rows.csv` with its file,
line, column, value and reason. The folder is keyed by the content of the files and the settings, and appears
whole or not at all. `histocc.data.arrays` says what lies in it.
"""

import json
import os
from collections.abc import Callable

from histocc.data import folder as prepared_folder
from histocc.data.arrays import PREPARED_FORMAT, PreparedData, read_meta
from histocc.data.folder import WAIT_SECONDS, build_folder, write_last
from histocc.data.keys import write_key, write_words
from histocc.data.rows import Reader
from histocc.data.settings import PrepareSettings, file_problems, fingerprint
from histocc.runtime.checkpoint import exists_in
from histocc.runtime.errors import UserError
from histocc.runtime.files import OwnFiles
from histocc.runtime.world import World
from histocc.trainer.run import copy_lists

LISTS = ("key.csv", "rejected_rows.csv", "conflicts.csv", "data_report.json")  # for the user


class UnusableData(UserError):
    """Rows that cannot be trained on as they are; `report` says what the files hold all the same."""

    def __init__(self, message: str, report: dict):
        super().__init__(message)
        self.report = report


def _copy_lists(folder: str, reports: OwnFiles) -> None:
    """Raises UserError where the lists in `reports` are those of a run, and would change."""
    keep = exists_in(reports.folder) and not reports.overwrite
    copy_lists([os.path.join(folder, name) for name in LISTS], reports, keep)


def write_folder(
    settings: PrepareSettings,
    key: str,
    folder: str,
    reports: OwnFiles | None,
    check: Callable[[], None],
    wait_seconds: float = WAIT_SECONDS,
) -> dict:
    """Reads the files and fills `folder` with all but its last file, whose content it returns; `reports`:
    files of the folder that gets the lists of what was found if the data are of no use.

    Raises UnusableData, and UserError for what cannot be read at all.
    """
    reader = Reader(settings, folder, check, wait_seconds)
    try:
        for part, path in settings.files:
            reader.read(path, part)
        codes, report = reader.finish()
    finally:
        reader.abandon()
    write_key(os.path.join(folder, "key.csv"), codes)
    write_words(os.path.join(folder, "words.csv"), reader.writer.words)
    with open(
        os.path.join(folder, "data_report.json"), "w", encoding="utf-8", errors="backslashreplace"
    ) as file:
        json.dump(report, file, indent=1, ensure_ascii=False)
    if problems := reader.problems():
        if reports:
            _copy_lists(folder, reports)
        raise UnusableData("\n  ".join(problems), report)
    return {
        "format": PREPARED_FORMAT,
        "fingerprint": key,
        "codes": codes,
        "languages": reader.languages.names,
        "alphabet": reader.alphabet(),
        "max_codes": settings.max_codes,
        "clean_text": settings.clean_text,
        "kept_codes": len(settings.first_codes or []),
        "hisco_numbers": settings.number_codes is not None,
        "report": report,
    }


def prepare(
    settings: PrepareSettings,
    save_path: str,
    say: Callable[[str], None] = print,
    reports: OwnFiles | None = None,
    check: Callable[[], None] = prepared_folder.nothing,
    wait_seconds: float = WAIT_SECONDS,
    warn: Callable[[str], None] | None = None,
) -> str:
    """Prepares the data under `save_path`/prepared, or finds it there as it was written; returns the folder.
    One process.

    reports: files of the folder for the lists of what was found. check: called often; an exception of it ends
    the work.
    wait_seconds: how long to wait for another job. warn: takes what is out of the ordinary (default: `say`).
    The files must have passed `file_problems`. Raises UserError, and then leaves nothing behind.
    """
    before, key, warn = _states(settings), _fingerprint(settings), warn or say
    root = os.path.join(save_path, "prepared")
    folder = os.path.join(root, key)
    fault = prepared_folder.fault(folder, check=check)
    if fault is None:
        made_from = [file["path"] for file in read_meta(folder)["report"]["files"]]
        others = (
            f", made from {', '.join(made_from)}" if made_from != [path for _, path in settings.files] else ""
        )
        say(f"Prepared data: found in {folder}{others}")
        if reports:
            _copy_lists(folder, reports)
        return folder
    if os.path.lexists(folder):
        warn(f"Prepared data: {folder}: {fault}; preparing it again")
    say(f"Preparing data: {', '.join(path for _, path in settings.files)}")

    def build(new: str) -> None:
        content = write_folder(settings, key, new, reports, check, wait_seconds)
        now = _states(settings)
        changed = [path for path, state in now.items() if state is None or state != before[path]]
        if changed:
            raise UserError(
                f"{', '.join(changed)} changed while it was read; start again when nobody writes to it"
            )
        write_last(new, content)

    folder = build_folder(root, key, build, warn, check, wait_seconds)
    if reports:
        _copy_lists(folder, reports)
    return folder


def _fingerprint(settings: PrepareSettings) -> str:
    try:
        return fingerprint(settings)
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from None


def _states(settings: PrepareSettings) -> dict[str, tuple | None]:
    """What tells a file from one that was written to since; None for one that is not there."""
    found: dict[str, tuple | None] = {}
    for _, path in settings.files:
        try:
            state = os.stat(path)
            found[path] = (state.st_ino, state.st_size, state.st_mtime_ns)
        except OSError:
            found[path] = None
    return found


def prepare_on_node(
    settings: PrepareSettings,
    save_path: str,
    folder: str,
    rank: int,
    check: Callable[[], None],
    wait_seconds: float = WAIT_SECONDS,
    warn: Callable[[str], None] = print,
) -> str:
    """The prepared folder of the node that `rank` leads: `folder`, that of rank 0, where it is seen, else its
    own. Looks at the checksums, but for rank 0, which has just done so. `warn` takes what is out of the
    ordinary, with the rank.

    Raises UserError that names the rank.
    """
    if rank == 0 or prepared_folder.fault(folder, check=check) is None:
        return folder
    try:
        problems = file_problems(settings)
        if problems:
            raise UserError("\n  ".join(problems))
        return prepare(
            settings,
            save_path,
            prepared_folder.nothing,
            None,
            check,
            wait_seconds,
            lambda line: warn(f"On the node of rank {rank}: {line}"),
        )
    except (UserError, OSError) as error:
        raise UserError(f"on the node of rank {rank}: {error}") from None


def on_every_node(
    settings: PrepareSettings,
    save_path: str,
    folder: str,
    world: World,
    check: Callable[[], None],
    wait_seconds: float,
    name: str = "prepare on each node",
) -> PreparedData:
    """The data that rank 0 has prepared in `folder`, or what a node prepares itself that does not see it. All
    ranks. name: of this work, once in a run.
    """
    leaders = world.node_leaders()
    folders = world.run_on(
        name,
        leaders,
        lambda: prepare_on_node(settings, save_path, folder, world.rank, check, wait_seconds),
    )
    if len({os.path.basename(folder) for folder in folders}) > 1:
        differ = [
            rank
            for rank, folder in zip(leaders, folders)
            if os.path.basename(folder) != os.path.basename(folders[0])
        ]
        raise UserError(
            f"the nodes of ranks {', '.join(map(str, differ))} have other data files than that of rank 0:"
            f" copy the same {', '.join(path for _, path in settings.files)} to every node",
            heard_from_main=True,
        )
    return PreparedData.open(folders[leaders.index(world.rank - world.local_rank)])
