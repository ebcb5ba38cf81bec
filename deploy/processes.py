"""Ends every process that this one started, however deep.

Ray ends its own processes well when all goes well. This is for when it does not: a worker that hangs in native code, a
proxy that was being reloaded. Processes are named by pid and start time, never by name, so nothing else is touched.
"""

import contextlib
import ctypes
import importlib
import os
import sys
import time
from typing import Any, NoReturn

__all__ = ["adopt_orphans", "end_descendants", "kill_descendants", "leave", "reap_orphans"]

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make this process the parent of any descendant whose own parent dies, where the system can (Linux).

    Without it such a process would become a child of init, and could no longer be told from a stranger's.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans() -> None:
    """Collect the exit status of adopted processes that have ended, so that none stays behind as a zombie."""
    psutil = _psutil()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error, ChildProcessError):
            if child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)


def end_descendants(grace_s: float, kill_s: float = 3.0) -> int:
    """End all descendants: wait `grace_s` for those already ending, ask the rest (SIGTERM), then kill them.

    Each stage is bounded, `grace_s` twice and `kill_s` once. Returns how many had to be killed; after that none is left
    but one that the kernel itself holds.
    """
    psutil = _psutil()
    descendants = psutil.Process().children(recursive=True)
    _, alive = psutil.wait_procs(descendants, timeout=grace_s)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    psutil.wait_procs(alive, timeout=grace_s)
    return kill_descendants(kill_s)


def kill_descendants(timeout_s: float = 3.0) -> int:
    """SIGKILL every descendant and wait until they are gone, at most `timeout_s`. Returns how many it killed."""
    psutil = _psutil()
    deadline = time.monotonic() + timeout_s
    killed: set[int] = set()
    # A process may have forked while we listed its children: its child is ours then (adopt_orphans), so look again.
    while time.monotonic() < deadline:
        reap_orphans()
        alive = [process for process in psutil.Process().children(recursive=True) if _runs(process)]
        if not alive:
            break
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
                killed.add(process.pid)
        psutil.wait_procs(alive, timeout=max(0.0, deadline - time.monotonic()))
    return len(killed)


def leave(exit_code: int) -> NoReturn:
    """End this process now, without the interpreter's clean-up.

    A thread that is still inside of Ray would abort the process when the interpreter takes itself apart, or hold the
    locks that Ray's own exit handlers wait for. What is in the buffers of standard output and error is written.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code)


def _runs(process: Any) -> bool:
    psutil = _psutil()
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _psutil() -> Any:
    """psutil as Ray brings it: importing ray puts its copy on the path, where no other is installed.

    Not at the top, for ray reads its environment when it is imported, and that is written first.
    """
    importlib.import_module("ray")
    return importlib.import_module("psutil")
