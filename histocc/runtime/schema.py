"""What a file must hold, as tables: entry → check. A check takes a value and returns None, or what is wrong
with it.

    RNG = mapping({"seed": whole(0), "threads": whole(1, 1024)})
    require("last.bin", RNG, {"seed": 1, "threads": "x"}, "rng")

raises UserError: last.bin: rng: threads: found 'x', expected a whole number 1 … 1,024
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from histocc.runtime.errors import UserError

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DEEPEST = 20  # nesting of plain values
MOST_VALUES = 1_000_000  # in one file


class Wrong(NamedTuple):
    """entry: where, "" for the value itself; found, expected: in words."""

    entry: str
    found: str
    expected: str

    def inside(self, name: Any) -> "Wrong":
        """The same, seen from the dict or list that holds the value as `name`."""
        return self._replace(entry=f"{name}: {self.entry}" if self.entry else str(name))

    def __str__(self) -> str:
        return f"{self.entry + ': ' if self.entry else ''}found {self.found}, expected {self.expected}"


Check = Callable[[Any], Wrong | None]


def require(file: str, check: Check, value: Any, entry: str = "") -> None:
    """Raises UserError with the file, the entry, what was found and what is expected, unless `value`
    passes."""
    wrong = check(value)
    if wrong:
        raise UserError(f"{file}: {wrong.inside(entry) if entry else wrong}")


def described(value: Any) -> str:
    """A value in a few words, whatever it is."""
    if value is None or isinstance(value, (bool, float)):
        return repr(value)
    if isinstance(value, int):
        return repr(value) if abs(value) < 10**18 else f"a number of {value.bit_length():,} bits"
    if isinstance(value, str):
        return repr(value) if len(value) <= 60 else f"{value[:60]!r}… of {len(value):,} characters"
    if isinstance(value, torch.Tensor):
        return f"a tensor {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, (dict, list, tuple, set)):
        return f"a {type(value).__name__} of {len(value):,} entries"
    return f"a value of type {type(value).__name__}"


def kind(expected: str, holds: Callable[[Any], bool]) -> Check:
    """A check by one condition; expected: in words."""
    return lambda value: None if holds(value) else Wrong("", described(value), expected)


def _limits(least: float | None, most: float | None) -> str:
    if least is None:
        return ""
    return f" {least:,} … {most:,}" if most is not None and most < 2**62 else f" of at least {least:,}"


def whole(least: int, most: int | None = None) -> Check:
    """A whole number (no bool) between `least` and `most`."""
    return kind(
        f"a whole number{_limits(least, most)}",
        lambda value: type(value) is int and value >= least and (most is None or value <= most),
    )


def real(least: float | None = None, most: float | None = None, above: bool = False) -> Check:
    """A finite number between `least` and `most`; above: more than `least`. Without limits: any float,
    finite or not."""

    def holds(value: Any) -> bool:
        if type(value) not in (int, float) or type(value) is int and abs(value) >= 2**63:
            return False
        if least is None:
            return True
        return (
            math.isfinite(value)
            and (value > least if above else value >= least)
            and (most is None or value <= most)
        )

    words = _limits(least, most)
    return kind(
        (
            f"a number above {least:,}" + (f", at most {most:,}" if most is not None else "")
            if above
            else f"a number{words}"
        ),
        holds,
    )


def text(longest: int = 10_000, empty: bool = False) -> Check:
    """A str of at most `longest` characters."""
    return kind(
        f"a text{'' if empty else ', not empty,'} of at most {longest:,} characters",
        lambda value: isinstance(value, str) and len(value) <= longest and (empty or bool(value.strip())),
    )


flag: Check = kind("true or false", lambda value: isinstance(value, bool))


def one_of(*values: Any) -> Check:
    """One of `values`, of the same type."""
    names = ", ".join(map(repr, values))
    return kind(
        f"one of {names}" if len(values) > 1 else names,
        lambda value: any(type(value) is type(one) and value == one for one in values),
    )


def maybe(check: Check) -> Check:
    """None, or what passes `check`."""

    def checked(value: Any) -> Wrong | None:
        wrong = None if value is None else check(value)
        return wrong and wrong._replace(expected=f"{wrong.expected}, or nothing")

    return checked


def either(*checks: Check) -> Check:
    """What passes one of `checks`."""

    def checked(value: Any) -> Wrong | None:
        found = [check(value) for check in checks]
        return (
            None
            if None in found
            else Wrong("", described(value), " or ".join(wrong.expected for wrong in found if wrong))
        )

    return checked


def listing(check: Check, least: int = 0, most: int = 1_000_000) -> Check:
    """A list or tuple of `least` to `most` values that each pass `check`."""

    def checked(value: Any) -> Wrong | None:
        if not isinstance(value, (list, tuple)) or not least <= len(value) <= most:
            return Wrong("", described(value), f"a list of {least:,} … {most:,} entries")
        return next((wrong.inside(i) for i, part in enumerate(value) if (wrong := check(part))), None)

    return checked


def mapping(
    required: dict[str, Check], optional: dict[str, Check] | None = None, rest: Check | None = None
) -> Check:
    """A dict with text as names: entries that must be there, that may be there, and (`rest`) what all others
    must pass;
    without `rest` others are not looked at."""

    def checked(value: Any) -> Wrong | None:
        if not isinstance(value, dict):
            return Wrong("", described(value), "names and values")
        odd = [name for name in value if not isinstance(name, str)]
        if odd:
            return Wrong("", f"an entry {described(odd[0])}", "names of entries that are text")
        missing = next((name for name in required if name not in value), None)
        if missing is not None:
            return Wrong(missing, "nothing", "this entry")
        table = {**(optional or {}), **required}
        for name, part in value.items():
            check = table.get(name, rest)
            wrong = check(part) if check else None
            if wrong:
                return wrong.inside(name[:100])
        return None

    return checked


def both(*checks: Check) -> Check:
    """What passes all `checks`, of which later ones may rely on earlier ones."""
    return lambda value: next((wrong for check in checks if (wrong := check(value))), None)


def content(tensors: bool) -> Check:
    """None, bool, number, text, and (`tensors`) dense tensors, in lists and dicts with names or numbers,
    nested DEEPEST deep at most and
    MOST_VALUES at most: what shares parts is counted as if it were written out."""

    def checked(value: Any) -> Wrong | None:
        expected = f"{'tensors and ' * tensors}plain values: numbers, texts, lists and dicts of them"
        waiting, count = [(value, 0, ())], 0
        while waiting:
            value, depth, entry = waiting.pop()
            count += 1
            wrong = None
            if tensors and isinstance(value, torch.Tensor):
                wrong = dense(value)
            elif isinstance(value, (list, tuple, dict)):
                if depth == DEEPEST or count + len(value) > MOST_VALUES:
                    wrong = Wrong(
                        "",
                        "values inside of values without end",
                        f"at most {DEEPEST} levels and {MOST_VALUES:,} values",
                    )
                elif isinstance(value, dict):
                    odd = next((name for name in value if not isinstance(name, (str, int))), None)
                    wrong = odd and Wrong("", f"an entry {described(odd)}", "names or numbers of entries")
                    waiting += [(part, depth + 1, (*entry, name)) for name, part in value.items()]
                else:
                    waiting += [(part, depth + 1, (*entry, i)) for i, part in enumerate(value)]
            elif not (value is None or isinstance(value, (bool, int, float, str))):
                wrong = Wrong("", described(value), expected)
            if wrong:
                return wrong._replace(entry=": ".join(str(name)[:100] for name in entry))
        return None

    return checked


plain: Check = content(tensors=False)


def dense(value: Any) -> Wrong | None:
    """A tensor in the memory of this process whose numbers lie there, each in its own place: no view
    that is larger than its
    memory, nothing sparse, quantized or on the meta device."""
    ordinary = (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and not value.is_quantized
    )
    if not ordinary:
        return Wrong("", _odd(value), "an ordinary tensor")
    size, held = value.numel() * value.element_size(), value.untyped_storage().nbytes()
    if size > held:
        return Wrong(
            "",
            f"{described(value)} of {size:,} bytes in a memory of {held:,}",
            "a tensor whose numbers are all in the file",
        )
    return None


def _odd(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return described(value)
    how = "quantized" if value.is_quantized else str(value.layout).removeprefix("torch.")
    return f"{described(value)}, {how}, on the device {value.device.type}"


def floats(
    shape: tuple[int, ...] | None = None, least: float | None = None, most: float | None = None
) -> Check:
    """A dense tensor of finite floating-point numbers, of this shape, none below `least`, none further from
    0 than `most`."""

    def checked(value: Any) -> Wrong | None:
        wrong = dense(value)
        if wrong:
            return wrong
        if value.dtype not in FLOATS or value.is_conj() or value.is_neg():
            return Wrong(
                "",
                described(value),
                "a tensor of numbers of type "
                + ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS),
            )
        if shape is not None and tuple(value.shape) != tuple(shape):
            return Wrong("", described(value), f"a tensor of shape {list(shape)}")
        if not value.numel():
            return None
        low, high = torch.aminmax(value.detach())
        if not (torch.isfinite(low) and torch.isfinite(high)):
            return Wrong("", "values that are not finite (NaN or infinite)", "numbers")
        if least is not None and low < least:
            return Wrong("", f"values down to {float(low):g}", f"none below {least:g}")
        if most is not None and max(-low, high) > most:
            return Wrong("", f"values from {float(low):g} to {float(high):g}", f"none beyond {most:,.0f}")
        return None

    return checked


def apart(tensors: dict[str, torch.Tensor]) -> Wrong | None:
    """Whether dense tensors that share memory claim no more than there is."""
    claimed: dict[int, int] = {}
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage()
        if tensor.numel():
            total = claimed[memory.data_ptr()] = (
                claimed.get(memory.data_ptr(), 0) + tensor.numel() * tensor.element_size()
            )
            if total > memory.nbytes():
                return Wrong(name, "a tensor that shares its memory with another one", "a separate tensor")
    return None
