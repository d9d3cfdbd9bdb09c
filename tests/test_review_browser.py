"""The review page in Chromium: its keys, what stands where, colors, sizes, and what it says."""

import contextlib
import itertools
import json
import re
import shlex
from collections import Counter
from importlib.resources import files

import pytest
from helpers import REPO, wait_until
from helpers import run as run_script
from test_review import read, run, write
from test_review_page import PLACES, SCRIPT, TRADES, Serving, decisions, folder  # noqa: F401

from benchmarks.browser import CHROMIUM, Browser

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("chromium is not on this machine")
    with contextlib.closing(Browser(tmp_path_factory.mktemp("profile"))) as browser:
        yield browser


@pytest.fixture
def browser(chromium):
    chromium.open_tab()
    return chromium


# Presses 1 at once whenever another text is shown.
EAGER = """new MutationObserver(() =>
    document.dispatchEvent(new KeyboardEvent("keydown", {key: "1", code: "Digit1"}))
).observe(document.getElementById("text"), {childList: true})"""


def test_a_key_decides_only_on_the_text_that_was_seen(folder, browser):
    """Not when it is held down for a second, nor at the moment when the text is shown."""
    content = (folder / "coded.csv").read_text()
    (folder / "coded.csv").write_text(content.replace(",1,1\n", ",0,1\n"))
    with Serving(folder) as server:
        browser.open(server.address)
        browser.wait("text && text.text === 'smith'")
        assert "not fitted" in browser.value("document.getElementById('progress').textContent")
        browser.press("1", repeats=35)
        browser.value(EAGER)
        browser.press("2")
        browser.wait("text.rows === 5")
        browser.press("2")
        browser.wait("text.rows === 4")
    assert decisions(folder) == [("smith", "83110"), ("clerk", "75400"), (SCRIPT, "75400")]


def test_the_page_by_its_keys(folder, browser):
    with Serving(folder) as server:
        browser.open(server.address)
        shows = "document.getElementById('text').textContent === {!r}".format
        browser.wait(shows("smith"))
        codes = "[...document.querySelectorAll('.code b')].map(b => b.textContent).join()"
        assert browser.value(codes).startswith("83110,75400,-1,")
        said = browser.value("document.getElementById('progress').textContent")
        assert said.endswith(" · 72.4\u00a0% of rows right, as the model expects")
        browser.press("1", shift=True)
        browser.press("2")
        browser.wait(shows("clerk"))
        browser.press("/")
        browser.type("general black")
        selected = "document.querySelector('[aria-selected=true]')?.textContent"
        browser.wait(f"{selected} === '83110Blacksmith, General'")  # earlier results are of fewer letters
        assert browser.value("document.getElementById('text').lang") == "en"
        browser.value("document.getElementById('search').value = 'xyzzy'; search()")
        said = "document.getElementById('found').textContent"
        browser.wait(f"{said} === 'No code found.'")
        browser.value("document.getElementById('search').value = 'buyers'; search()")
        browser.press("Enter")
        browser.wait("document.getElementById('message').textContent")
        message = browser.value("document.getElementById('message').textContent")
        assert message.startswith("Not saved: ") and "42000 and 42200" in message
        browser.value("document.getElementById('search').value = ' AGRONOMIST'; search()")
        browser.press("Enter")  # 05300, Agronomists and Related Scientists, is before it in the key
        browser.wait(shows(SCRIPT))
        assert browser.value("document.title") == "3 left · coded.csv"
        assert browser.value("document.scripts.length") == 1
        browser.press("c")
        browser.press("x")
        browser.press("Enter")
        browser.press("x")
        assert browser.value("document.getElementById('unsure').getAttribute('aria-pressed')") == "true"
        browser.press("n")
        browser.wait("text.rows === 4")
        assert browser.value("unsure + document.getElementById('note').value") == "false"
        browser.press("f")
        browser.type("farm")
        browser.wait(shows("farmer"))  # while one types
        assert browser.value("document.activeElement.id") == "only"
        assert browser.value("document.getElementById('fits').textContent") == "1 text found, 1 open"
        browser.type("s")
        browser.wait(shows("No open text has these words."))
        assert browser.value("document.getElementById('fits').textContent") == "0 texts found, 0 open"
        browser.press("Escape")
        browser.wait("text?.rows === 4 && !document.getElementById('only').value")
        browser.press("s")
        browser.wait(shows("farmer"))
        browser.press("u")
        browser.wait("text.rows === 4 && !text.seen")
        browser.press("b")
        browser.wait(f"text.seen === 'none' && {shows(SCRIPT)}")
        browser.press("Escape")
        browser.wait("text.rows === 4")
        browser.press("b")
        browser.wait(shows(SCRIPT))
        browser.press("2")
        browser.wait("text.rows === 4")
        assert "2 of 5 texts left · 3 decided, 1 unsure · " in browser.value("document.body.innerText")
        assert re.fullmatch(r"saved \d\d:\d\d", browser.value("document.getElementById('state').textContent"))
        browser.open(server.address + "?by=Bo")
        browser.wait("typeof text !== 'undefined' && text?.rows === 4")
        browser.press("u")
        browser.wait("document.getElementById('message').textContent.includes('nothing to undo')")
        server.kill()
        browser.press("1")
        browser.wait("document.getElementById('message').textContent.includes('Not saved')")
        assert "not saved" in browser.value("document.getElementById('state').textContent")
    expected = ["83110 & 75400", "05320", "none", "skip", "undo", "75400"]
    assert [decision for _, decision in decisions(folder)] == expected
    row = read(folder / "decided.csv")[2]
    assert (row["unsure"], row["note"]) == ("?", "x")


def test_the_text_of_a_closed_window_is_open_again(folder, browser):
    """And stays with its window when that is loaded again."""
    with Serving(folder) as server:
        for _ in range(2):
            browser.open(server.address)
            browser.wait("text?.text === 'smith'")
        assert server.ask()["text"]["text"] == "clerk"
        target = browser.call("Target.getTargetInfo")["targetInfo"]["targetId"]
        browser.call("Target.closeTarget", targetId=target)
        browser.open_tab()
        wait_until(lambda: server.ask("another")["text"]["text"] == "smith")


def decide_by_keys(browser, code_of, count):
    """Take the code of each text that is shown by its number, or write it into the search."""
    for decided in range(count):
        browser.wait("typeof text !== 'undefined' && !!text")
        text, choices = browser.value("[text.text, text.choices.map(choice => choice.code)]")
        code = code_of(text)
        for key in str(choices.index(code) + 1) if code in choices else ["/", *code, "Enter"]:
            browser.press(key)
        browser.wait(f"visited.length === {decided + 1} && (!text || text.text !== {text!r})")


@pytest.mark.full
def test_from_a_table_without_codes_to_the_final_file(tmp_path, browser):
    """By the five commands of docs/review.md, decisions by keys, and the command of the last."""
    rows = [[f"{place} {trade}", "en"] for place in PLACES for trade in TRADES]
    write(tmp_path / "register.csv", [["occ1", "lang"], *rows])
    blocks = (REPO / "docs" / "review.md").read_text().split("```")[1::2]
    block = next(block for block in blocks if "histocc train" in block)
    commands = [
        [f"{tmp_path}/{word}" if re.search(r"\.csv$|^\./", word) else word for word in shlex.split(line)]
        for line in block.strip().replace("\\\n", "").splitlines()
    ]
    first, apply, train, predict, second = commands

    def decide(command, count):
        """Return the words of the command that applies the decisions."""
        with Serving(tmp_path, *command[4:], coded=command[3], decisions=None) as server:
            browser.open(server.address)
            decide_by_keys(browser, lambda text: TRADES[text.split()[1]], count)
            words = server.end()[0]
        return words[words.index("apply") :]

    def deciders(name):
        found = {row["occ1"]: row for row in read(tmp_path / name)}
        assert all(row["hisco_1"] == TRADES[text.split()[1]] for text, row in found.items())
        return Counter(row["decided_by"] for row in found.values())

    decide(first, 16)
    run(*apply[2:], "--guesses", "none")
    assert deciders("final.csv") == {"Ann": 16, "guess": 16}
    run_script("histocc", *train[1:], "--device", "cpu")
    run_script("histocc", *predict[1:], "--device", "cpu")
    run(*decide(second, 2))
    assert deciders("coded.final.csv") == {"Ann": 18, "guess": 14}


SIZES = [(1280, 800), (390, 844), (640, 400), (320, 640)]
# Ends of the page that a text or button crosses; and the places of the buttons.
WIDER = "document.scrollingElement.scrollWidth - innerWidth"
PLACES_OF_BUTTONS = """JSON.stringify(["unsure", "none", "skip", "undo", "back", "search"].map(id => {
    const box = document.getElementById(id).getBoundingClientRect();
    return [box.x, box.y, box.right, box.bottom];
}))"""


@pytest.fixture
def varied(tmp_path):
    """A coded file of texts with different lengths and numbers of choices."""
    long = "gift med en smed, tidligere husmand og nu indsidder hos sin søn, en skrædder"
    texts = ["smith", long, "خياط", "clerk", "<b>miner</b>", "tailor", "smed", "baker", "qq", "cook"]
    codes = ["83110", "75400", "39310", "61110", "77610"]
    rows = []
    for i, text in enumerate(texts):
        choices = [cell for code in codes[: i % 5 + 1] for cell in (code, str(0.4 / (1 + codes.index(code))))]
        row = [text, "en", f"<b>{i}</b>", *choices[:2], "0.4", "1", "1", *choices]
        rows += [row + [""] * (18 - len(row))] * (20 - i)
    names = [f"{name}_{i}" for i in range(1, 6) for name in ("choice", "choice_prob")]
    of_answer = ["hisco_1", "prob_1", "conf", "conf_fitted", "needs_review"]
    write(tmp_path / "coded.csv", [["<i>text</i>", "lang", "<i>n</i>", *of_answer, *names], *rows])
    return tmp_path


@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.full)])
def test_nothing_moves_between_texts(varied, browser, theme):
    """Whatever is listed; all buttons are in the window at each size, also with text of twice the size."""
    browser.set_theme(theme)
    columns = ["--input-col", "<i>text</i>", "--show", "<i>n</i>"]
    with Serving(varied, *columns, "--order", "file") as server:
        browser.open(server.address)
        browser.wait("text")
        for width, height in SIZES[:2]:
            browser.resize(width, height)
            places, counts, texts = set(), set(), 5
            for _ in range(texts):
                before = browser.value("text.text")
                places.add(browser.value(PLACES_OF_BUTTONS))
                counts.add(browser.value("text.choices.length"))
                assert browser.value("document.getElementById('text').innerText") == before
                about = browser.value("document.getElementById('about').innerText")
                assert re.fullmatch(r"\d+ rows · Language: en · <i>n</i>: <b>\d</b>", about)
                direction = browser.value("getComputedStyle(document.getElementById('text')).direction")
                assert direction == ("rtl" if before == "خياط" else "ltr")
                browser.press("n")
                browser.wait(f"!text || text.text !== {before!r}")
            boxes = [json.loads(each) for each in places]
            assert len({str(box[:5]) for box in boxes}) == 1 and len(counts) > 1
            for x, y, right, bottom in boxes[0][:5]:
                assert 0 <= x < right <= width and y < bottom <= height
            assert width < 1000 or len(places) == 1  # the search stays, too
        assert browser.value("document.title") == "Done · coded.csv"
        assert "No texts are left" in browser.value("document.getElementById('text').textContent")
        assert browser.value("document.getElementById('none').disabled")
        browser.press("b")
        browser.wait("text")
        for (width, height), size in itertools.product(SIZES, ("100%", "200%")):
            browser.resize(width, height)
            browser.value(f"document.documentElement.style.fontSize = '{size}'")
            assert browser.value(WIDER) <= 0, (width, size)
            if height > 500:
                unsure, *_, back, _ = json.loads(browser.value(PLACES_OF_BUTTONS))
                assert unsure[0] >= 0 and back[2] <= width and back[3] <= height, (width, size)


def test_the_page_says_what_it_shows(folder, browser):
    """To screen readers: names and roles, the next text; in this order by Tab."""
    with Serving(folder, "--by", "Ann") as server:
        browser.open(server.address)
        browser.wait("text")
        said = browser.value("document.querySelector('header p').innerText")
        assert said == "coded.csv · Ann · all decisions are saved"
        assert browser.value("document.activeElement.id") == "text"
        reached = []
        while "back" not in reached:
            browser.press("Tab")
            reached.append(browser.value("document.activeElement.id || document.activeElement.className"))
        choices = ["code"] * 5
        assert reached == [*choices, "search", "note", "only", "unsure", "none", "skip", "undo", "back"]
        nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
        named = {(node["role"]["value"], node["name"]["value"]) for node in nodes if "name" in node}
        assert {
            ("heading", "smith"),
            ("button", "1 83110 Blacksmith, General 50.0\u00a0% likely"),
            ("button", "None n"),
            ("progressbar", "share of rows decided"),
            ("list", "codes to choose from"),
        } <= named
        assert all(name for role, name in named if role in ("button", "combobox", "searchbox", "textbox"))
        browser.press("n")
        browser.wait("text.text === 'clerk'")
        said = browser.value("document.getElementById('next').textContent")
        assert said == "Next text: clerk, 6 rows, 5 choices"
        browser.press("?")
        assert browser.value("document.getElementById('keys').open")
        browser.press("n")  # decides nothing
        browser.press("Enter")  # Close has the focus
        browser.wait("!document.getElementById('keys').open")
        assert browser.value("text.text") == "clerk"
    assert len(decisions(folder)) == 1


def test_five_megabytes_in_the_search(folder, browser):
    with Serving(folder) as server:
        browser.open(server.address)
        browser.wait("text")
        browser.press("/")
        browser.call("Input.insertText", text="smith " * 900_000)
        browser.wait("document.getElementById('found').textContent")
        assert browser.value("document.getElementById('search').value.length") == 200
        assert "take 400 characters" in server.ask(status=400, find="smith " * 200)["error"]


def test_colours_can_be_told_apart():
    """In both themes: words by 4.5 : 1, borders by 3 : 1 (WCAG 2.2, 1.4.3 and 1.4.11)."""
    page = files("histocc.review").joinpath("shared.css").read_text()

    def luminance(color):
        digits = color if len(color) == 6 else "".join(digit * 2 for digit in color)
        parts = [part / 255 for part in bytes.fromhex(digits)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.05 + 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for front, least in {"line": 3, "accent": 3, "ink": 4.5, "soft": 4.5, "warn": 4.5}.items():
        names = front, "back", "card", *(["pick"] if least > 3 else [])
        colors = [[luminance(color) for color in re.findall(rf"--{name}: #(\w+);", page)] for name in names]
        for one, *beside in zip(*colors, strict=True):
            assert all(max(one, other) / min(one, other) >= least for other in beside), front
