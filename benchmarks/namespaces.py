"""Two machines on a slow link, on one machine: two network namespaces joined by a pair of virtual devices,
each of which sends no faster than it may. Linux and root; ip, tc (iproute2), unshare, nsenter, setpriv
(util-linux).

The namespaces have no names: they last as long as a process is in them, and so do devices and limits. What
keeps them is a process that ends when its standard input does, so that nothing is left whichever way the
program ends.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
TOOLS["setpriv"] = "util-linux"
DEVICE = "link0"  # in both namespaces
ADDRESSES = ("10.251.0.1", "10.251.0.2")
QUEUE = "50ms"  # what waits longer to be sent is dropped
LEAST_BURST, BURST_SECONDS = 32 << 10, 0.001  # sent at once: bytes at least; else at the rate
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class NoLink(Exception):
    """Why there can be no such link here, for the user."""


def bits_per_second(rate: str) -> float:
    """Of a rate as tc writes it: 20mbit. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if not found or not float(found.group(1)):
        raise ValueError(f"{rate!r} is not a rate such as 20mbit: a number above 0, and kbit, mbit or gbit")
    return float(found.group(1)) * UNITS[found.group(2)]


def bytes_sent(table: str, device: str = DEVICE) -> int:
    """By a device, from the text of /proc/net/dev: the ninth number behind its name."""
    line = next(line for line in table.splitlines() if line.strip().startswith(f"{device}:"))
    return int(line.partition(":")[2].split()[8])


class Link:
    """A context: both ends are there inside, without a limit, and nothing of it afterwards.

    Raises NoLink: where a tool or a permission is missing.
    """

    def __init__(self):
        self.holders: list[subprocess.Popen] = []

    def __enter__(self) -> "Link":
        missing = [tool for tool in TOOLS if shutil.which(tool) is None]
        if missing:
            packages = " ".join(sorted({TOOLS[tool] for tool in missing}))
            raise NoLink(
                f"{', '.join(missing)} not found in PATH, and network namespaces and limits need"
                f" {'it' if len(missing) == 1 else 'them'}: apt-get install {packages} (Linux alone has them)"
            )
        if os.geteuid() != 0:
            raise NoLink("network namespaces and limits are for root alone: run it as root, or with sudo")
        try:
            for _ in ADDRESSES:
                self._hold()
            peer = str(self.holders[1].pid)
            self._run(0, *f"ip link add {DEVICE} type veth peer name {DEVICE} netns {peer}".split())
            for end, address in enumerate(ADDRESSES):
                self._run(end, *f"ip address add {address}/30 dev {DEVICE}".split())
                for device in ("lo", DEVICE):
                    self._run(end, *f"ip link set {device} up".split())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        for holder in self.holders:
            holder.kill()
            holder.communicate()
        self.holders = []

    def _hold(self) -> None:
        """A process in a new namespace."""
        holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the program
        )
        self.holders.append(holder)
        assert holder.stdout is not None
        if not holder.stdout.readline():
            raise NoLink(
                f"no network namespace can be made here ({holder.communicate()[1].strip()}): in a container"
                " that takes CAP_SYS_ADMIN and CAP_NET_ADMIN, such as docker run --privileged"
            )

    def command(self, end: int, *words: str) -> list[str]:
        """The command line that runs `words` at an end; it is killed when this program ends."""
        inside = f"--net=/proc/{self.holders[end].pid}/ns/net"
        return ["setpriv", "--pdeathsig", "KILL", "nsenter", inside, *words]

    def _run(self, end: int, *words: str) -> None:
        done = subprocess.run(self.command(end, *words), capture_output=True, text=True)
        if done.returncode:
            raise NoLink(f"{' '.join(words)}: {(done.stderr or done.stdout).strip()}")

    def limit(self, rate: str) -> None:
        """Both ends send no faster from now on. rate: see `bits_per_second`."""
        burst = max(LEAST_BURST, round(bits_per_second(rate) / 8 * BURST_SECONDS))
        for end in range(len(self.holders)):
            words = f"tc qdisc replace dev {DEVICE} root tbf rate {rate} burst {burst} latency {QUEUE}"
            self._run(end, *words.split())

    def sent(self) -> tuple[int, int]:
        """Bytes that each end has sent since the link was made, with the headers of its packets."""
        first, second = (Path(f"/proc/{holder.pid}/net/dev").read_text() for holder in self.holders)
        return bytes_sent(first), bytes_sent(second)
