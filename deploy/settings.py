"""All settings, and the only reader of the environment.

Layers, strongest first: command-line flags (or the `args` of a Serve config), `WARMROUTE_*` variables, the YAML file of
`--config`, defaults. A nested key is joined by two underscores: WARMROUTE_ENGINE__BLOCK_SIZE is `engine.block_size`.

The layers are merged here rather than by pydantic-settings, which passes over a variable that has the prefix but
matches no field: a misspelt WARMROUTE_ENGIN__BLOCK_SIZE would be a setting that silently has no effect.
"""

import difflib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from cache_index.settings import IndexSettings
from replicas.settings import EngineSettings, ModelSettings
from router.settings import GatewaySettings, RoutingSettings

from .errors import SettingsError

__all__ = ["AppSettings", "Settings", "app_settings", "load_settings"]

ENV_PREFIX = "WARMROUTE_"
ENV_NESTED_DELIMITER = "__"

# Kubernetes gives every pod variables about the Services of its namespace, named after the Service. A Service called
# `warmroute` or `warmroute-serve` therefore makes names with our prefix that nobody wrote.
_SERVICE_LINK = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)$")
_SERVICE_LINK_URL = re.compile(r"(tcp|udp|sctp)://")

JsonDict = dict[str, Any]


class AppSettings(ModelSettings):
    """What the Serve application is built from: also the `args` of a Serve config file or of `serve run`.

    Which model it is stands at the top level; each part's own settings are a section.
    """

    # Ray Serve logs the error of `args` that don't fit, and what doesn't fit may be a secret: a URL with a password.
    model_config = ConfigDict(hide_input_in_errors=True)

    num_replicas: int = Field(default=2, ge=1)
    """Copies of the model, each with a KV cache of its own."""
    num_gateways: int = Field(default=1, ge=1)
    """HTTP ingress processes; each has its own router and mirror."""
    secret: SecretStr | None = Field(default=None, min_length=16)
    """Server secret under which tenant scope keys are made; None draws a new one each time the application is built."""
    index: IndexSettings = IndexSettings()
    engine: EngineSettings = EngineSettings()
    gateway: GatewaySettings = GatewaySettings()
    routing: RoutingSettings = RoutingSettings()

    def model_settings(self) -> ModelSettings:
        """What a replica needs to know of the model."""
        return ModelSettings(**{name: getattr(self, name) for name in ModelSettings.model_fields})


class Settings(AppSettings):
    """The application's settings, and those of the process that starts it."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    http_fast_path: Literal["auto", "on", "off"] = "auto"
    """HAProxy in front of the gateways: `auto` uses it where it runs, `on` refuses to start without it."""
    address: str | None = None
    """A running Ray cluster to deploy into; None starts one and owns it. RAY_ADDRESS stands in for it."""


ModelT = TypeVar("ModelT", bound=BaseModel)


def load_settings(
    flags: Mapping[str, Any], config_file: Path | None = None, environ: Mapping[str, str] = os.environ
) -> Settings:
    """The settings of one `warmroute serve`.

    flags: only what was given on the command line, by key path: `port`, `index.redis_url`. Raises SettingsError, which
    names the key or variable at fault.
    """
    layers = [_from_file(config_file), _from_environment(Settings, environ)]
    layers += [_nested(path.split("."), value) for path, value in flags.items()]
    merged = _merge(layers)
    if "address" not in merged and environ.get("RAY_ADDRESS"):
        merged["address"] = environ["RAY_ADDRESS"]
    return _validate(Settings, merged)


def app_settings(args: AppSettings, environ: Mapping[str, str] = os.environ) -> AppSettings:
    """`args`, over what the environment of the building process sets; so a secret need not stand in a config file.

    Variables of the starting process alone (WARMROUTE_PORT) are allowed and have no effect here.
    Raises SettingsError.
    """
    environment = _from_environment(Settings, environ)
    own = {key: value for key, value in environment.items() if key in AppSettings.model_fields}
    return _validate(AppSettings, _merge([own, args.model_dump(exclude_unset=True)]))


def _from_file(path: Path | None) -> JsonDict:
    if path is None:
        return {}
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"the settings file {path} can't be read: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"the settings file {path} is not YAML{_place(error)}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"the settings file {path} must hold keys and values")
    return content


def _place(error: Exception) -> str:
    """Where a file is not YAML. What stands there is left out: it may be a secret, and PyYAML quotes whole lines."""
    mark = getattr(error, "problem_mark", None)
    return "" if mark is None else f": see line {mark.line + 1}, column {mark.column + 1}"


def _from_environment(model: type[BaseModel], environ: Mapping[str, str]) -> JsonDict:
    """The values of `WARMROUTE_*`, nested as the settings are; a variable that matches no setting is an error."""
    known = {ENV_PREFIX + ENV_NESTED_DELIMITER.join(path).upper(): (path, field) for path, field in _fields(model)}
    found: JsonDict = {}
    # Sorted, so that a whole section as JSON (WARMROUTE_ENGINE) comes before, and yields to, one key of it.
    for name in sorted(environ):
        value = environ[name]
        if not name.startswith(ENV_PREFIX) or _is_service_link(name, value):
            continue
        if name not in known:
            raise SettingsError(f"unknown environment variable {name}{_did_you_mean(name, known)}", key=name)
        path, field = known[name]
        found = _merge([found, _nested(path, _parse(name, value, field))])
    return found


def _nested(path: Sequence[str], value: Any) -> JsonDict:
    """A layer with one value, at this key path."""
    for key in reversed(path[1:]):
        value = {key: value}
    return {path[0]: value}


def _is_service_link(name: str, value: str) -> bool:
    return bool(_SERVICE_LINK.search(name)) or (name.endswith("_PORT") and bool(_SERVICE_LINK_URL.match(value)))


def _parse(name: str, value: str, field: FieldInfo) -> Any:
    """JSON for a section, a list or an object; other text stays text, which pydantic converts to the field's type."""
    # A password may begin with any character.
    if _section(field) is None and (_is_secret(field) or not value.startswith(("[", "{"))):
        return None if value.lower() == "null" else value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise SettingsError(f"environment variable {name} is not JSON: {error.msg}", key=name) from error


def _fields(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Key path of each field at every depth, and the field."""
    for name, field in model.model_fields.items():
        yield (*prefix, name), field
        if section := _section(field):
            yield from _fields(section, (*prefix, name))


def _section(field: FieldInfo) -> type[BaseModel] | None:
    """The settings that a field holds, where it is a section with fields of its own."""
    section = field.annotation
    return section if isinstance(section, type) and issubclass(section, BaseModel) else None


def _is_secret(field: FieldInfo) -> bool:
    return SecretStr in (field.annotation, *get_args(field.annotation))


def _merge(layers: list[JsonDict]) -> JsonDict:
    """The layers as one, later over earlier, key by key at every depth."""
    merged: JsonDict = {}
    for layer in layers:
        for key, value in layer.items():
            below = merged.get(key)
            merged[key] = _merge([below, value]) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _validate(model: type[ModelT], values: JsonDict) -> ModelT:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise _as_settings_error(model, error) from error


def _as_settings_error(model: type[BaseModel], error: ValidationError) -> SettingsError:
    """The first problem as one sentence: it is the one to mend first, and the next start names the next."""
    first = error.errors(include_url=False)[0]
    path = tuple(str(part) for part in first["loc"])
    key = ".".join(path)
    fields = dict(_fields(model))
    if first["type"] == "extra_forbidden":
        return SettingsError(
            f"unknown setting {key}{_did_you_mean(key, ['.'.join(known) for known in fields])}", key=key
        )
    reason = first["msg"].removeprefix("Value error, ")
    reason = reason[:1].lower() + reason[1:]
    # Only what is known to be no secret is shown: a section's own complaint would show all of its values.
    is_shown = path in fields and _section(fields[path]) is None and not _is_secret(fields[path])
    shown = f" (got {first['input']!r})" if is_shown else ""
    return SettingsError(f"setting {key}: {reason}{shown}", key=key)


def _did_you_mean(name: str, known: Mapping[str, Any] | list[str]) -> str:
    closest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {closest[0]}?" if closest else ""
