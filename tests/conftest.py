def pytest_addoption(parser):
    parser.addoption("--faults", nargs="?", type=int, const=8, default=0, metavar="N",
                     help="also inject each kind of fault N times (default 8) at random moments: takes hours")


def pytest_generate_tests(metafunc):
    if "fault_seed" in metafunc.fixturenames:
        metafunc.parametrize("fault_seed", range(metafunc.config.getoption("--faults")))
