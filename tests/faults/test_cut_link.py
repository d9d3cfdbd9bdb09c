"""Two hosts, joined by a link that is cut in mid-step: `tests/run --faults`. Network namespaces stand for the
hosts.
"""

import os
import shutil
import subprocess
import time

import pytest
from harness import Job, assert_gone, assert_same_end, workers

pytestmark = pytest.mark.processes
HOST_A, HOST_B = "histocc_a", "histocc_b"
HOSTS = {HOST_A: "10.213.0.1", HOST_B: "10.213.0.2"}


def ip(*words, check=True):
    return subprocess.run(["ip", *words], capture_output=True, check=check)


@pytest.fixture
def hosts():
    if os.geteuid() != 0 or not shutil.which("ip") or ip("netns", "add", "histocc_a", check=False).returncode:
        pytest.skip("network namespaces need root and the program ip")
    try:
        ip("netns", "add", "histocc_b")
        ip(
            "link",
            "add",
            "link_a",
            "netns",
            HOST_A,
            "type",
            "veth",
            "peer",
            "name",
            "link_b",
            "netns",
            HOST_B,
        )
        for host, address in HOSTS.items():
            ip("-n", host, "addr", "add", f"{address}/24", "dev", host.replace("histocc", "link"))
            for device in ("lo", host.replace("histocc", "link")):
                ip("-n", host, "link", "set", device, "up")
        yield list(HOSTS)
    finally:
        for host in HOSTS:
            ip("netns", "del", host, check=False)


def start(job: Job, hosts: list[str], *flags) -> list[subprocess.Popen]:
    launcher = [
        "--rdzv-backend=static",
        "--nnodes=2",
        f"--master_addr={HOSTS[hosts[0]]}",
        "--master_port=29517",
    ]
    return [
        job.start(
            *flags,
            log=host,
            before=[
                "ip",
                "netns",
                "exec",
                host,
                "env",
                f"GLOO_SOCKET_IFNAME={host.replace('histocc', 'link')}",
            ],
            launcher=[*launcher, f"--node_rank={rank}"],
        )
        for rank, host in enumerate(hosts)
    ]


def test_a_link_that_is_cut_in_mid_step(tmp_path, hosts, fault_seed):
    whole, job = (
        Job(tmp_path / name, processes=processes, epochs=6) for name, processes in (("whole", 2), ("cut", 1))
    )
    whole.run()
    nodes = start(job, hosts, "--timeout-minutes", 0.2)
    first = tmp_path / "histocc_a.log"
    until = time.monotonic() + 60
    while "step 6/" not in first.read_text():
        assert all(node.poll() is None for node in nodes) and time.monotonic() < until, first.read_text()
        time.sleep(0.05)
    ranks = [rank for node in nodes for rank in workers(node)]
    ip("-n", hosts[0], "link", "set", "link_a", "down")
    started = time.monotonic()
    codes = [node.wait(120) for node in nodes]
    lasted = time.monotonic() - started
    output = first.read_text()
    print(
        f"\nthe job of two hosts ended {lasted:.0f} s after the cut,"
        f" {[line for line in output.splitlines() if 'error:' in line]}"
    )
    assert 0 not in codes and "error: rank 1 did not come within the time limit (--timeout-minutes)" in output
    assert len(ranks) == 2
    assert_gone(ranks)
    ip("-n", hosts[0], "link", "set", "link_a", "up")
    assert [node.wait(120) for node in start(job, hosts)] == [0, 0]
    assert "Resuming from step" in first.read_text()
    assert_same_end(job, whole)
