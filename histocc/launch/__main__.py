"""Started by the shell scripts as `python histocc/launch LAUNCHER OPTIONS -- ARGUMENTS`."""

import os
import signal
import sys
import types


def import_without_torch() -> None:
    """Makes `histocc` a bare folder of modules: the package itself refuses to start without torch."""
    package = types.ModuleType("histocc")
    package.__path__ = [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
    sys.modules["histocc"] = package


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the launcher as it ends a shell script
    import_without_torch()
    from histocc.launch.main import main

    sys.exit(main(sys.argv[1:]))
