"""Runs a script or a module on what stands in for Windows: `python other_system.py finetune.py FLAGS`, or
`-m histocc.predict FLAGS`. What POSIX alone has is missing, folders cannot be opened, and a file that is
mapped into memory cannot be replaced.
"""

import builtins
import faulthandler
import os
import runpy
import signal
import sys

POSIX_MODULES = {"fcntl", "resource", "pwd", "grp", "termios"}
POSIX_NAMES = {
    signal: ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGCHLD", "SIGKILL", "SIGQUIT", "SIGPIPE", "siginterrupt"),
    faulthandler: ("register", "unregister"),
    os: ("sched_getaffinity", "fork", "geteuid", "getuid", "getpgid", "killpg", "sysconf")
    + ("O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "mkfifo", "fchmod", "posix_fadvise"),
}


def pretend() -> None:
    plain_import, plain_open, plain_replace = builtins.__import__, os.open, os.replace

    def imported(name, namespace=None, *rest, **more):
        if name in POSIX_MODULES and str(
            (namespace or more.get("globals") or {}).get("__name__", "")
        ).startswith("histocc"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return plain_import(name, *([namespace] if namespace is not None else []), *rest, **more)

    def opened(path, *rest, **more):
        if os.path.isdir(path):
            raise PermissionError(13, "Permission denied", path)
        return plain_open(path, *rest, **more)

    def replaced(source, target, **more):
        with open("/proc/self/maps", encoding="utf-8") as maps:
            if any(line.rstrip().endswith(os.path.realpath(target)) for line in maps):
                raise PermissionError(13, "Permission denied", target)
        return plain_replace(source, target, **more)

    import torch  # whose own use of these names is its own affair  # noqa: F401
    import torch._dynamo  # noqa: F401

    builtins.__import__, os.open, os.replace = imported, opened, replaced
    for module, names in POSIX_NAMES.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)


if __name__ == "__main__":
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.path[0] = root
    pretend()
    if sys.argv[1] == "-m":
        sys.argv[:] = sys.argv[2:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = sys.argv[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")
