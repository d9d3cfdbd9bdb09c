"""What a command writes: named before it starts, and never put in the place of a file that is not its own.

A command asks `problems` about all its outputs first: none may be one of its inputs, and none may exist
unless it is its own or --overwrite is given. Files get their names by a rename when they are whole; a file
that somebody else has made meanwhile is looked for again at that moment, and then the result stands under
another name. Which files of a folder this program has written says a list in it, `histocc.json`; `OwnFiles`
reads and writes it.
"""

import contextlib
import json
import os
import stat
import tempfile
import threading
import zlib
from collections.abc import Callable, Generator, Iterable
from typing import BinaryIO

from histocc.runtime.checksums import of_file
from histocc.runtime.errors import UserError
from histocc.runtime.machine_errors import in_words

_LARGEST_LISTED = 1 << 28  # bytes of a file that is listed with its checksum
LIST = "histocc.json"  # in a folder: which of its files this program has written
FORMAT = 1
_KINDS = {
    stat.S_ISDIR: "a folder",
    stat.S_ISFIFO: "a pipe",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
    stat.S_ISSOCK: "a socket",
}


def sync(path: str) -> None:
    """Makes a file, or the names in a folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def temporary_name(path: str) -> Generator[str]:
    """A free name beside `path`; what still has it at the end is removed. What a killed process of the same
    number left there may be a link to another file of ours: it is removed, never written to."""
    temporary = f"{path}.tmp{os.getpid()}"
    if os.path.lexists(temporary):
        os.remove(temporary)
    try:
        yield temporary
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)


def write_atomic(
    path: str,
    write: Callable[[BinaryIO], object],
    replaces: Callable[[str], bool] = lambda path: True,
    follows: bool = True,
) -> str:
    """Calls `write(file)` on a temporary binary file beside `path`, syncs it and gives it its name: never
    half a file.

    replaces: asked, when the file is whole, whether what stands at `path` then may be replaced. Where not,
    the file stays under another name, but for one of the same content, which is left as it is. Links are
    followed, unless `follows` is False: then the link itself is replaced. Returns the file's path. Raises
    OSError.
    """
    target = os.path.realpath(path) if follows else path
    try:
        with temporary_name(target) as temporary:
            with open(temporary, "xb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            placed = put(temporary, target, replaces)
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = path
        raise
    sync(os.path.dirname(placed) or ".")
    return path if placed == target else placed


def all_or_none(
    files: dict[str, Callable[[BinaryIO], object]], folder: str, overwrite: bool = False
) -> dict[str, str]:
    """Writes several files into a folder, each whole; where one fails, those that were written before it are
    removed. Returns the path of each name: another one where somebody has made such a file meanwhile."""
    placed: dict[str, str] = {}
    new = [name for name in files if not os.path.lexists(os.path.join(folder, name))]
    try:
        for name, write in files.items():
            placed[name] = write_atomic(os.path.join(folder, name), write, lambda _: overwrite)
    except BaseException:
        for name in placed.keys() & set(new):
            with contextlib.suppress(OSError):
                os.remove(placed[name])
        raise
    return placed


def link_atomic(source: str, path: str, replaces: Callable[[str], bool] = lambda path: True) -> str:
    """`path` becomes the same file as `source`: a hard link where the file system can, else a copy.
    Otherwise as `write_atomic`."""
    with temporary_name(path) as temporary:
        try:
            os.link(source, temporary)
        except OSError:
            with open(source, "rb") as original:
                return write_atomic(path, lambda file: file.write(original.read()), replaces, follows=False)
        path = put(temporary, path, replaces)  # a link to itself is not moved by a rename
    sync(os.path.dirname(path) or ".")
    return path


def put(temporary: str, path: str, replaces: Callable[[str], bool]) -> str:
    """Gives a whole file the name `path`, or another one where something stands there that it may not
    replace. Returns the name."""
    for name in _names(path):
        if _is_file_or_link(name) and replaces(name):
            os.replace(temporary, name)  # of a link the link itself
            return name
        try:
            os.link(temporary, name)  # fails where something stands there: no moment between look and act
        except FileExistsError:
            if same_content(temporary, name):
                return name
            continue
        except OSError:  # no links on this file system
            try:
                os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            except FileExistsError:
                continue
            os.replace(temporary, name)
            return name
        os.unlink(temporary)
        return name
    raise FileExistsError(17, "exists, as do all names like it", path)


def _is_file_or_link(path: str) -> bool:
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return False
    return stat.S_ISREG(mode) or stat.S_ISLNK(mode)


def write_text(path: str, text: str) -> None:
    """Puts a small file that is written again and again in the place of the one before. Raises OSError."""
    with temporary_name(path) as temporary:
        with open(temporary, "x", encoding="utf-8", newline="") as file:
            file.write(text)
        os.replace(temporary, path)


def _names(path: str) -> Iterable[str]:
    """`path`, and others like it: coded.csv, coded.1.csv, coded.2.csv, …"""
    stem, ending = os.path.splitext(path)
    return [path, *(f"{stem}.{number}{ending}" for number in range(1, 1000))]


def same_content(path: str, other: str) -> bool:
    """Whether two regular files hold the same."""
    try:
        if not os.path.isfile(other) or os.path.getsize(path) != os.path.getsize(other):
            return False
        with open(path, "rb") as first, open(other, "rb") as second:
            while block := first.read(1 << 20):
                if block != second.read(1 << 20):
                    return False
        return True
    except OSError:
        return False


def is_same(path: str, other: str) -> bool:
    """Whether two paths are one file: by device and inode, links followed; by name where one is not there
    yet."""
    try:
        return os.path.samefile(path, other)
    except OSError:
        return os.path.realpath(path) == os.path.realpath(other)


def kind_of(path: str) -> str | None:
    """What stands at `path` if that is no regular file: a folder, a pipe, …; None for a regular file, and
    where nothing stands."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return None
    return (
        None
        if stat.S_ISREG(mode)
        else next((name for is_kind, name in _KINDS.items() if is_kind(mode)), "no regular file")
    )


def problems(
    outputs: Iterable[str],
    inputs: dict[str | None, str],
    overwrite: bool = False,
    own: Callable[[str], bool] = lambda path: False,
    remedy: str = "choose another name",
) -> list[str]:
    """Why a command may not write `outputs`, a line each; [] where it may.

    inputs: what each file is, for example {"my/key.csv": "the file of --key"}, where None is no file; own:
    whether a file that exists is the command's own; remedy: what to do instead of --overwrite.
    """
    found: list[str] = []
    for path in outputs:
        if not path.strip() or "\0" in path:
            found.append(f"{path!r} is no name of a file")
            continue
        read = [what for name, what in inputs.items() if name and is_same(path, name)]
        kind = kind_of(path)
        if read:
            found.append(f"{path} is {read[0]}, and inputs are never written to: {remedy}")
        elif kind is not None:
            found.append(f"{path} is {kind}, which is not written to: {remedy}")
        elif os.path.exists(path) and not overwrite and not own(path):
            found.append(f"{path} exists; --overwrite replaces it, or {remedy}")
    return found


class OwnFiles:
    """The files of a folder that this program has written there, by the list in it.

    Files that a run writes again and again are listed by name alone, others with their checksum: one that
    was edited since is no longer its own. overwrite: everything that the run itself names may be replaced;
    keep: nothing may, not even its own. placed: name → path of what was written. Raises UserError for a
    list of another program or version.
    """

    def __init__(self, folder: str, overwrite: bool = False, keep: bool = False):
        self.folder, self.overwrite, self.keep = folder, overwrite, keep
        self.placed: dict[str, str] = {}
        self._seen: dict[str, tuple[int, int]] = {}  # what this process has put there: device and inode
        self.path = os.path.join(folder, LIST)
        self.files: dict[str, int | None] = {}
        self._lock = threading.RLock()
        self.is_listed = os.path.lexists(self.path)
        if self.is_listed:
            self.files = _read_list(self.path)

    def holds(self, path: str) -> bool:
        """Whether a file that exists is one of them, as it was written."""
        name = os.path.basename(path)
        if name not in self.files or not is_same(os.path.dirname(path) or ".", self.folder):
            return False
        try:
            found = os.lstat(path)
            if name in self._seen and self._seen[name] != (found.st_dev, found.st_ino):
                return False
            if self.files[name] is None:
                return stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode)
            return found.st_size <= _LARGEST_LISTED and of_file(path) == self.files[name]
        except OSError:
            return False

    def saw(self, path: str) -> None:
        """Notes which file stands at `path` now: another one would be somebody else's."""
        with contextlib.suppress(OSError):
            found = os.lstat(path)
            self._seen[os.path.basename(path)] = (found.st_dev, found.st_ino)

    def replaces(self, path: str) -> bool:
        """Whether it may stand in the place of what is at `path` now."""
        return not self.keep and (self.overwrite or self.holds(path))

    def add(self, names: dict[str, int | None]) -> None:
        """Lists files, with the checksum of their content or None. Raises OSError."""
        with self._lock:
            if not self.is_listed or any(
                name not in self.files or self.files[name] != checksum for name, checksum in names.items()
            ):
                self._write(self._listed() | names)

    def forget(self, names: Iterable[str]) -> None:
        with self._lock:
            self._write(
                {name: checksum for name, checksum in self._listed().items() if name not in set(names)}
            )

    def _listed(self) -> dict[str, int | None]:
        """What the list says now: another process may have written it since."""
        return (
            self.files | _read_list(self.path)
            if self.is_listed and os.path.lexists(self.path)
            else self.files
        )

    def _write(self, files: dict[str, int | None]) -> None:
        self.files = files
        content = json.dumps(
            {"written_by": "histocc", "format": FORMAT, "files": files}, indent=1, sort_keys=True
        )
        placed = write_atomic(
            self.path, lambda file: file.write(content.encode()), lambda _: self.is_listed, follows=False
        )
        if placed != self.path:
            os.remove(placed)
            raise UserError(f"{self.path}: somebody has made this file meanwhile; choose another folder")
        self.is_listed = True

    def write(self, name: str, write: Callable[[BinaryIO], object], checksum: int | None = None) -> str:
        """As `write_atomic`, in the folder: returns the path, which is another one where a file of that
        name is not its own.

        checksum: of the content, for a file that is its own only as long as nobody has edited it.
        """
        return self._place(
            name, lambda path, replaces: write_atomic(path, write, replaces, follows=False), checksum
        )

    def write_content(self, name: str, content: bytes) -> str:
        """Writes a small file, listed with its checksum."""
        return self.write(name, lambda file: file.write(content), zlib.crc32(content))

    def link(self, source: str, name: str) -> str:
        """As `link_atomic`, in the folder."""
        return self._place(name, lambda path, replaces: link_atomic(source, path, replaces), None)

    def _place(
        self, name: str, place: Callable[[str, Callable[[str], bool]], str], checksum: int | None
    ) -> str:
        path = os.path.join(self.folder, name)
        replaces, listed, before = self.replaces(path), name in self.files, self.files.get(name, checksum)
        self.add({name: before})  # first: whatever ends this process, the next one knows its own files
        placed = place(path, lambda at: replaces if at == path else self.holds(at))
        if placed != path and (not listed or before is None):  # else it stays known as one that was edited
            self.forget([name])
        self.add({os.path.basename(placed): checksum})
        self.placed[name] = placed
        self.saw(placed)
        return placed

    def remove(self, names: Iterable[str]) -> None:
        """Removes those of the files that are its own."""
        mine = [name for name in names if self.holds(os.path.join(self.folder, name))]
        for name in mine:
            with contextlib.suppress(FileNotFoundError):  # another process that sees this folder was first
                os.remove(os.path.join(self.folder, name))
        if mine:
            self.forget(mine)

    def free_name(self, name: str) -> str:
        """The path at which a file that is written piece by piece may begin: `name`, or one like it; listed
        from now on."""
        return self.free_names([name])[0]

    def free_names(self, names: Iterable[str]) -> list[str]:
        """As `free_name`, of several files."""
        paths = [
            next(
                path
                for path in _names(os.path.join(self.folder, name))
                if not os.path.lexists(path) or self.replaces(path)
            )
            for name in names
        ]
        self.add({os.path.basename(path): None for path in paths})
        for path in filter(os.path.islink, paths):  # never written through: what it leads to is not the run's
            os.unlink(path)
        return paths


def _read_list(path: str) -> dict[str, int | None]:
    try:
        if kind_of(path) is not None or os.path.getsize(path) > 1 << 24:
            raise ValueError("not a small file")
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        files = content["files"]
        good = content["written_by"] == "histocc" and all(
            isinstance(name, str)
            and os.path.basename(name) == name
            and (checksum is None or type(checksum) is int)
            for name, checksum in files.items()
        )
    except PermissionError:
        raise UserError(f"{path}: permission denied; make it readable, or choose another folder") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(
            f"{path}: is not the list of files that histocc writes under this name; choose another folder"
        ) from None
    if not good or type(content.get("format")) is not int or content["format"] != FORMAT:
        raise UserError(
            f"{path}: expected format {FORMAT}, found {content.get('format')!r}, or entries of another kind: "
            "a newer version of "
            "histocc wrote it, or it was edited; choose another folder"
        )
    return files


def missing_folders(path: str) -> list[str]:
    """`path` and those above it that are no folders yet, the deepest first."""
    missing: list[str] = []
    path = os.path.abspath(path)
    while not os.path.isdir(path) and path != os.path.dirname(path):
        missing.append(path)
        path = os.path.dirname(path)
    return missing


def folder_above(path: str) -> str:
    """The nearest folder that is there already in which `path` is, or would be."""
    return next(map(os.path.dirname, reversed(missing_folders(path))), os.path.abspath(path))


def save_path_problem(path: str) -> str | None:
    """Why nothing can be written below `path`, or None. Leaves nothing behind."""
    if not path.strip() or "\0" in path:
        return f"{path!r} is no name of a folder"
    before_last = path[: path.rindex("..") + 2] if ".." in path.split(os.sep) else "."
    if not os.path.isdir(before_last):  # what it leads to can only be known when it is there
        return f"{path}: {before_last} is no folder; name the folder without '..'"
    in_the_way = [name for name in missing_folders(path) if os.path.lexists(name)]
    if in_the_way:
        return f"{path}: cannot be the save folder, since {in_the_way[0]} is not a folder"
    try:
        with tempfile.TemporaryFile(dir=folder_above(path)):
            return None
    except OSError as error:
        return f"{path}: cannot write there: {in_words(OSError(error.errno, error.strerror))}"
