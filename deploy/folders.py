"""The folder of each cluster that `warmroute serve` runs on this machine: who uses it, and where the cluster answers.

/tmp/warmroute-xxxxxxxx/
  lock      held by the process that runs the cluster, until it ends, however it ends
  address   where the Ray cluster can be joined; written once it can be
  ray/      Ray's own files
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

__all__ = ["new_folder", "running_addresses", "write_address"]

_PARENT = "/tmp"
_PREFIX = "warmroute-"


def new_folder() -> Path:
    """A new folder for all files of one cluster. Removes those that earlier clusters left.

    A start that fails keeps its folder, for its logs, until the next start.
    In /tmp, as Ray's own, and not in a long TMPDIR: the paths of Unix sockets made from it have to stay short.
    """
    for left in _own_folders():
        with contextlib.suppress(OSError):
            if (lock := _lock(left)) is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_PARENT))
    _lock(folder)
    return folder


def write_address(folder: Path, address: str) -> None:
    """Say where the cluster of `folder` can be joined."""
    # Renamed, so that nobody reads half of it.
    unnamed = folder / "address.new"
    unnamed.write_text(address, encoding="utf-8")
    unnamed.rename(folder / "address")


def running_addresses() -> list[str]:
    """Where the clusters that this user runs on this machine can be joined, in the order of their folders' names."""
    addresses = []
    for folder in _own_folders():
        with contextlib.suppress(OSError):
            # The address first: it is there only once the lock is held, so trying the lock takes it from nobody.
            address = (folder / "address").read_text(encoding="utf-8")
            lock = _lock(folder)
            if lock is None:
                addresses.append(address)
            else:
                os.close(lock)
    return addresses


def _own_folders() -> list[Path]:
    """Whatever others put into /tmp is not looked at."""
    folders = []
    for folder in sorted(Path(_PARENT).glob(f"{_PREFIX}*")):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid == os.getuid():
                folders.append(folder)
    return folders


def _lock(folder: Path) -> int | None:
    """Mark `folder` as in use until this process ends, however it ends. None where another process has done so."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
