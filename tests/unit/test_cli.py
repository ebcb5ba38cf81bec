"""The command as its user types it: one sentence on standard error, no traceback, and an exit code."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT_S = 120


def warmroute(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("WARMROUTE_", "RAY_ADDRESS"))
    }
    return subprocess.run(
        [sys.executable, "-m", "deploy.cli", *arguments],
        env={**inherited, **environ},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def assert_one_sentence(done: subprocess.CompletedProcess[str], exit_code: int = 1) -> str:
    assert done.returncode == exit_code, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("warmroute")
    assert "starting Ray" not in done.stdout, "what can be known before Ray starts is said before it starts"
    return line


def test_a_port_in_use_ends_the_start_with_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = assert_one_sentence(warmroute("serve", "--port", str(port)))
    assert line == f"warmroute: can't listen on 127.0.0.1:{port}: address already in use; choose another with --port"


def test_a_host_that_is_not_ours_ends_the_start_with_one_sentence() -> None:
    # 192.0.2.0/24 is set aside for documents (RFC 5737).
    line = assert_one_sentence(warmroute("serve", "--host", "192.0.2.77"))
    assert "can't listen on 192.0.2.77:8000" in line


def test_an_unknown_setting_ends_the_start_with_one_sentence(tmp_path: Path) -> None:
    config = tmp_path / "warmroute.yaml"
    config.write_text("engine: {blok_size: 16}\n", encoding="utf-8")
    line = assert_one_sentence(warmroute("serve", "--config", str(config)))
    assert line == "warmroute: unknown setting engine.blok_size; did you mean engine.block_size?"


def test_a_misspelt_variable_ends_the_start_with_one_sentence() -> None:
    line = assert_one_sentence(warmroute("serve", WARMROUTE_PROT="1"))
    assert line == "warmroute: unknown environment variable WARMROUTE_PROT; did you mean WARMROUTE_PORT?"


def test_a_model_folder_that_is_not_there_ends_the_start_with_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    line = assert_one_sentence(warmroute("serve", "--port", str(port), "--model", str(tmp_path / "no-model")))
    assert "no-model" in line


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "--prot", "1"),
        ("serve", "--device", "tpu"),
        ("server",),
        (),
        ("demo", "--questions", "0"),
        ("index",),
        ("index", "state"),
        ("index", "purge"),
        ("index", "purge", "--key", "12"),
        ("index", "purge", "acme", "--key", "00112233445566778899aabbccddeeff"),
    ],
)
def test_bad_usage_is_one_sentence_and_exit_code_2(arguments: tuple[str, ...]) -> None:
    line = assert_one_sentence(warmroute(*arguments), exit_code=2)
    assert "--help" in line


def test_a_misspelt_flag_does_not_show_the_password_that_it_holds() -> None:
    line = assert_one_sentence(warmroute("serve", "--redis_url=redis://me:hunter2@redis:6379"), exit_code=2)
    assert "--redis_url=redis://" in line
    assert "hunter2" not in line


@pytest.mark.parametrize("command", [("serve",), ("index", "stats")])
def test_a_wrong_scheme_is_named_without_the_password_of_the_url(command: tuple[str, ...]) -> None:
    line = assert_one_sentence(warmroute(*command, "--redis-url", "http://me:hunter2@redis:6379"))
    assert line.startswith("warmroute: setting index.redis_url: a Redis URL begins with one of redis, ")
    assert "hunter2" not in line


def test_an_index_without_a_cluster_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    line = assert_one_sentence(warmroute("index", "check", "--address", address))
    assert line == f"warmroute: no Ray cluster answers at {address}: connection refused"


def test_the_exit_codes_of_the_check_are_in_its_help() -> None:
    done = warmroute("index", "check", "--help")
    assert "3 a replica differs" in " ".join(done.stdout.split())


def test_the_version_is_that_of_the_distribution() -> None:
    done = warmroute("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["warmroute", "0.1.0"]


def test_the_demo_without_a_server_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    line = assert_one_sentence(warmroute("demo", "--url", url))
    assert line == f"warmroute: no server answers at {url}; start one with `warmroute serve`"
