import signal
import sys
from pathlib import Path

SLURM = Path(__file__).resolve().parent / "slurm"
sys.path.insert(0, str(SLURM))
# a shell does that to what it starts in the background, and children inherit it
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption(
        "--faults",
        nargs="?",
        type=int,
        const=8,
        default=0,
        metavar="N",
        help="also inject each kind of fault N times (default 8) at random moments: takes hours",
    )
    parser.addoption(
        "--guides", action="store_true", help="also run every command of the guides: some minutes"
    )
    parser.addoption(
        "--slurm",
        action="store_true",
        help="the job on a real SLURM controller, and nothing else: five to eight minutes",
    )


def pytest_generate_tests(metafunc):
    if "fault_seed" in metafunc.fixturenames:
        metafunc.parametrize("fault_seed", range(metafunc.config.getoption("--faults")))


def pytest_collection_modifyitems(config, items):
    sides = {True: [], False: []}
    for item in items:
        sides[SLURM in item.path.parents].append(item)
    wanted = config.getoption("--slurm")
    items[:] = sides[wanted]
    config.hook.pytest_deselected(items=sides[not wanted])
