"""benchmarks/links.py: two namespaces with a limited link, and what is counted there."""

import os
import shutil
import subprocess
import sys
import time

import pytest
from helpers import REPO

sys.path[:0] = [str(REPO), str(REPO / "benchmarks")]
import links
import namespaces
import page_processes


def test_rates_are_those_of_tc():
    assert [namespaces.bits_per_second(text) for text in ("20mbit", "1gbit", "1.5kbit")] == [2e7, 1e9, 1500]
    for wrong in ("20", "0mbit", "fast", "-1mbit", "1tbit"):
        with pytest.raises(ValueError, match="is not a rate such as 20mbit"):
            namespaces.bits_per_second(wrong)


def test_bytes_are_those_of_the_device():
    table = (
        "Inter-|   Receive                      |  Transmit\n face |bytes packets ...\n"
        "    lo: 5 1 0 0 0 0 0 0 7 1 0 0 0 0 0 0\n"
        f" {namespaces.DEVICE}:10 1 0 0 0 0 0 0 1234 3 0 0 0 0 0 0\n"
    )
    assert namespaces.bytes_sent(table) == 1234 and namespaces.bytes_sent(table, "lo") == 7


def test_figures_of_the_rows_between_two_moments():
    rows = [{"step": step, "samples": 10 * step, "samples_per_sec": 5.0 + step} for step in (2, 4, 6, 8)]
    found = links.figures(rows, (2, (100, 200)), (6, (500, 1000)))
    assert found["rates"] == [9.0, 11.0] and found["samples_per_sec"] == 10 and found["steps"] == 4
    assert found["bytes_per_step"] == [100, 200] and found["step_seconds"] == 1.0


def test_what_a_link_lets_through():
    plain = {"samples_per_sec": 10.0, "step_seconds": 2.0, "bytes_per_step": [1e6, 2e6]}
    assert links.bounds(plain, "4mbit") == pytest.approx((20 / 6, 20 / 4))
    assert links.forecast(links.WAYS["ddp"], plain, "4mbit") == pytest.approx(6.0)


def test_a_missing_tool_is_said(tmp_path):
    """At once, with the package that has it."""
    done = subprocess.run(
        [sys.executable, "benchmarks/links.py", "--sizes", "tiny"],
        cwd=REPO,
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done
    assert done.stderr.startswith("error: ip, tc, ") and "apt-get install iproute2" in done.stderr


@pytest.mark.skipif(
    os.geteuid() != 0 or any(shutil.which(tool) is None for tool in namespaces.TOOLS),
    reason="needs root, iproute2 and util-linux",
)
def test_a_limit_holds():
    """A program at each end: a megabyte takes no less than its time, and is counted."""
    listen = "import socket; s = socket.create_server(('0.0.0.0', 5)); c = s.accept()[0]\n"
    listen += "print('there', flush=True)\nwhile c.recv(1 << 16): pass"
    send = f"import socket; c = socket.create_connection(('{namespaces.ADDRESSES[0]}', 5), 5)\n"
    send += "c.sendall(bytes(1_000_000)); c.shutdown(1); c.recv(1)"
    try:
        with namespaces.Link() as link:
            link.limit("20mbit")
            first = subprocess.Popen(link.command(0, sys.executable, "-c", listen), stdout=subprocess.PIPE)
            time.sleep(0.5)
            started = time.monotonic()
            subprocess.run(link.command(1, sys.executable, "-c", send), check=True, timeout=30)
            seconds = time.monotonic() - started
            first.communicate()
            assert seconds > 0.9 * 8e6 / 20e6 and 1e6 < link.sent()[1] < 1.2e6
    except namespaces.NoLink as error:
        pytest.skip(str(error))


def test_the_page_says_what_was_measured():
    def rates(none: float, limited: dict) -> dict:
        base = {"samples_per_sec": none, "bytes_per_step": [2e6, 1e6], "forecast": none}
        return {"none": base, "20mbit": limited}

    runs = {
        "ddp": rates(100.0, {"samples_per_sec": 20.0, "bytes_per_step": [2e6, 2e6], "forecast": 23.0}),
        "sync-20": rates(110.0, {"left_out": "an exchange takes 300 s"}),
    }
    part = {"batch": 64, "tables": [{"size": "small", "trained_parameters": 500_000, "runs": runs}]}
    lines = page_processes.links([part]).splitlines()
    assert lines[0] == "| | MB a step | no limit | 20 Mbit/s |"
    assert lines[2:] == [
        "| small: every step together | 2 | 1.00 | 0.20 |",
        "| small: `--sync-every 20` | 2 | 1.10 | – |",
    ]
    said = page_processes.forecast_words([part])
    assert "these 3 cases" in said and "0 % off in the median and 15 % at most (small, ddp, 20mbit)" in said
