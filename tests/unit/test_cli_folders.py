"""The folders of running clusters: whose they are, where the cluster can be joined, and when they go."""

from pathlib import Path

import pytest

from deploy import folders, ray_connection, ray_environment
from deploy.errors import ClientError


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(folders, "_PARENT", str(tmp_path))
    return tmp_path


def left_by_a_process_that_ended(parent: Path) -> Path:
    folder = parent / "warmroute-left"
    folder.mkdir()
    (folder / "lock").touch()
    folders.write_address(folder, "127.0.0.1:1")
    return folder


def test_a_cluster_is_found_once_it_can_be_joined() -> None:
    folder = folders.new_folder()
    assert folders.running_addresses() == []
    folders.write_address(folder, "127.0.0.1:6400")
    assert folders.running_addresses() == ["127.0.0.1:6400"]
    assert folders.running_addresses() == ["127.0.0.1:6400"], "looking takes the lock from nobody"


def test_what_an_ended_process_left_is_no_cluster_and_goes_with_the_next_start(parent: Path) -> None:
    left = left_by_a_process_that_ended(parent)
    assert folders.running_addresses() == []
    folder = folders.new_folder()
    assert list(parent.iterdir()) == [folder]
    assert not left.exists()


def test_a_running_cluster_keeps_its_folder() -> None:
    first, second = folders.new_folder(), folders.new_folder()
    assert first.exists()
    assert second.exists()


def test_what_is_no_folder_of_a_cluster_is_passed_over(parent: Path) -> None:
    (parent / "warmroute-file").touch()
    (parent / "warmroute-empty").mkdir()
    (parent / "warmroute-gone").symlink_to(parent / "nowhere")
    assert folders.running_addresses() == []


def test_of_several_clusters_one_has_to_be_named() -> None:
    for address in ("127.0.0.1:6400", "127.0.0.1:6401"):
        folders.write_address(folders.new_folder(), address)
    with pytest.raises(ClientError, match="2 clusters") as caught:
        ray_connection.join_cluster(None)
    assert "127.0.0.1:6400" in str(caught.value)
    assert "127.0.0.1:6401" in str(caught.value)
    assert "--address" in str(caught.value)


def test_without_a_cluster_the_ways_to_name_one_are_said() -> None:
    with pytest.raises(
        ClientError, match=r"no cluster of `warmroute serve` runs on this machine; .*--address.*--redis-url"
    ):
        ray_connection.join_cluster(None)


def test_a_cluster_that_has_ended_is_refused_at_once() -> None:
    with pytest.raises(ClientError, match=r"no Ray cluster answers at 127\.0\.0\.1:1: connection refused"):
        ray_connection.join_cluster("127.0.0.1:1")


@pytest.mark.parametrize(
    ("address", "added"),
    [
        ("127.0.0.1:6400", {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}),
        ("10.0.0.1:6379", {}),
        ("auto", {}),
    ],
)
def test_only_a_cluster_on_loopback_is_joined_as_one(address: str, added: dict[str, str]) -> None:
    environ: dict[str, str] = {}
    ray_environment.prepare_to_join(address, environ)
    assert environ == {"RAY_ENABLE_AUTO_CONNECT": "0", **added}
    chosen = {"RAY_AUTH_MODE": "disabled"}
    ray_environment.prepare_to_join(address, chosen)
    assert chosen["RAY_AUTH_MODE"] == "disabled"
