"""A tab of Chromium without a window, for tests and pictures of the pages that histocc serves."""

import base64
import json
import os
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
KEYS = {"Enter": ("Enter", 13), "Escape": ("Escape", 27), "Tab": ("Tab", 9), "ArrowDown": ("ArrowDown", 40)}
SECONDS = 30.0  # to wait for something


class Browser:
    """A tab that is driven by keys, through the DevTools protocol. folder: for its profile."""

    def __init__(self, folder: str | Path):
        to_browser, from_browser = os.pipe(), os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}"]
        flags += ["--remote-debugging-pipe", "--no-first-run", "--hide-scrollbars"]
        run = f'exec "$@" 3<&{to_browser[0]} 4>&{from_browser[1]}'  # reads from 3, writes to 4
        self.process = subprocess.Popen(
            ["bash", "-c", run, "-", str(CHROMIUM), *flags],
            pass_fds=(to_browser[0], from_browser[1]),
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser[0])
        os.close(from_browser[1])
        self.output, self.input = open(to_browser[1], "wb", 0), open(from_browser[0], "rb")
        self.number = 0
        self.open_tab()

    def open_tab(self) -> None:
        """Go on in a new tab, with nothing of the one before."""
        self.session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.resize(1280, 800)

    def call(self, method: str, **params) -> dict:
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        self.output.write(json.dumps(message).encode() + b"\0")
        while True:
            reply = b""
            while not reply.endswith(b"\0"):
                reply += self.input.read(1)
            found = json.loads(reply[:-1])
            if found.get("id") == self.number:
                assert "error" not in found, found
                return found["result"]

    def value(self, expression: str):
        """Return the value of JavaScript in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def wait(self, expression: str) -> None:
        until = time.monotonic() + SECONDS
        while not self.value(expression):
            assert time.monotonic() < until, (expression, self.value("document.body.innerText"))
            time.sleep(0.02)

    def press(self, key: str, shift: bool = False, repeats: int = 0) -> None:
        """Press a character of a US keyboard, or one of KEYS, once the page takes decisions on its text."""
        self.wait("typeof rest === 'undefined' || performance.now() >= rest")
        of_character = f"Digit{key}" if key.isdigit() else f"Key{key.upper()}", ord(key.upper()[0])
        name, code = KEYS.get(key, of_character)
        event = {"key": key, "code": name, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
        text = {} if key in KEYS and key != "Enter" else {"text": "\r" if key == "Enter" else key}
        self.call("Input.dispatchKeyEvent", type="keyDown", **event, **text)
        for _ in range(repeats):
            time.sleep(0.03)
            self.call("Input.dispatchKeyEvent", type="keyDown", autoRepeat=True, **event, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def type(self, words: str) -> None:
        for letter in words:
            self.press(letter)

    def resize(self, width: int, height: int, scale: int = 1) -> None:
        """Set the size of the window in CSS pixels; scale: pixels of the screen for each of them."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale}
        self.call("Emulation.setDeviceMetricsOverride", **size, mobile=False)

    def set_theme(self, theme: str) -> None:
        """Set the colors that the user prefers: light or dark."""
        feature = {"name": "prefers-color-scheme", "value": theme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def picture(self, path: str | Path) -> None:
        """Write what the window shows, as PNG."""
        content = self.call("Page.captureScreenshot", format="png", optimizeForSpeed=False)["data"]
        Path(path).write_bytes(base64.b64decode(content))

    def close(self) -> None:
        with suppress(OSError):
            self.output.close()
        self.process.kill()
        self.process.wait()
        self.input.close()
