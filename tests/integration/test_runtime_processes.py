"""Ending a tree of processes that does not want to end. In a process of its own: it ends *all* of its descendants."""

import subprocess
import sys

import psutil

# A grandchild that ignores SIGTERM and whose parent is gone: nobody's child, unless it is adopted.
PROGRAM = """
import subprocess, sys
from deploy import processes

processes.adopt_orphans()
grandchild = '''
import signal, sys, threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("here", flush=True)
threading.Event().wait()
'''
child = f'''
import os, subprocess, sys
process = subprocess.Popen([sys.executable, "-c", {grandchild!r}], stdout=subprocess.PIPE, text=True)
process.stdout.readline()
print(process.pid, flush=True)
os._exit(0)
'''
with subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True) as parent:
    print(parent.stdout.readline().strip())
print(processes.end_descendants(grace_s=0.2))
"""


def test_an_orphan_that_ignores_sigterm_is_killed() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    pid, num_killed = done.stdout.split()
    assert not psutil.pid_exists(int(pid))
    assert num_killed == "1"
