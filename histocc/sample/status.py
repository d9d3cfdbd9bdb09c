"""What stands around a title that says who holds it: a widow, a former holder, a master, a journeyman or an
apprentice.
"""

from functools import cache

from histocc.sample.table import Forms
from histocc.sample.words import (
    CRAFT,
    CRAFT_ENDING,
    FORMER,
    FORMER_WOMEN,
    NO_WIDOWS,
    NOT_A_CRAFT,
    WIDOW,
    WOMEN,
)

# (words before the title, where the title ends for these words, words after it)
Wrapping = tuple[str, int | None, str]

GENITIVE_ELSE = {"da": "enke efter {}", "sv": "änka efter {}", "de": "{} witwe"}
_VOWELS = "aeiouyhàâéèêëîïôœù"


def wrappings(form: Forms, text: str, column: str) -> tuple[tuple[Wrapping, ...], ...]:
    """What can stand around `text`, a spelling of the form's title; one tuple for each kind, kinds being
    equally likely.
    """
    ending, stays, ranks = CRAFT_ENDING.get(column, ("", "", ()))
    craft = is_craft(form)
    joined = (
        len(stays) - len(ending) if craft and ranks and text.endswith(ending) and " " not in text else None
    )
    return _wrappings(
        column,
        form.code in WOMEN,
        form.code not in NO_WIDOWS,
        craft,
        joined,
        text[0],
        _takes_s(text, column),
        text.endswith("mädchen"),
    )


def is_craft(form: Forms) -> bool:
    """Whether masters, journeymen and apprentices of this title are what the title says."""
    return (
        "75" <= form.code < "96"
        and form.code not in WOMEN
        and not any(part in form.title for part in NOT_A_CRAFT)
    )


@cache
def _wrappings(
    column: str,
    woman: bool,
    widows: bool,
    craft: bool,
    joined: int | None,
    first: str,
    takes_s: bool,
    neuter: bool,
) -> tuple[tuple[Wrapping, ...], ...]:
    def around(templates):
        return tuple(_around(template, column, first, takes_s, neuter) for template in templates)

    if woman:
        return (around(FORMER_WOMEN[column]),)
    kinds = [around(FORMER[column])]
    if widows:
        kinds.append(around(WIDOW[column]))
    if joined is not None:
        kinds.append(tuple(("", joined or None, rank) for rank in CRAFT_ENDING[column][2]))
    elif craft and CRAFT[column]:
        kinds.append(around(CRAFT[column]))
    return tuple(kinds)


def _around(template: str, column: str, first: str, takes_s: bool, neuter: bool) -> Wrapping:
    if column == "fr" and "de {}" in template and first in _VOWELS:
        template = template.replace("de {}", "d'{}")
    elif column == "en" and " a {}" in template and first in "aeiou":
        template = template.replace(" a {}", " an {}")
    elif neuter:
        template = template.replace("e {}", "es {}")
    if "{}s" in template and not takes_s:
        template = GENITIVE_ELSE[column]
    before, _, after = template.partition("{}")
    return before, None, after


def _takes_s(title: str, column: str) -> bool:
    """Whether "of the title" is the title and an s; in German that is sure for one word in -er or -mann
    only.
    """
    if column == "de":
        return title.endswith(("er", "mann")) and " " not in title
    return title[-1] not in "sxz"
