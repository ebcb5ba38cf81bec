"""Layers of settings, and that no misspelt key passes unseen, wherever it stands."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr, ValidationError

from deploy.errors import SettingsError
from deploy.settings import AppSettings, Settings, app_settings, load_settings


def write(folder: Path, text: str) -> Path:
    path = folder / "warmroute.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_without_any_layer_the_defaults_hold() -> None:
    settings = load_settings({}, environ={})
    assert (settings.host, settings.port, settings.num_replicas) == ("127.0.0.1", 8000, 2)
    assert settings.model is None
    assert settings.secret is None
    assert settings == Settings()


def test_each_layer_overrides_the_one_below(tmp_path: Path) -> None:
    config = write(
        tmp_path, "port: 1001\nhost: 127.0.0.2\nnum_replicas: 5\nengine: {block_size: 32, max_num_seqs: 7}\n"
    )
    environ = {"WARMROUTE_PORT": "1002", "WARMROUTE_HOST": "127.0.0.3", "WARMROUTE_ENGINE__BLOCK_SIZE": "64"}
    settings = load_settings({"port": "1003"}, config, environ)
    assert settings.port == 1003
    assert settings.host == "127.0.0.3"
    assert settings.num_replicas == 5
    assert settings.engine.block_size == 64
    assert settings.engine.max_num_seqs == 7, "one key of a section from the environment keeps the file's others"


def test_a_section_may_be_json_in_the_environment_and_yields_to_its_own_keys() -> None:
    environ = {"WARMROUTE_ENGINE__BLOCK_SIZE": "8", "WARMROUTE_ENGINE": '{"block_size": 4, "max_num_seqs": 3}'}
    engine = load_settings({}, environ=environ).engine
    assert (engine.block_size, engine.max_num_seqs) == (8, 3)


def test_text_from_the_environment_becomes_the_type_of_its_field() -> None:
    environ = {"WARMROUTE_ENGINE__ENABLE_PREFIX_CACHING": "false", "WARMROUTE_ENGINE__NUM_THREADS": "null"}
    engine = load_settings({}, environ=environ).engine
    assert engine.enable_prefix_caching is False
    assert engine.num_threads is None


@pytest.mark.parametrize(
    ("text", "key", "meant"),
    [
        ("num_replica: 3", "num_replica", "num_replicas"),
        ("engine: {blok_size: 16}", "engine.blok_size", "engine.block_size"),
        ("routing: {price_bas: 1}", "routing.price_bas", "routing.price_base"),
        ("gateway: {streams: 1}", "gateway.streams", "gateway.streams_max"),
        ("index: {lease: 1}", "index.lease", "index.lease_s"),
    ],
)
def test_a_misspelt_key_of_the_file_is_named_with_the_one_that_was_meant(
    tmp_path: Path, text: str, key: str, meant: str
) -> None:
    with pytest.raises(SettingsError, match=f"unknown setting {key}; did you mean {meant}") as caught:
        load_settings({}, write(tmp_path, text), {})
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("WARMROUTE_NUM_REPLICA", "WARMROUTE_NUM_REPLICAS"),
        ("WARMROUTE_ENGINE__BLOK_SIZE", "WARMROUTE_ENGINE__BLOCK_SIZE"),
        ("WARMROUTE_ENGINE_BLOCK_SIZE", "WARMROUTE_ENGINE__BLOCK_SIZE"),
        ("WARMROUTE_ENGIN__BLOCK_SIZE", "WARMROUTE_ENGINE__BLOCK_SIZE"),
    ],
)
def test_a_misspelt_variable_is_named_with_the_one_that_was_meant(name: str, meant: str) -> None:
    with pytest.raises(SettingsError, match=f"unknown environment variable {name}; did you mean {meant}") as caught:
        load_settings({}, environ={name: "1"})
    assert caught.value.key == name


def test_a_variable_of_another_prefix_is_none_of_ours() -> None:
    assert load_settings({}, environ={"PORT": "1", "WARM_PORT": "2"}) == Settings()


def test_what_kubernetes_says_of_a_service_named_warmroute_is_no_setting() -> None:
    environ = {
        "WARMROUTE_PORT": "tcp://10.0.0.1:8000",
        "WARMROUTE_SERVICE_HOST": "10.0.0.1",
        "WARMROUTE_SERVICE_PORT": "8000",
        "WARMROUTE_SERVICE_PORT_SERVE": "8000",
        "WARMROUTE_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "WARMROUTE_PORT_8000_TCP_ADDR": "10.0.0.1",
        "WARMROUTE_HEAD_SVC_SERVICE_HOST": "10.0.0.2",
        "WARMROUTE_HEAD_SVC_PORT": "tcp://10.0.0.2:6379",
    }
    assert load_settings({}, environ=environ) == Settings()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"port": "70000"}, "setting port: .*less than or equal to 65535.*'70000'"),
        ({"port": "many"}, "setting port: .*integer.*'many'"),
        ({"num_replicas": 0}, "setting num_replicas: .*greater than or equal to 1"),
        ({"device": "tpu"}, "setting device: .*'cuda'.*'tpu'"),
    ],
)
def test_an_impossible_value_is_named_with_its_key(flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence) as caught:
        load_settings(flags, environ={})
    assert "\n" not in str(caught.value)


def test_a_secret_is_shown_neither_in_print_nor_in_an_error() -> None:
    settings = load_settings({}, environ={"WARMROUTE_SECRET": "correct horse battery"})
    assert "horse" not in repr(settings)
    with pytest.raises(SettingsError, match="setting secret") as caught:
        load_settings({}, environ={"WARMROUTE_SECRET": "short horse"})
    assert "horse" not in str(caught.value)


def test_the_index_is_reached_by_file_environment_and_flag_as_every_setting(tmp_path: Path) -> None:
    config = write(tmp_path, "index: {redis_url: 'redis://file', redis_username: reader, lease_s: 30}\n")
    environ = {"WARMROUTE_INDEX__REDIS_URL": "redis://environment", "WARMROUTE_INDEX__REDIS_PASSWORD": "{hunter2"}

    index = load_settings({"index.redis_url": "redis://flag"}, config, environ).index
    assert index.redis_url == SecretStr("redis://flag")
    assert index.redis_password == SecretStr("{hunter2"), "a password may look like JSON"
    assert (index.redis_username, index.lease_s) == ("reader", 30)
    assert load_settings({}, config, environ).index.redis_url == SecretStr("redis://environment")
    assert load_settings({}, config, {}).index.redis_url == SecretStr("redis://file")
    assert load_settings({}, environ={}).index.redis_url is None


@pytest.mark.parametrize(
    ("flags", "environ", "text"),
    [
        ({"index.redis_url": "http://me:hunter2@redis:6379"}, {}, ""),
        ({}, {"WARMROUTE_INDEX__REDIS_URL": "me:hunter2@redis"}, ""),
        ({}, {"WARMROUTE_INDEX": '{"redis_url": "me:hunter2@redis"}'}, ""),
        ({}, {"WARMROUTE_INDEX": '{"redis_password": "hunter2"'}, ""),
        ({}, {"WARMROUTE_INDEX": '{"redis_password": "hunter2", "lease_s": 1}'}, ""),
        ({}, {}, "index: {redis_password: [hunter2]}"),
        ({}, {}, "index: {redis_password: [hunter2}"),
        ({}, {}, "index: {redis_password: *hunter2}"),
        ({}, {}, "index: {redis_password: !hunter2 x}"),
        ({}, {}, "index: hunter2"),
    ],
)
def test_no_error_of_the_settings_holds_a_secret_nor_does_its_cause(
    flags: dict[str, str], environ: dict[str, str], text: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(flags, write(tmp_path, text), environ)
    assert "hunter2" not in str(caught.value)
    # Ray Serve logs tracebacks of a build that fails; they hold the settings' own complaint, not what is in a file.
    cause = caught.value.__cause__
    if isinstance(cause, ValidationError):
        assert "hunter2" not in str(cause)


def test_the_args_of_a_serve_config_refuse_a_url_without_showing_it() -> None:
    with pytest.raises(ValidationError, match="redis_url") as caught:
        AppSettings.model_validate({"index": {"redis_url": "http://me:hunter2@redis:6379"}})
    assert "hunter2" not in str(caught.value)


def test_what_is_no_secret_is_shown_at_any_depth() -> None:
    with pytest.raises(SettingsError, match=r"setting index\.lease_s: .* \(got 'long'\)"):
        load_settings({}, environ={"WARMROUTE_INDEX__LEASE_S": "long"})


def test_a_file_that_is_not_yaml_is_named_with_the_place(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="is not YAML: see line 2, column 8"):
        load_settings({}, write(tmp_path, "port: 1\nhost: a: b\n"), {})


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"a: [1", "is not YAML"), (b"- 1\n- 2\n", "must hold keys and values"), (b"\xff\xfe\xfa", "is not YAML")],
)
def test_a_file_that_is_no_settings_file_is_named(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "warmroute.yaml"
    path.write_bytes(content)
    with pytest.raises(SettingsError, match=sentence) as caught:
        load_settings({}, path, {})
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_an_error_and_an_empty_one_is_not(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"can't be read: No such file"):
        load_settings({}, tmp_path / "none.yaml", {})
    assert load_settings({}, write(tmp_path, "# nothing yet\n"), {}) == Settings()


def test_ray_address_stands_in_for_the_address_and_yields_to_it() -> None:
    assert load_settings({}, environ={"RAY_ADDRESS": "10.0.0.1:6379"}).address == "10.0.0.1:6379"
    environ = {"RAY_ADDRESS": "10.0.0.1:6379", "WARMROUTE_ADDRESS": "10.0.0.2:6379"}
    assert load_settings({}, environ=environ).address == "10.0.0.2:6379"


def test_settings_are_frozen_at_each_depth() -> None:
    settings = Settings()
    with pytest.raises(ValidationError):
        settings.port = 1  # type: ignore[misc]
    with pytest.raises(ValidationError):
        settings.engine.block_size = 1


def test_the_args_of_a_serve_config_refuse_a_misspelt_key() -> None:
    with pytest.raises(ValidationError, match="blok_size"):
        AppSettings.model_validate({"engine": {"blok_size": 16}})
    with pytest.raises(ValidationError, match="port"):
        AppSettings.model_validate({"port": 1})


def test_the_args_of_a_serve_config_override_the_environment_key_by_key() -> None:
    args = AppSettings.model_validate({"num_replicas": "3", "engine": {"block_size": 32}})
    environ = {
        "WARMROUTE_NUM_REPLICAS": "9",
        "WARMROUTE_ENGINE__MAX_NUM_SEQS": "5",
        "WARMROUTE_SECRET": "correct horse battery",
        "WARMROUTE_PORT": "8100",
    }
    settings = app_settings(args, environ)
    assert settings.num_replicas == 3
    assert (settings.engine.block_size, settings.engine.max_num_seqs) == (32, 5)
    assert settings.secret is not None
    assert settings.secret.get_secret_value() == "correct horse battery"


def test_the_model_settings_of_a_replica_are_those_of_the_application() -> None:
    model = load_settings({"model": "gpt2", "dtype": "float32"}, environ={}).model_settings()
    assert (model.model, model.dtype, model.device, model.served_model_name) == ("gpt2", "float32", "auto", None)
