"""Rows like those of historical registers: spellings, slips, abbreviations, widows, ranks, places, several
occupations.

They are made from lists next to this file, where columns en to fr are languages, as in the rows.

occupations.csv    codes and their titles, joined with `|`. often: how often a code is drawn. employers: their
                   kinds in phrases.csv. traits: women (titles of women), no widows, craft (has masters and
                   apprentices), trade (people have a second occupation), side (such an occupation)
phrases.csv        words around a title: `{}` is the title, `{s}` its genitive, `@` a town or a person,
                   `er > ermeister` another ending of the title. None of them changes the code. Only the
                   built-in model learns from the kind relation
spellings.csv      old spellings: a regular expression and its replacement
abbreviations.csv  usual abbreviations of a title
misread.csv        letters of old handwriting and how they are misread, everywhere or at the start
demo.csv           twelve rows to show a trained model
"""

import csv
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from importlib import resources
from itertools import chain
from random import Random

from histocc.lexicon import LEXICON_LANGUAGES

HEADER = ("occ1", "lang", "hisco_1", "hisco_2", "hisco_3")
Row = tuple[str, str, str, str, str]  # columns of HEADER

# Shares in hundredths: of all rows, of titles with other words, and of rows of the kind
CASES = (lambda text: text[0].upper() + text[1:],) * 20 + (str.title,) * 2 + (str.upper,) * 3
SPELLED, ABBREVIATED = 15, 4
SLIPS_OF_NOTHING, STATUS_IN_TOWN, TWO_IN_TOWN, SIDE_FIRST, EMPLOYED = 15, 20, 10, 40, 40
SLOTS = 12  # places in the draw of an occupation's title. Half are for any title
NOT_A_CRAFT = ("arbe", "werker", "mester", "mäst", "meister")  # titles with these take no rank of a craft
# (kind of rows, from which titles of a language, share of rows in thousandths)
TEXT_KINDS = (
    ("nothing", "nothing", 60),
    ("three", "trades", 10),
    ("two", "trades", 100),
    ("status", "common", 140),
    ("place", "common", 80),
    ("spellings", "common", 105),
    ("short", "common", 50),
    ("slips", "common", 45),
    ("careless", "common", 20),
    ("plain", "common", 390),
)


def read(name: str) -> list[dict[str, str]]:
    """Return the rows of one of the lists."""
    text = resources.files("histocc.sample").joinpath(name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def demo_rows() -> list[tuple[str, ...]]:
    """Return twelve rows in the six languages that `rows` never makes."""
    return [tuple(row.values()) for row in read("demo.csv")]


def rows(n: int, seed: int) -> Iterator[Row]:
    """Yield n rows of HEADER, the same for a seed on every machine. A smaller n yields the first ones."""
    bits, shown = Random(seed).getrandbits, {text.casefold() for text, *_ in demo_rows()}
    draw = [
        (kind, language, getattr(language, titles))
        for language in languages()
        for kind, titles, times in TEXT_KINDS
        for _ in range(times)
    ]
    while n > 0:
        which, case, a, b, *others = (bits(32) for _ in range(8))
        kind, language, occupations = pick(draw, which)
        text, titles = text_of_kind(kind, language, pick(pick(occupations, a), b), *others)
        if case % 100 < len(CASES):
            text = CASES[case % 100](text)
        if text.casefold() not in shown:
            n -= 1
            one, two, three = [*(title.code for title in titles), "", ""][:3]
            yield text, language.tag, one, two, three


def pick(texts: Sequence, number: int):
    return texts[number % len(texts)]


def text_of_kind(
    kind: str, language: "Language", title: "Title", c: int, d: int, e: int, f: int
) -> tuple[str, list["Title"]]:
    """Return a lower-case text of a kind, and the titles in it. c to f: random numbers far above the lengths
    of the lists that they pick from.
    """
    text = title.text
    if kind in ("spellings", "short", "slips"):
        text = pick(getattr(title, kind), c)
    elif kind == "nothing" and c % 100 < SLIPS_OF_NOTHING:
        text = pick(title.slips, d)
    elif kind == "careless":  # or with the clerk's remains before or after it
        text = pick(title.careless, c) if d % 2 else pick(language.phrases["stray"], c).replace("{}", text)
    elif kind == "status":  # a widow, a former holder, or a rank of a craft, sometimes with a town
        text = pick((text, *title.spellings), d) if c % 100 < SPELLED else text
        kinds = title.statuses[text.endswith(language.rank_ending) and " " not in text]
        text = in_phrase(language, pick(pick(kinds, e), f), text)
        text += pick(language.in_town, f >> 8) if (c >> 8) % 100 < STATUS_IN_TOWN else ""
    elif kind == "place":  # an employer or a town
        where = title.employers if title.employers and c % 100 < EMPLOYED else language.in_town
        text = pick(title.written, d) + pick(where, e)
    elif kind == "two":  # joined by "and", one of them a second occupation of people with a trade
        second = pick(language.sides, c)[d % SLOTS]
        if second.code == title.code:
            second = pick(language.sides, c + 1)[d % SLOTS]
        one, two = (second, title) if e % 100 < SIDE_FIRST else (title, second)
        text = f"{pick(one.written, d >> 4)} {pick(language.phrases['and'], f)} {pick(two.written, e >> 8)}"
        text += pick(language.in_town, f >> 8) if (f >> 2) % 100 < TWO_IN_TOWN else ""
        return text, [one, two]
    elif kind == "three":  # a trade and two more, in any order: "farmer, innkeeper and carpenter"
        sides = [titles for titles in language.sides if titles[0].code != title.code]
        at = c % len(sides)
        another = (at + 1 + (c >> 8) % (len(sides) - 1)) % len(sides)
        titles = [title, sides[at][d % SLOTS], sides[another][(d >> 8) % SLOTS]] * 2
        titles = titles[e % 3 : e % 3 + 3]
        one, two, last = (pick(title.written, f >> 8 * i) for i, title in enumerate(titles))
        return f"{one}, {two} {pick(language.phrases['and'], e >> 8)} {last}", titles
    return text, [title]


def in_phrase(language: "Language", phrase: str, text: str) -> str:
    """Return the title in a phrase, with the grammar of the language."""
    ending, _, instead = phrase.partition(" > ")
    if instead:
        return text.removesuffix(ending) + instead
    if language.tag == "fr" and text[0] in "aeiouyhàâéèêëîïôœù":
        phrase = phrase.replace("de {}", "d'{}")
    elif language.tag == "en" and text[0] in "aeiou":
        phrase = phrase.replace(" a {}", " an {}")
    elif text.endswith("mädchen"):
        phrase = phrase.replace("e {}", "es {}")
    if "{s}" in phrase:
        takes_s = text[-1] not in "sxz"
        if language.tag == "ge":  # certain only for one word in -er or -mann
            takes_s = text.endswith(("er", "mann")) and " " not in text
        phrase = phrase.replace("{s}", "{}s") if takes_s else language.phrases["widow without s"][0]
    return phrase.replace("{}", text)


# The spellings of a title in registers

MIN_LETTERS = 6  # fewest letters of a misread or cut title, and of its remainder
MIN_BEFORE_END, MAX_CONTRACTIONS = 4, 3  # letters before the end in "carpr", and forms per title
MAX_SLIPS = 24  # slips of one letter per title. A long title keeps every second or third
DOUBLED = frozenset("lmnprstkfe")  # letters that a writer in doubt doubles
UNACCENTED = {ord("ø"): "o", ord("æ"): "ae", ord("œ"): "oe", ord("ß"): "s"}  # NFD keeps these whole
_VOWELS, _CONSONANTS = "aeiouyæøåäöüàâéèêëîïôœù", frozenset("bcçdfghjklmnpqrsßtvwxz")
_HEAD = re.compile(rf"[^{_VOWELS} ]*[{_VOWELS}]+[^{_VOWELS} ]")


def variants(title: str, rules: list[tuple]) -> list[str]:
    """Return the title with one or two rules applied throughout. rules: (substitution, replacement)."""
    one = [(at, new) for at, (sub, instead) in enumerate(rules, 1) if (new := sub(instead, title)) != title]
    two = [new for at, old in one for sub, instead in rules[at:] if (new := sub(instead, old)) != old]
    return [new for new in [new for _, new in one] + two[: len(one)] if new != title]


def slips(title: str, misread: dict[str, list[str]], first: list[tuple[str, str]]) -> list[str]:
    """Return the title with a letter left out, doubled, misread or swapped, never at the start of a word."""
    if len(title) < MIN_LETTERS:
        return []
    texts = []
    for at in range(1, len(title)):
        before, letter, after = title[:at], title[at], title[at + 1 :]
        if not letter.isalpha() or before[-1] == " ":
            continue
        texts.append(before + after)
        if letter in DOUBLED:
            texts.append(before + letter + title[at:])
        texts += [before + wrong + after for wrong in misread.get(letter, ())]
        if after and after[0].isalpha() and after[0] != letter:
            texts.append(before + after[0] + letter + after[1:])
    texts = texts[:: len(texts) // MAX_SLIPS + 1]
    for right, wrong in first:
        at = title.find(right, 1)
        if at > 0 and title[at - 1] != " ":
            texts.append(title[:at] + wrong + title[at + len(right) :])
    return texts


def careless(title: str) -> list[str]:
    """Return the title without its accents, with a missing or extra space, or with a full stop."""
    letters = unicodedata.normalize("NFD", title.translate(UNACCENTED))
    texts = ["".join(letter for letter in letters if not unicodedata.combining(letter))]
    if " " in title:
        texts += [title.replace(" ", "", 1), title.replace(" ", "-", 1)]
    elif len(title) > MIN_LETTERS + 1:
        middle = len(title) // 2
        texts += [f"{title[:at]} {title[at:]}" for at in (middle - 1, middle, middle + 1)]
        texts.append(f"{title[:middle]}-{title[middle:]}")
    return [text for text in (*texts, title + ".") if text != title]


def shared_items(pairs: Iterable[tuple]) -> set:
    """Return the items with more than one code. pairs: (item, a code)."""
    first: dict = {}
    return {text for text, code in pairs if first.setdefault(text, code) != code}


def _left(title: str) -> Iterator:
    """Yield the possible remainders of a title: a beginning, with or without the end, or the initials."""
    yield from (title[:length] for length in range(MIN_LETTERS, len(title) + 1))
    yield from ((title[:length], title[-1]) for length in range(2, len(title)))
    *words, last = title.split()
    if words:
        letters = tuple(word[0] for word in words)
        yield from ((*letters, last), (*letters, last[0]))


def cut_short(title: str, shared: set) -> list[str]:
    """Return the title cut short. shared: remainders that titles of another code can also leave."""
    heads = (title[:length] for length in range(MIN_LETTERS, len(title) - 2))
    short = [f"{head}." for head in heads if head[-1] in _CONSONANTS and head not in shared]  # "blacksm."
    *words, last = title.split()
    if not words:
        return short + _contractions(title, shared)[:MAX_CONTRACTIONS]
    letters = tuple(word[0] for word in words)
    if (*letters, last) not in shared:
        start = "".join(f"{letter}. " for letter in letters)
        short += [start + last, start.replace(" ", "") + last]  # "f. labourer", "f.labourer"
        short.append(" ".join(f"{word[:3]}." if len(word) > 4 else word for word in words) + f" {last}")
    if len(words) < 3 and (*letters, last[0]) not in shared:
        short.append("".join(f"{letter}." for letter in (*letters, last[0])))  # "f.l."
    return short


def _contractions(title: str, shared: set) -> list[str]:
    """Return one word without the vowels of its middle ("carpntr"), or its beginning and end ("carpr")."""
    start, end = _HEAD.match(title), title[-1]
    if len(title) <= MIN_LETTERS or not start or end in _VOWELS:
        return []
    head, short = start[0], []
    middle = re.sub(r"(\w)\1", r"\1", re.sub(f"[{_VOWELS}]", "", title[len(head) : -1]))
    if len(middle) < len(title) - len(head) - 2 and (head, end) not in shared:
        short.append(head + middle + end)
    for length in range(max(len(head), MIN_BEFORE_END), len(title) - 3):
        if title[length - 1] in _CONSONANTS and (title[:length], end) not in shared:
            short += [title[:length] + end, title[:length] + end + "."]
    return short


def ways_of_writing(tag: str, code_of: dict[str, str]) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Return how each title of a language is spelled, misread, written carelessly, and cut short. Forms that
    two codes could share are left out. Titles of no occupation have one spelling and are not cut short.
    """
    rules = [(re.compile(r["written"]).sub, r["instead"]) for r in read("spellings.csv") if r["lang"] == tag]
    usual = {r["title"]: r["usual"].split("|") for r in read("abbreviations.csv") if r["lang"] == tag}
    misread: dict[str, list[str]] = {}
    first: list[tuple[str, str]] = []
    for row in read("misread.csv"):
        if row["where"] == "everywhere":
            misread.setdefault(row["letters"], []).append(row["read"])
        else:
            first.append((row["letters"], row["read"]))
    working = {title for title, code in code_of.items() if code[0] != "-"}
    shared = shared_items((left, code_of[title]) for title in working for left in _left(title))
    ways_of = {}
    for title in code_of:
        spelled, short = variants(title, rules), [*usual.get(title, ()), *cut_short(title, shared)]
        spelled, short = (spelled, short) if title in working else ([], [])
        ways_of[title] = (spelled, slips(title, misread, first), careless(title), short)
    written = ((title, text) for title, ways in ways_of.items() for text in (title, *chain(*ways)))
    shared = shared_items((text.casefold(), code_of[title]) for title, text in written)
    return {
        title: tuple(tuple(dict.fromkeys(t for t in way if t.casefold() not in shared)) for way in ways)
        for title, ways in ways_of.items()
    }


class Title:
    """A title of an occupation, and the ways in which registers write it, or the title itself."""

    def __init__(self, text: str, row: dict[str, str], language: "Language", ways: tuple):
        self.text, self.code = text, row["hisco"]
        self.traits, phrases = set(row["traits"].split("|")), language.phrases
        kinds = [phrases["former, of women" if "women" in self.traits else "former"]]
        kinds += [] if self.traits & {"women", "no widows"} else [phrases["widow"]]
        is_craft = "craft" in self.traits and not any(part in text for part in NOT_A_CRAFT)
        ranks = (phrases["rank"], phrases["rank as ending"] or phrases["rank"]) if is_craft else ([], [])
        # for a title as it is, and for one word whose ending a rank replaces
        self.statuses = [[*kinds, rank] if rank else kinds for rank in ranks]
        self.spellings, self.slips, self.careless, self.short = (way or (text,) for way in ways)
        # the title with other words: mostly plain, sometimes spelled differently or cut short
        self.written = _mixed(text, ways[0], SPELLED)
        self.written += _mixed(text, ways[3][:4], ABBREVIATED) if ways[3] else ()
        self.employers = [
            phrase[2:].replace("@", person)
            for kind in filter(None, row["employers"].split("|"))
            for phrase in phrases[f"employer: {kind}"]
            for person in (phrases["person"] if "@" in phrase else [""])
        ]


def _mixed(title: str, others: tuple[str, ...], share: float) -> tuple[str, ...]:
    """Return the others after so many copies of the title that they are `share` hundredths of the whole."""
    return (title,) * max(1, round(len(others) * (100 - share) / share)) + others


class Language:
    """The occupations of a language and their titles, each repeated as often as it is drawn."""

    def __init__(self, tag: str):
        self.tag = tag
        self.phrases: dict[str, list[str]] = {}
        for row in read("phrases.csv"):
            self.phrases.setdefault(row["kind"], []).extend(filter(None, [row[tag]]))
        self.rank_ending = "".join(self.phrases["rank as ending"][:1]).partition(" > ")[0]
        towns = [name for town in self.phrases["town"] for name in (town, town.title())]
        self.in_town = [phrase[2:].replace("@", town) for town in towns for phrase in self.phrases["in town"]]
        self.common, self.trades, self.sides, self.nothing = [], [], [], []
        table = read("occupations.csv")
        ways = ways_of_writing(tag, {title: row["hisco"] for row in table for title in row[tag].split("|")})
        for row in table:
            titles = tuple(Title(text, row, self, ways[text]) for text in row[tag].split("|"))
            often, any_title = int(row["often"]), SLOTS // 2 // len(titles)
            if row["hisco"].startswith("-"):
                self.nothing += [titles] * often
                continue
            slots = titles[:1] * (SLOTS - any_title * len(titles)) + titles * any_title
            self.common += [slots] * often
            self.trades += [slots] * often if "trade" in titles[0].traits else []
            self.sides += [slots] if "side" in titles[0].traits else []


@lru_cache(maxsize=1)
def languages() -> tuple[Language, ...]:
    return tuple(map(Language, LEXICON_LANGUAGES))
