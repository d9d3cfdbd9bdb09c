import os
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
        "--all",
        action="store_true",
        dest="everything",
        help="also the tests marked `full`, with more examples each, and every command of the pages",
    )
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
        "--guides", action="store_true", help="also run every command of the pages: some minutes"
    )
    parser.addoption(
        "--slurm",
        action="store_true",
        help="the job on a real SLURM controller, and nothing else: some ten minutes",
    )


def pytest_configure(config):
    # read by helpers.examples and helpers.mutations
    named = any("::" in argument for argument in config.args)
    os.environ["HISTOCC_ALL_TESTS"] = "1" if config.getoption("everything") or named else ""


def pytest_generate_tests(metafunc):
    if "fault_seed" in metafunc.fixturenames:
        metafunc.parametrize("fault_seed", range(metafunc.config.getoption("--faults")))


def pytest_collection_modifyitems(config, items):
    """SLURM alone, or all but it; without --all not those marked `full`, unless one is named (file::test)."""
    slurm = config.getoption("--slurm")
    named = any("::" in argument for argument in config.args)
    full = config.getoption("everything") or slurm or named or config.getoption("--faults")
    kept, left = [], []
    for item in items:
        wanted = (SLURM in item.path.parents) == slurm
        (kept if wanted and (full or not item.get_closest_marker("full")) else left).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left)
