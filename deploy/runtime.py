"""Starts the cluster in the foreground, watches it, and ends all of it.

Two ways: a Ray cluster of our own, of which nothing is left when this process ends; or somebody's cluster (`address`),
where only our application is deployed and deleted.
"""

import contextlib
import http.client
import json
import logging
import shlex
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from . import processes, ray_environment
from .errors import StartError
from .failures import first_failure, reason
from .folders import new_folder, write_address
from .settings import Settings
from .signals import StopRequested, StopSignal

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.schema import ApplicationStatusOverview

__all__ = ["APP_NAME", "check_port", "serve_forever"]

APP_NAME = "warmroute"

# A graceful end of our own cluster takes 1 to 2 s; past this its processes are ended one by one.
_SHUTDOWN_TIMEOUT_S = 3.0
# In somebody's cluster the replicas finish what they are answering first; a second signal does not wait for it.
_DELETE_TIMEOUT_S = 60.0
_POLL_INTERVAL_S = 0.25
# Health is looked at less often once all is up: a change is news for a person, not for a router.
_WATCH_INTERVAL_S = 2.0
_HEALTH_TIMEOUT_S = 2.0
# A line at least so often while weights load, so that a long silence means something.
_PROGRESS_INTERVAL_S = 10.0
# Serve passes no tensors through Ray's object store, whose default is 30 percent of the machine's memory.
_OBJECT_STORE_BYTES = 256 * 2**20

logger = logging.getLogger(__name__)

Say = Callable[[str], None]
Build = Callable[[], "Application"]


def serve_forever(settings: Settings, build: Build, say: Say, *, model_name: str | None = None) -> None:
    """Start, report progress with `say`, and return when SIGINT, SIGTERM or SIGHUP asks for the end.

    build: makes the Serve application; called once Ray's environment is set, so it may import ray.serve.
    model_name: for the line that shows how to ask.
    All processes have ended on return, also when it raises. A second signal ends them at once. Raises StartError.
    After it, end the process with `processes.leave`: a call into Ray that never returned may still be on a thread.
    """
    stop = StopSignal()
    with stop.installed():
        if settings.address is None:
            _serve_own_cluster(settings, build, say, stop, model_name)
        else:
            _serve_existing_cluster(settings, settings.address, build, say, stop, model_name)


def check_port(host: str, port: int) -> None:
    """Raise StartError where (host, port) can't be listened on. SO_REUSEADDR: an ended connection is no obstacle."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise StartError(f"can't listen on {host}:{port}: {reason}; choose another with --port") from error


def _serve_own_cluster(settings: Settings, build: Build, say: Say, stop: StopSignal, model_name: str | None) -> None:
    check_port(settings.host, settings.port)
    fast_path = ray_environment.choose_fast_path(settings.http_fast_path, say)
    folder = new_folder()
    failed = True
    try:
        ray_environment.prepare(folder, fast_path=fast_path)
        processes.adopt_orphans()
        say("starting Ray")
        dashboard = stop.run(lambda: _start_ray(folder))
        stop.install()  # Ray's native code aborts the process on SIGTERM.
        say(f"starting Ray Serve (its logs: {folder / 'ray' / 'session_latest' / 'logs' / 'serve'})")
        stop.run(lambda: _start_serve(settings))
        stop.run(lambda: _deploy(build))
        _wait_until_ready(settings, say, stop)
        _announce(settings, dashboard, model_name, say)
        _watch(say, stop)
    except StopRequested:
        failed = False
        raise
    finally:
        stop.begin_ending(force=processes.kill_descendants)
        if not failed:
            say("stopping")
        _end_own_cluster(in_order=not stop.has_abandoned)
        if not failed:
            shutil.rmtree(folder, ignore_errors=True)
            say("stopped")


def _start_ray(folder: Path) -> str:
    """Start a Ray cluster whose files are in `folder`, and say there where it is. Returns the dashboard's address."""
    with _as_start_error("Ray did not start"):
        import ray

        context = ray.init(
            address="local",
            _temp_dir=str(folder / "ray"),
            include_dashboard=True,
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        write_address(folder, ray.get_runtime_context().gcs_address)
        return str(context.dashboard_url)


def _end_own_cluster(*, in_order: bool) -> None:
    """End all processes; not `in_order` where Ray is still starting, and can't be asked to end."""
    if in_order:
        # serve.shutdown() is left out: it waits 30 s for HAProxy to drain, and ends nothing that this does not.
        _bounded(_disconnect, _SHUTDOWN_TIMEOUT_S)
        processes.end_descendants(grace_s=1.0)
    else:
        processes.kill_descendants()


def _serve_existing_cluster(
    settings: Settings, address: str, build: Build, say: Say, stop: StopSignal, model_name: str | None
) -> None:
    say(f"connecting to the Ray cluster at {address}")
    ray_environment.connect_only_when_asked()
    has_deployed = False
    try:
        stop.run(lambda: _connect(address))
        stop.install()  # Ray's native code aborts the process on SIGTERM.
        stop.run(lambda: _start_serve(settings))
        has_deployed = True
        stop.run(lambda: _deploy(build))
        _wait_until_ready(settings, say, stop)
        _announce(settings, None, model_name, say)
        _watch(say, stop)
    finally:
        stop.begin_ending(force=lambda: None)
        if has_deployed:
            say("deleting the application; the Ray cluster goes on")
            _bounded(_delete, _DELETE_TIMEOUT_S)
        if not stop.has_abandoned:
            _bounded(_disconnect, _SHUTDOWN_TIMEOUT_S)


def _connect(address: str) -> None:
    with _as_start_error(f"can't connect to a Ray cluster at {address}"):
        import ray

        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)


def _start_serve(settings: Settings) -> None:
    """Start Serve's controller and proxy; where they run already, Serve keeps the address they have."""
    from ray import serve

    # Serve's own news are on this process's standard error; ours say the same in fewer words.
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    with _as_start_error("Ray Serve did not start"):
        serve.start(
            http_options={"host": settings.host, "port": settings.port},
            logging_config={"log_level": "INFO", "enable_access_log": False},
        )


@contextlib.contextmanager
def _as_start_error(what: str) -> Iterator[None]:
    """Ray raises many kinds of exception when it can't start; the operator gets the reason in the last of them."""
    try:
        yield
    except Exception as error:
        raise StartError(f"{what}: {reason(str(error))}") from error


def _deploy(build: Build) -> None:
    """Hand the application to Serve, without waiting for it."""
    from ray import serve

    serve.run_many(
        [serve.RunTarget(build(), name=APP_NAME, route_prefix="/")],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )


def _wait_until_ready(settings: Settings, say: Say, stop: StopSignal) -> None:
    """Relay what is still starting until the application runs. Raises StartError at a replica's first failure."""
    started_s = time.monotonic()
    said, said_s = "", started_s
    while True:
        app = stop.run(_status)
        if app is not None:
            failure = first_failure(app)
            if failure is not None:
                raise StartError(failure)
            # The replicas are up before the proxy in front of them has noticed.
            if app.status == "RUNNING" and (settings.address is not None or _answers(settings)):
                return
            now_s = time.monotonic()
            line = _progress(app, settings)
            if line != said or now_s - said_s >= _PROGRESS_INTERVAL_S:
                say(f"{line} ({now_s - started_s:.0f} s)")
                said, said_s = line, now_s
        stop.sleep(_POLL_INTERVAL_S)


def _answers(settings: Settings) -> bool:
    """Whether Serve's proxy has a gateway to send requests to."""
    connection = http.client.HTTPConnection(_client_host(settings), settings.port, timeout=_HEALTH_TIMEOUT_S)
    try:
        connection.request("GET", "/-/healthz")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _client_host(settings: Settings) -> str:
    """The address at which a client on this machine reaches `settings.host`."""
    return "127.0.0.1" if settings.host in ("", "0.0.0.0", "::") else settings.host


def _progress(app: "ApplicationStatusOverview", settings: Settings) -> str:
    parts = []
    for name, deployment in sorted(app.deployments.items()):
        running = sum(count for state, count in deployment.replica_states.items() if state == "RUNNING")
        wanted = max(running, sum(deployment.replica_states.values()))
        if deployment.status != "HEALTHY" and wanted:
            parts.append(f"{name}: {running} of {wanted} ready")
    return ", ".join(parts) or "starting replicas"


def _announce(settings: Settings, dashboard: str | None, model_name: str | None, say: Say) -> None:
    host = _client_host(settings)
    url = f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"
    say(f"serving on {url}")
    if dashboard:
        ray_command = Path(sys.executable).with_name("ray")
        say(f"Ray dashboard: http://{dashboard} (its token: {ray_command} get-auth-token)")
    if model_name is None:
        say(f"try: curl {url}/v1/models")
    else:
        body = json.dumps({"model": model_name, "messages": [{"role": "user", "content": "Hello"}]})
        say(f"try: curl {url}/v1/chat/completions -H 'content-type: application/json' -d {shlex.quote(body)}")
    say("Ctrl-C stops everything")


def _watch(say: Say, stop: StopSignal) -> None:
    """Say when a deployment's health changes, until a signal ends the wait."""
    health: dict[str, str] = {}
    while True:
        stop.sleep(_WATCH_INTERVAL_S)
        processes.reap_orphans()
        app = stop.run(_status)
        if app is None:
            continue
        for name, deployment in app.deployments.items():
            if deployment.status != health.get(name, "HEALTHY"):
                detail = f": {deployment.message.strip().splitlines()[-1]}" if deployment.message.strip() else ""
                say(f"{name} is {deployment.status.lower().replace('_', ' ')}{detail}")
            health[name] = deployment.status


def _status() -> "ApplicationStatusOverview | None":
    """What Serve says of our application; None while it knows none, or while its controller is being restarted."""
    from ray import serve

    try:
        return serve.status().applications.get(APP_NAME)
    except Exception:
        logger.warning("Ray Serve's status can't be read", exc_info=True)
        return None


def _delete() -> None:
    from ray import serve

    serve.delete(APP_NAME)


def _disconnect() -> None:
    """Leave the cluster; one that this process started ends with that."""
    import ray

    ray.shutdown()


def _bounded(action: Callable[[], object], timeout_s: float) -> None:
    """Run `action` for at most `timeout_s`, then leave it behind; what it should have ended is ended otherwise."""

    def quietly() -> None:
        with contextlib.suppress(Exception):
            action()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(timeout_s)
