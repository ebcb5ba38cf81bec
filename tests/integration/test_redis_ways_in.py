"""The other ways to a Redis: TLS, a Unix socket, and Sentinel with a failover."""

import asyncio
import contextlib
import datetime
import ipaddress
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from pydantic import SecretStr

from cache_index.errors import StoreUnavailableError
from cache_index.redis_store import RedisStore
from cache_index.settings import IndexSettings
from tests.index_examples import TENANT, batch, chain, heartbeat, inventory, stored
from tests.index_stores import next_namespace, plain, snapshot
from tests.redis_servers import RedisServer, redis_server, watched_redis

PATIENCE_S = 30.0


async def use(store: RedisStore) -> None:
    await store.publish_inventory(inventory("r1", 1, stored("a")))
    await store.publish(batch("r1", 2, stored("b")))
    await store.heartbeat(heartbeat("r1", 2, "ab"))
    assert await store.match(TENANT, chain("ab")) == {"r1": 2}
    assert await snapshot(store) == plain([inventory("r1", 2, stored("ab"))])


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that is its own authority, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a Redis under test")])
    now = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "certificate.pem", folder / "key.pem"
    paths[0].write_bytes(built.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return paths


@contextlib.asynccontextmanager
async def tls_in_front_of(redis: RedisServer, certificate_file: Path, key_file: Path) -> AsyncIterator[int]:
    """A port that speaks TLS and passes on to a Redis, for the server at hand is built without TLS."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate_file, key_file)
    lines: set[asyncio.Task[None]] = set()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(65_536):
                writer.write(chunk)
                await writer.drain()
        writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        lines.add(task)
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", redis.port)
        await asyncio.gather(pass_on(reader, inner_writer), pass_on(inner_reader, writer))
        with contextlib.suppress(OSError):
            await asyncio.gather(writer.wait_closed(), inner_writer.wait_closed())

    server = await asyncio.start_server(connect, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]
    await asyncio.gather(*lines)


async def test_tls_with_the_authority_from_the_settings_and_not_without(redis: RedisServer, tmp_path: Path) -> None:
    files = certificate(tmp_path)
    async with tls_in_front_of(redis, *files) as port:
        url = SecretStr(f"rediss://127.0.0.1:{port}")
        trusting = IndexSettings(redis_url=url, redis_ca_file=files[0], namespace=next_namespace(), lease_s=3_600.0)
        store = RedisStore(trusting)
        await use(store)
        await store.close()
        wary = RedisStore(trusting.model_copy(update={"redis_ca_file": None}))
        with pytest.raises(StoreUnavailableError) as caught:
            await wary.describe()
        assert "certificate" in str(caught.value).lower()
        assert "\n" not in str(caught.value)
        await wary.close()


async def test_a_unix_socket(tmp_path: Path) -> None:
    # In a folder of its own, for the path of a socket has to be short.
    path = tmp_path / "s"
    with redis_server(tmp_path, "--unixsocket", str(path)):
        store = RedisStore(IndexSettings(redis_url=SecretStr(f"unix://{path}"), lease_s=3_600.0))
        await use(store)
        await store.close()


async def test_a_master_that_dies_is_replaced_by_the_one_that_sentinel_promotes(tmp_path: Path) -> None:
    with watched_redis(tmp_path) as watched:
        store = RedisStore(IndexSettings(redis_url=watched.secret_url, lease_s=3_600.0, call_timeout_s=1.0))
        await use(store)
        cursor = (await store.read(None, 0.0)).cursor
        watched.master.kill()
        with pytest.raises(StoreUnavailableError):
            await store.publish(batch("r1", 3, stored("c")))
        async with asyncio.timeout(PATIENCE_S):
            seq = 3
            while True:
                seq += 1
                with contextlib.suppress(StoreUnavailableError):
                    await store.publish_inventory(inventory("r1", seq, stored("abc")))
                    break
                await asyncio.sleep(0.1)
        assert await store.match(TENANT, chain("abc")) == {"r1": 3}
        await store.heartbeat(heartbeat("r1", seq, "abc"))
        # What had not reached the promoted one is another history, and what had is the same: either way it is exact.
        news = await store.read(cursor, 0.0)
        assert plain(item for item in news.items if not hasattr(item, "digest"))[-1:] == plain(
            [inventory("r1", seq, stored("abc"))]
        )
        with watched.replica.client() as promoted:
            assert promoted.info("replication")["role"] == "master"
        await store.close()
