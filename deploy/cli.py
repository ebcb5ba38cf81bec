"""The command line: `warmroute serve` and `warmroute demo`."""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from . import demo, processes
from .errors import DeployError, StartError
from .settings import Settings, load_settings

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["main"]

# Flags that are settings; the rest (--config) say where settings come from.
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
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0, or 1 after one sentence on standard error; bad usage exits with 2.

    `serve` does not return: it ends the process.
    """
    arguments = _parser().parse_args(argv)
    exit_code = 0
    try:
        if arguments.command == "serve":
            _serve(arguments)
        else:
            demo.run(arguments.url, num_questions=arguments.questions, model=arguments.model)
    except DeployError as error:
        print(f"warmroute: {error}", file=sys.stderr)
        exit_code = 1
    if arguments.command == "serve":
        processes.leave(exit_code)
    return exit_code


def _serve(arguments: argparse.Namespace) -> None:
    flags = {name: value for name in _SETTING_FLAGS if (value := getattr(arguments, name)) is not None}
    settings = load_settings(flags, arguments.config)

    # Here, not above: it brings Ray's process control, which the other commands have no use for.
    from . import runtime

    # Only here: another cluster has ports and models of its own.
    model_name = None
    if settings.address is None:
        runtime.check_port(settings.host, settings.port)
        model_name = _check_model(settings)
    runtime.serve_forever(settings, lambda: _application(settings), _say, model_name=model_name)


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
    # A reader that went away (a closed pipe) must not keep the cluster from ending.
    with contextlib.suppress(BrokenPipeError, ValueError):
        print(f"warmroute: {line}", flush=True)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence and leaves the usage to --help."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="warmroute", description="Serve a language model; compute a shared prompt prefix once.")
    parser.add_argument("--version", action="version", version=f"warmroute {version('warmroute')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    _add_serve(commands)
    _add_demo(commands)
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
    add("--config", type=Path, metavar="FILE", help="settings as YAML")


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
