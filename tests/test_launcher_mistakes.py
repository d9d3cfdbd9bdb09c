"""What the launchers say to arguments and variables that cannot be meant so, and what they leave out where it would do harm."""

import pytest
from test_launchers import (LAUNCH, MULTI, NAMED, SLURM, after, bin_dir, command, data, option, plan,  # noqa: F401  fixtures too
                            write_executable)

ON_TWO = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "host1"}


# ---- where the processes meet ----

@pytest.mark.parametrize("variables, said", [
    ({"MASTER_PORT": "abc"}, "MASTER_PORT=abc: set it to a port"),
    ({"MASTER_PORT": "0"}, "MASTER_PORT=0: set it to a port"),
    ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536: set it to a port"),
    ({**ON_TWO, "MASTER_PORT": "-1"}, "MASTER_PORT=-1: set it to a port"),
    ({"NNODES": "0"}, "NNODES=0: set it to the number of machines"),
    ({**ON_TWO, "NNODES": "1.5"}, "NNODES=1.5: set it to the number of machines"),
    ({**ON_TWO, "NODE_RANK": ""}, "NNODES=2 needs MASTER_ADDR, the first machine, and NODE_RANK"),
    ({**ON_TWO, "NODE_RANK": "2"}, "NODE_RANK=2, but NNODES=2: set NNODES"),
    ({**ON_TWO, "NODE_RANK": "-1"}, "NODE_RANK=-1, but NNODES=2"),
    ({**ON_TWO, "NODE_RANK": "first"}, "NODE_RANK=first, but NNODES=2"),
    ({"NODE_RANK": "1"}, "NODE_RANK=1, but NNODES=1: set NNODES")])
def test_a_meeting_point_that_cannot_be_is_refused(plan, data, variables, said):  # noqa: F811
    assert plan(LAUNCH, data, "--", *NAMED, code=2, **variables).stderr.startswith(f"error: {said}")


def test_a_meeting_point_at_the_limits_is_taken(plan, data):  # noqa: F811
    words = command(plan(LAUNCH, data, "--", *NAMED, **ON_TWO, MASTER_PORT="65535"))
    assert [option(words, name) for name in ("nnodes", "node-rank", "master-port")] == ["2", "1", "65535"]
    assert option(command(plan(MULTI, data, "--", *NAMED, NNODES="1", NODE_RANK="0")), "node-rank") == "0"


# ---- cores ----

def test_cores_are_those_that_the_process_may_use(plan, bin_dir, data):  # noqa: F811
    write_executable(bin_dir / "nproc", "#!/bin/bash\necho \"${OMP_NUM_THREADS:-${OMP_THREAD_LIMIT:-6}}\"\n")
    done = plan(LAUNCH, "2", data, "--", *NAMED)
    assert "2 process(es) on 6 core(s)" in done.stdout and "OMP_NUM_THREADS=3\n" in done.stdout
    assert "on 6 core(s)" in plan(LAUNCH, "2", data, "--", *NAMED, OMP_NUM_THREADS="1", OMP_THREAD_LIMIT="1").stdout
    write_executable(bin_dir / "nproc", "#!/bin/bash\nexit 1\n")
    write_executable(bin_dir / "other", "#!/bin/bash\necho 4\n")
    (bin_dir / "getconf").unlink()
    (bin_dir / "other").rename(bin_dir / "getconf")
    assert "on 4 core(s)" in plan(LAUNCH, "2", data, "--", *NAMED).stdout
