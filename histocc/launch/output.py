"""Printing that ends no run: a full disk, a closed pipe or a closed terminal is passed over."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable

# What printf %q of bash escapes with a backslash: everywhere, at the start of a word, after ":" or "=".
SPECIAL = re.compile(r"""[ '"\\|&;()<>!{}*\[\]?^$`,]|^[#~]|(?<=[:=])~""")
CONTROL = {"\a": "\\a", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\v": "\\v", "\f": "\\f", "\r": "\\r"}
CONTROL.update({"\x1b": "\\E", "\\": "\\\\", "'": "\\'"})


def say(*lines: str) -> None:
    """Prints lines to stdout."""
    _write(1, lines)


def say_error(message: str) -> None:
    """Prints what is wrong to stderr."""
    _write(2, [f"error: {message}"])


def _write(descriptor: int, lines: Iterable[str]) -> None:
    # Not through sys.stdout: what that could not write it would try again at exit, and change the exit code.
    data = os.fsencode("".join(f"{line}\n" for line in lines))
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(descriptor, data) :]


def shell_line(words: list[str]) -> str:
    """A command as one line, to be pasted into a shell."""
    return "".join(f" {quote(word)}" for word in words)


def quote(word: str) -> str:
    """A word as printf %q of bash writes it: on one line, and read by a shell as the same word."""
    if not word:
        return "''"
    if word.isprintable():
        return SPECIAL.sub(r"\\\g<0>", word)
    return "$'" + "".join(map(_ansi_c, word)) + "'"


def _ansi_c(character: str) -> str:
    if character in CONTROL:
        return CONTROL[character]
    if character.isprintable():
        return character
    return "".join(f"\\{byte:03o}" for byte in os.fsencode(character))
