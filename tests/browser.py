"""Chromium without a window, driven by keys through its DevTools protocol."""

import contextlib
import json
import os
import shutil
import subprocess
import time

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
KEYS = {"Enter": ("Enter", 13), "Escape": ("Escape", 27)}


class Browser:
    """One tab."""

    def __init__(self, folder):
        to_browser, from_browser = os.pipe(), os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}"]
        flags += ["--remote-debugging-pipe", "--no-first-run", "--window-size=760,900"]
        self.process = subprocess.Popen(  # reads from 3, writes to 4
            ["bash", "-c", f'exec "$@" 3<&{to_browser[0]} 4>&{from_browser[1]}', "-", CHROMIUM, *flags],
            pass_fds=(to_browser[0], from_browser[1]),
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser[0])
        os.close(from_browser[1])
        self.output, self.input = open(to_browser[1], "wb", 0), open(from_browser[0], "rb")
        self.number, self.session = 0, None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def call(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        self.output.write(json.dumps(message).encode() + b"\0")
        while True:
            reply = b""
            while not reply.endswith(b"\0"):
                reply += self.input.read(1)
            reply = json.loads(reply[:-1])
            if reply.get("id") == self.number:
                assert "error" not in reply, reply
                return reply["result"]

    def value(self, expression):
        """Of JavaScript in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def open(self, address):
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def wait(self, expression):
        until = time.monotonic() + 20
        while not self.value(expression):
            assert time.monotonic() < until, (expression, self.value("document.body.innerText"))
            time.sleep(0.02)

    def press(self, key, shift=False):
        """A character of a US keyboard, or one of KEYS."""
        name, code = KEYS.get(
            key, (f"Digit{key}" if key.isdigit() else f"Key{key.upper()}", ord(key.upper()[0]))
        )
        event = {"key": key, "code": name, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
        text = {} if key in KEYS and key != "Enter" else {"text": "\r" if key == "Enter" else key}
        self.call("Input.dispatchKeyEvent", type="keyDown", **event, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def close(self):
        with contextlib.suppress(OSError):
            self.output.close()
        self.process.kill()
        self.process.wait()
        self.input.close()
