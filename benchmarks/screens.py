"""Pictures of the review page after decisions on English rows of the sample, whose codes stand for a person:

    python -m benchmarks.screens --folder docs

writes review_light.png, review_dark.png and review_phone.png there. They need Chromium.
"""

import json
import re
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import closing, contextmanager
from pathlib import Path

from .browser import Browser
from .common import arguments, environment, read_csv, write_csv, write_sample

PICTURES = {"light": (1280, 800), "dark": (1280, 800), "phone": (390, 844)}  # size of the window


@contextmanager
def served(table: str, *more: str):
    """Yield the address of `review serve` for a table."""
    command = [sys.executable, "-m", "histocc.review", "serve", table, *more, "--no-browser"]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            yield next(found[0] for line in process.stdout if (found := re.search(r"http://\S+/", line)))
        finally:
            process.terminate()


def decide(address: str, codes: dict[tuple[str, str], list[str]], decisions: int) -> None:
    """Answer the texts that the page asks for by their codes."""

    def ask(**content) -> dict:
        body = json.dumps({"window": "person", **content}).encode()
        with urllib.request.urlopen(address + "api", body) as reply:
            return json.load(reply)

    text = ask()["text"]
    for _ in range(decisions):
        answer = codes[text["text"], text["language"]]
        text = ask(id=text["id"], answer=answer, seen=text["seen"])["text"]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=6_000)
    parser.add_argument("--decisions", type=int, default=150)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = read_csv(write_sample(f"{folder}/sample.csv", args.rows))
        rows = [row for row in rows if row["lang"] == "en"]
        table = write_csv(f"{folder}/register.csv", ["occ1", "lang"], ([r["occ1"], r["lang"]] for r in rows))
        codes = {}
        for row in rows:
            answer = [row[f"hisco_{i}"] for i in (1, 2, 3) if row[f"hisco_{i}"]]
            codes.setdefault((row["occ1"], row["lang"]), answer)
        more = ["--key", "hisco", "--guesses", "none", "--by", "Ann"]
        with served(table, *more) as address, closing(Browser(f"{folder}/profile")) as browser:
            decide(address, codes, args.decisions)
            for name, (width, height) in PICTURES.items():
                browser.resize(width, height)
                browser.set_theme("dark" if name == "dark" else "light")
                browser.open(address)
                browser.wait("text")
                while not browser.value("text.near.length > 1 && text.choices[0].prob > 0.4"):
                    shown = browser.value("text.id")
                    browser.press("s")
                    browser.wait(f"text.id !== '{shown}'")
                if name == "light":
                    browser.press("/")
                    browser.type("shoe")
                    browser.wait("results.length")
                browser.picture(args.folder / f"review_{name}.png")


if __name__ == "__main__":
    main()
