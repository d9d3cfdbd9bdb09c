import gc
import os
import shutil
import signal
import tempfile

# each search for garbage passes the many objects of torch and pytest: a seventh of the time
gc.set_threshold(50_000)

# a process group that is collected in a forked child would wait for threads that only the parent has
os.register_at_fork(before=gc.freeze, after_in_parent=gc.unfreeze)

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


def pytest_configure(config):
    # read by helpers.all_tests
    named = any("::" in argument for argument in config.args)
    os.environ["HISTOCC_ALL_TESTS"] = "1" if config.getoption("everything") or named else ""
    # workers of xdist inherit it: the built-in model is made once for all of them, and not for the user
    if "HISTOCC_CACHE" not in os.environ:
        folder = os.environ["HISTOCC_CACHE"] = tempfile.mkdtemp(prefix="histocc")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_generate_tests(metafunc):
    if "fault_seed" in metafunc.fixturenames:
        metafunc.parametrize("fault_seed", range(metafunc.config.getoption("--faults")))


def pytest_collection_modifyitems(config, items):
    """Without --all not those marked `full`, unless one is named (file::test). Files that start processes
    take longest, and come first.
    """
    full = os.environ["HISTOCC_ALL_TESTS"] or config.getoption("--faults")
    left = [item for item in items if not full and item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=left)
    kept = [item for item in items if item not in left]
    items[:] = sorted(kept, key=lambda item: item.get_closest_marker("processes") is None)
