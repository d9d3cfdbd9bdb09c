"""What goes wrong between a register and a transcription of it: misread letters, and carelessness with the
rest.
"""

import unicodedata

SHORTEST = 6  # letters a title needs before it is misread
MOST = 24  # slips of one letter that a title has; of a long one's every second or third
DOUBLED = frozenset("lmnprstkfe")  # letters that a writer in doubt doubles
# Letters, and what a hasty reader of old handwriting takes them for.
MISREAD = {
    "n": "ur",
    "u": "na",
    "e": "ci",
    "c": "e",
    "a": "ou",
    "o": "a",
    "t": "lf",
    "l": "tk",
    "h": "kf",
    "r": "vn",
    "m": "nw",
    "i": "e",
    "f": "s",
    "s": "fſ",
    "b": "hl",
    "v": "ru",
    "k": "h",
    "g": "qy",
    "y": "g",
    "z": "x",
    "w": "m",
    "d": "cl",
    "p": "g",
    "ß": "fs",
    "ö": "o",
    "ä": "a",
    "å": "a",
    "ø": "o",
    "é": "e",
}
MISREAD_TOGETHER = (
    ("rn", "m"),
    ("m", "rn"),
    ("cl", "d"),
    ("d", "cl"),
    ("ij", "y"),
    ("ij", "ÿ"),
    ("nn", "mi"),
    ("in", "m"),
    ("ni", "m"),
    ("ui", "iu"),
    ("nu", "im"),
    ("ll", "tt"),
    ("tt", "ll"),
    ("ss", "ſſ"),
    ("ss", "fs"),
    ("ck", "ch"),
    ("ri", "n"),
    ("li", "h"),
    ("æ", "oe"),
    ("œ", "æ"),
)
# Left by the clerk before and after the text: "the same", a dash, a note that it is hard to read. No form of
# a title begins and ends so, and a full stop alone is not among them, as it would make abbreviations: what is
# made belongs to one code.
STRAY = (
    ("", " do."),
    ("", ","),
    ("", ";"),
    ("", " -"),
    ("- ", ""),
    ("", " ?"),
    ("(", ")"),
    ("", " *"),
    ("[", "]"),
    ("", ".."),
)
STRAY_OF_THE_LAND = {
    "en": (("", " do"), ("", " ditto"), ("", " &c.")),
    "da": (("", " ds."), ("", " m.m.")),
    "sv": (("", " d:o"), ("", " m.m.")),
    "nl": (("", " id."), ("", " enz.")),
    "de": (("", " dto."), ("", " etc.")),
    "fr": (("", " id."), ("", " idem")),
}


def slips(title: str) -> list[str]:
    """The title with a letter left out, doubled, misread or swapped with the next; never at the start of a
    word.
    """
    if len(title) < SHORTEST:
        return []
    found = []
    for at in range(1, len(title)):
        before, letter, after = title[:at], title[at], title[at + 1 :]
        if not letter.isalpha() or before[-1] == " ":
            continue
        found.append(before + after)
        if letter in DOUBLED:
            found.append(before + letter + title[at:])
        if letter in MISREAD:
            found += [before + other + after for other in MISREAD[letter]]
        if after and after[0].isalpha() and after[0] != letter:
            found.append(before + after[0] + letter + after[1:])
    found = found[:: len(found) // MOST + 1]
    for right, wrong in MISREAD_TOGETHER:
        at = title.find(right, 1)
        if at > 0 and title[at - 1] != " ":
            found.append(title[:at] + wrong + title[at + len(right) :])
    return found


def careless(title: str) -> list[str]:
    """The title without its accents, with a space too few or too many, or with a full stop."""
    found = [_unaccented(title)]
    if " " in title:
        found += [title.replace(" ", "", 1), title.replace(" ", "-", 1)]
    elif len(title) > SHORTEST + 1:
        middle = len(title) // 2
        found += [f"{title[:at]} {title[at:]}" for at in (middle - 1, middle, middle + 1)]
        found.append(f"{title[:middle]}-{title[middle:]}")
    found.append(title + ".")
    return [text for text in dict.fromkeys(found) if text != title]


def _unaccented(title: str) -> str:
    plain = title.translate({ord("ø"): "o", ord("æ"): "ae", ord("œ"): "oe", ord("ß"): "s"})
    return "".join(
        letter for letter in unicodedata.normalize("NFD", plain) if not unicodedata.combining(letter)
    )
