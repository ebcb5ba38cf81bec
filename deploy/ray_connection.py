"""Joins a running Ray cluster for one command: quietly, and in bounded time.

Ray itself asks an address at which nobody answers for minutes, and its native code writes to standard error meanwhile.
"""

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from . import ray_environment
from .errors import ClientError
from .failures import reason
from .folders import running_addresses

__all__ = ["join_cluster"]

# A cluster on this machine answers in 2 s. A machine that is busy with other things gets the rest.
_JOIN_TIMEOUT_S = 20.0
_PORT_TIMEOUT_S = 2.0


def join_cluster(address: str | None) -> None:
    """Connect this process to the cluster at `address`.

    None is the cluster of `warmroute serve` on this machine; `auto` too, and without it whichever Ray finds.
    End the process with `processes.leave`: a call into Ray that never returned may still be on a thread. Raises
    ClientError.
    """
    if address in (None, "auto"):
        address = _own_address() or address
    if address is None:
        raise ClientError(
            "no cluster of `warmroute serve` runs on this machine; name a Ray cluster with --address, "
            "or the Redis that holds the index with --redis-url"
        )
    _check_port(address)
    ray_environment.prepare_to_join(address)
    # Not as a `with`, which would wait for a call that never returns.
    thread = ThreadPoolExecutor(1, thread_name_prefix="ray-join")
    try:
        with _without_standard_error():
            thread.submit(_join, address).result(_JOIN_TIMEOUT_S)
    except TimeoutError as error:
        message = f"the Ray cluster at {address} did not let this process join within {_JOIN_TIMEOUT_S:g} s"
        raise ClientError(message) from error
    except Exception as error:
        raise ClientError(f"can't join the Ray cluster at {address}: {reason(str(error))}") from error


def _own_address() -> str | None:
    addresses = running_addresses()
    if len(addresses) > 1:
        raise ClientError(
            f"{len(addresses)} clusters of `warmroute serve` run on this machine; name one with --address: "
            + ", ".join(addresses)
        )
    return addresses[0] if addresses else None


def _check_port(address: str) -> None:
    """Raise ClientError where `address` is a host and port, and nobody listens there."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        return  # `auto`, or another form that is Ray's to read.
    try:
        socket.create_connection((host.strip("[]"), int(port)), _PORT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        cause = str(getattr(error, "strerror", None) or error).lower()
        raise ClientError(f"no Ray cluster answers at {address}: {cause}") from error


def _join(address: str) -> None:
    import ray

    init: Any = ray.init
    init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)


@contextlib.contextmanager
def _without_standard_error() -> Iterator[None]:
    """Nothing of this process reaches standard error meanwhile, also what native code writes to its descriptor."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
