"""The Redis of k8s/base, started as its container starts it, and reached with the settings of its RayService."""

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from pydantic import SecretStr

from cache_index.settings import IndexSettings
from deploy.errors import StartError
from deploy.index_check import require_index
from deploy.settings import AppSettings, app_settings
from tests.redis_servers import START_TIMEOUT_S, free_port, redis_binary

BASE = Path(__file__).resolve().parents[2] / "k8s" / "base"
PASSWORD = "fedcba9876543210"


def documents(name: str, kind: str) -> dict[str, Any]:
    [found] = [item for item in yaml.safe_load_all((BASE / name).read_text()) if item["kind"] == kind]
    return found


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """Where the container's own command serves, with its paths in a folder of this test and another port."""
    container = documents("redis.yaml", "StatefulSet")["spec"]["template"]["spec"]["containers"][0]
    *shell, script = container["command"]
    port, config = free_port(), (BASE / "redis.conf").read_text()
    assert "port 6379" in config
    (tmp_path / "redis.conf").write_text(config.replace("port 6379", f"port {port}\nbind 127.0.0.1\ndir {tmp_path}"))
    (tmp_path / "run").mkdir()
    script = script.replace("/run/redis/", f"{tmp_path}/run/").replace("/etc/redis/", f"{tmp_path}/")
    path = f"{Path(redis_binary()).parent}:{os.environ['PATH']}"
    process = subprocess.Popen([*shell, script], env={"PATH": path, "REDISCLI_AUTH": PASSWORD})
    try:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                break
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        yield port
    finally:
        process.kill()
        process.wait()


def test_the_application_reaches_the_redis_of_the_base_with_the_password_from_its_environment(port: int) -> None:
    config = yaml.safe_load(documents("rayservice.yaml", "RayService")["spec"]["serveConfigV2"])
    arguments = AppSettings.model_validate(config["applications"][0]["args"])

    def index(password: str) -> IndexSettings:
        environ = {"WARMROUTE_INDEX__REDIS_PASSWORD": password}
        built = app_settings(arguments, environ).index
        assert built.redis_url is not None
        address = urlsplit(built.redis_url.get_secret_value())
        here = address._replace(netloc=f"127.0.0.1:{port}").geturl()
        return built.model_copy(update={"redis_url": SecretStr(here)})

    assert require_index(index(PASSWORD)).endswith(f", at redis://127.0.0.1:{port}")
    with pytest.raises(StartError, match="refuses the user or password"):
        require_index(index("another"))
