"""The command line: `warmroute serve`, `warmroute demo` and `warmroute index`."""

import argparse
import asyncio
import contextlib
import logging
import re
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from . import demo, index_commands, processes
from .errors import DeployError, StartError
from .index_check import require_index
from .settings import Settings, load_settings

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["main"]

# Flags that are settings, by their key path; the rest (--config) say where settings come from.
_SETTING_FLAGS = (
    "model",
    "revision",
    "served_model_name",
    "num_replicas",
    "device",
    "dtype",
    "host",
    "port",
    "http_fast_path",
    "address",
    "index.redis_url",
)
# What a shell reports for a program that Ctrl-C ended.
_EXIT_CODE_INTERRUPTED = 128 + signal.SIGINT
# 16 bytes, as `warmroute index tenants` prints them.
_TENANT_KEY = re.compile(r"[0-9a-fA-F]{32}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0, or 1 after one sentence on standard error; bad usage exits with 2.
    Ctrl-C ends it without a word.

    `index check` has one more, for drift. `serve` and `index` do not return: they end the process, for a call into Ray
    may still be on a thread.
    """
    arguments = _parser().parse_args(argv)
    exit_code = 0
    try:
        match arguments.command:
            case "serve":
                _serve(arguments)
            case "index":
                exit_code = _index(arguments)
            case _:
                demo.run(arguments.url, num_questions=arguments.questions, model=arguments.model)
    except DeployError as error:
        print(f"warmroute: {error}", file=sys.stderr)
        exit_code = 1
    except KeyboardInterrupt:
        exit_code = _EXIT_CODE_INTERRUPTED
    if arguments.command in ("serve", "index"):
        processes.leave(exit_code)
    return exit_code


def _settings(arguments: argparse.Namespace) -> Settings:
    given = vars(arguments)
    flags = {name: value for name in _SETTING_FLAGS if (value := given.get(name)) is not None}
    return load_settings(flags, arguments.config)


def _serve(arguments: argparse.Namespace) -> None:
    settings = _settings(arguments)

    # Here, not above: it brings Ray's process control, which the other commands have no use for.
    from . import runtime

    # Only here: another cluster has ports and models of its own, and its Redis may be reached from there alone.
    model_name = None
    if settings.address is None:
        runtime.check_port(settings.host, settings.port)
        _say(f"index: {require_index(settings.index)}")
        model_name = _check_model(settings)
    runtime.serve_forever(settings, lambda: _application(settings), _say, model_name=model_name)


def _index(arguments: argparse.Namespace) -> int:
    settings = _settings(arguments)
    # What the index would tell a service's log, the command says itself.
    logging.getLogger("cache_index").addHandler(logging.NullHandler())
    match arguments.index_command:
        case "stats":
            command = index_commands.print_stats(settings, _write, as_json=arguments.json)
        case "tenants":
            command = index_commands.print_tenants(settings, _write, as_json=arguments.json)
        case "check":
            command = index_commands.check_drift(settings, _write, as_json=arguments.json)
        case _:
            command = index_commands.purge(settings, _write, arguments.key or arguments.tenant)
    return asyncio.run(command)


def _check_model(settings: Settings) -> str:
    """What can be known of the model without its weights, so that a wrong one is refused before anything starts.

    Returns the name that clients ask for.
    """
    from replicas.errors import ModelError
    from replicas.forward.model import check_servable

    try:
        return check_servable(settings.model_settings(), settings.engine, on_convert=_say).name
    except ModelError as error:
        raise StartError(str(error)) from error


def _application(settings: Settings) -> "Application":
    from .app import application

    return application(settings)


def _say(line: str) -> None:
    _write(f"warmroute: {line}")


def _write(line: str) -> None:
    # A reader that went away (a closed pipe) must not keep the cluster from ending.
    with contextlib.suppress(BrokenPipeError, ValueError):
        print(line, flush=True)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence and leaves the usage to --help."""

    def error(self, message: str) -> NoReturn:
        # What was not understood may be a URL, and that hold a password.
        shown = re.sub(r"://\S*@", "://...@", message)
        self.exit(2, f"{self.prog}: {shown} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="warmroute", description="Serve a language model; compute a shared prompt prefix once.")
    parser.add_argument("--version", action="version", version=f"warmroute {version('warmroute')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    _add_serve(commands)
    _add_demo(commands)
    _add_index(commands)
    return parser


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser(
        "serve",
        help="start the cluster here, in the foreground",
        description="Start the cluster here, in the foreground. A flag overrides WARMROUTE_* variables, which override "
        "the file of --config.",
        allow_abbrev=False,
    )
    add = serve.add_argument
    add("--model", help="hub id, local folder or GGUF file (default: SmolLM2-135M-Instruct)")
    add("--revision", help="branch, tag or commit of a hub id")
    add("--served-model-name", help="what clients call the model")
    add("--replicas", dest="num_replicas", metavar="N", help="copies of the model (default: 2)")
    add("--device", choices=("auto", "cpu", "cuda"))
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"))
    add("--host", help="address to listen on (default: 127.0.0.1)")
    add("--port", help="port to listen on (default: 8000)")
    add("--http-fast-path", choices=("auto", "on", "off"), help="HAProxy in front of the gateways (default: auto)")
    add("--address", help="deploy into this running Ray cluster instead (also RAY_ADDRESS)")
    _add_index_place(serve, "keep the index there (default: an actor in the Ray cluster)")


def _add_index_place(command: argparse.ArgumentParser, help_redis_url: str) -> None:
    command.add_argument("--redis-url", dest="index.redis_url", metavar="URL", help=help_redis_url)
    command.add_argument("--config", type=Path, metavar="FILE", help="settings as YAML")


def _add_demo(commands: Any) -> None:
    command = commands.add_parser(
        "demo",
        help="ask a running cluster questions under one long system prompt, cold and warm",
        description="Ask a running cluster questions under one long system prompt: once cold, then warm.",
        allow_abbrev=False,
    )
    command.add_argument("--url", default="http://127.0.0.1:8000", help="default: %(default)s")
    command.add_argument("--questions", type=_positive, default=5, metavar="N", help="default: %(default)s")
    command.add_argument("--model", help="default: the first that the cluster serves")


def _add_index(commands: Any) -> None:
    index = commands.add_parser(
        "index",
        help="look into the index of a running cluster",
        description="Look into the index of a running cluster: which replica holds which blocks, for which tenants. "
        "It is on Redis where --redis-url, WARMROUTE_INDEX__REDIS_URL or --config names one, else in the Ray cluster.",
        allow_abbrev=False,
    )
    actions = index.add_subparsers(dest="index_command", required=True, metavar="action")

    def add(name: str, summary: str, more: str = "", *, has_json: bool = True) -> argparse.ArgumentParser:
        description = f"{summary[0].upper()}{summary[1:]}. {more}"
        action: argparse.ArgumentParser = actions.add_parser(
            name, help=summary, description=description, allow_abbrev=False
        )
        _add_index_place(action, "the Redis that holds the index")
        action.add_argument(
            "--address", help="the Ray cluster that holds it (default: that of `warmroute serve` on this machine)"
        )
        if has_json:
            action.add_argument("--json", action="store_true", help="one JSON object, for machines")
        return action

    add("stats", "show the registered replicas and what all of it amounts to")
    add("tenants", "list the tenants, those with most blocks first")
    purge = add("purge", "drop a tenant's blocks from the index and from every replica", has_json=False)
    which = purge.add_mutually_exclusive_group(required=True)
    which.add_argument("tenant", nargs="?", help="its name, of which WARMROUTE_SECRET makes the key")
    which.add_argument("--key", type=_tenant_key, metavar="HEX", help="its key, as `tenants` prints it")
    exit_codes = (
        f"Exit code: 0 no drift, or no replica; {index_commands.EXIT_DRIFT} a replica differs, or said nothing; "
        "1 the index can't be asked."
    )
    add("check", "compare the index with what the replicas say they hold", exit_codes)


def _tenant_key(text: str) -> bytes:
    if not _TENANT_KEY.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a tenant's key, which is 32 hex digits")
    return bytes.fromhex(text)


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return value


if __name__ == "__main__":
    sys.exit(main())
