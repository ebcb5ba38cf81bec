"""Connections to Redis: one server, one behind Sentinel, or a Cluster.

Every call is bounded, and every error of Redis is translated here, once.
"""

import asyncio
import contextlib
import hashlib
import ssl
from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

import hiredis
import redis.asyncio as redis
from redis import exceptions
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import ConnectionPool
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff

from ..errors import StoreRefusedError, StoreUnavailableError
from ..settings import IndexSettings
from .keys import FORMAT, script

__all__ = ["RedisLink"]

VERSION_MIN = (6, 2)
_PORT_DEFAULT, _SENTINEL_PORT_DEFAULT = 6379, 26379
# Calls at once, hence connections: the follower's, which waits, the publisher's, and lookups, which are short. More of
# them wait for one another, within their time limit.
_CALLS_MAX = 16
# A slot that moves or a node that fails over is asked for again so often within one call.
_CLUSTER_RETRIES = 3


class _UrlError(ValueError):
    """What is wrong with a URL, in words that hold nothing of it: any part may be one of a password with a slash."""


class RedisLink:
    """Connects on first use. What goes wrong is StoreUnavailableError, or StoreRefusedError where it will stay so."""

    def __init__(self, settings: IndexSettings) -> None:
        """Raises StoreRefusedError where the URL, or the file of certificate authorities, can't be read."""
        assert settings.redis_url is not None
        self._settings = settings
        self._shown_url = settings.shown_url
        _check_authorities(settings)
        try:
            self._address = urlsplit(settings.redis_url.get_secret_value())
            self._client = self._new_client()
        except _UrlError as error:
            raise StoreRefusedError(f"the Redis URL {self._shown_url} can't be read: {error}") from error
        except ValueError:
            # What the library says of it may repeat a part of the password.
            raise StoreRefusedError(
                f"the Redis URL {self._shown_url} can't be read; "
                "in user and password, write %40 for @, %3A for :, %2F for /"
            ) from None
        # The server's kind and version, once it was looked at.
        self._description: str | None = None
        self._calls = asyncio.Semaphore(_CALLS_MAX)

    @property
    def is_cluster(self) -> bool:
        return self._address.scheme.endswith("+cluster")

    async def describe(self) -> str:
        """The server's kind and version."""
        async with self.guarded():
            return await self._connected()

    async def run(self, name: str, keys: Sequence[str], *arguments: str | bytes | int) -> Any:
        """Run a script by its name."""
        source = script(name)
        digest = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
        async with self.guarded():
            await self._connected()
            try:
                return await self._client.execute_command("EVALSHA", digest, len(keys), *keys, *arguments)
            except exceptions.NoScriptError:
                # A server that is new, or lost its scripts, learns it by the way.
                return await self._client.execute_command("EVAL", source, len(keys), *keys, *arguments)

    async def command(self, *words: str | bytes | int, wait_s: float = 0.0) -> Any:
        """One command; `wait_s` is what it may wait in the server besides the usual limit."""
        async with self.guarded(wait_s):
            await self._connected()
            return await self._client.execute_command(*words)

    async def commands(self, *commands: Sequence[str | bytes | int]) -> list[Any]:
        """Several commands in one round trip: in one go to one server, side by side to a Cluster."""
        async with self.guarded():
            await self._connected()
            if isinstance(self._client, RedisCluster):
                return await _side_by_side(self._client, commands)
            return await _in_one_go(self._client, commands)

    def check_format(self, found: bytes | None) -> None:
        """Raises StoreRefusedError where a namespace was written in another format than ours."""
        if found is not None and found.decode() != FORMAT:
            raise self._of_format(found.decode())

    async def close(self) -> None:
        """Close all connections."""
        clients = [self._client]
        if not isinstance(self._client, RedisCluster) and isinstance(
            pool := self._client.connection_pool, SentinelConnectionPool
        ):
            # Those to the Sentinels are not the pool's, which would leave them open.
            clients += pool.sentinel_manager.sentinels
        for client in clients:
            with contextlib.suppress(exceptions.RedisError, OSError):
                await client.aclose()

    @contextlib.asynccontextmanager
    async def guarded(self, wait_s: float = 0.0) -> AsyncIterator[None]:
        """Bound what happens inside, and translate what is raised there."""
        timeout_s = self._settings.call_timeout_s
        where = f"Redis at {self._shown_url}"
        try:
            async with asyncio.timeout(timeout_s + wait_s), self._calls:
                yield
        except (TimeoutError, exceptions.TimeoutError) as error:
            raise StoreUnavailableError(f"{where} did not answer within {timeout_s:g} s") from error
        except (exceptions.AuthenticationError, exceptions.AuthenticationWrongNumberOfArgsError) as error:
            raise StoreRefusedError(f"{where} refuses the user or password: {_one_line(error)}") from error
        except exceptions.NoPermissionError as error:
            raise StoreRefusedError(f"{where} lets this user do too little: {_one_line(error)}") from error
        except (exceptions.InvalidResponse, UnicodeDecodeError) as error:
            raise StoreRefusedError(f"what listens at {self._shown_url} does not speak Redis's protocol") from error
        except exceptions.ResponseError as error:
            raise self._of_response(str(error)) from error
        except MasterNotFoundError as error:
            # What the library says of Sentinels that it did not reach is Python's form of its own objects.
            reason = "can't be reached" if " : " in str(error) else "know of no master of this name"
            raise StoreUnavailableError(f"the Sentinels of {self._shown_url} {reason}") from error
        # The base of a Cluster's errors is none of the library's others.
        except (exceptions.RedisError, exceptions.RedisClusterException, OSError) as error:
            if "Cluster mode is not enabled" in str(error):
                raise StoreRefusedError(f"{where} is no Cluster; give redis:// instead") from error
            # By its text, for the library keeps the error itself in some ways in and not in others.
            _, is_untrusted, reason = _one_line(error).partition("certificate verify failed: ")
            if is_untrusted:
                raise StoreRefusedError(f"{where} shows a certificate that is not trusted: {reason}") from error
            raise StoreUnavailableError(f"{where} can't be reached: {_one_line(error)}") from error

    async def _connected(self) -> str:
        if self._description is None:
            if isinstance(self._client, RedisCluster):
                await self._client.initialize()
                facts = await self._client.info("server", target_nodes=RedisCluster.RANDOM)
            else:
                facts = await self._client.info("server")
            self._description = self._checked(facts)
        return self._description

    def _checked(self, facts: dict[str, Any]) -> str:
        version = str(facts.get("redis_version", "unknown"))
        mode = str(facts.get("redis_mode", "standalone"))
        try:
            numbers = tuple(int(part) for part in version.split(".")[:2])
        except ValueError:
            numbers = ()
        if numbers < VERSION_MIN:
            wanted = ".".join(map(str, VERSION_MIN))
            raise StoreRefusedError(f"Redis at {self._shown_url} is version {version}, and {wanted} or newer is needed")
        if mode == "sentinel":
            raise StoreRefusedError(
                f"Redis at {self._shown_url} runs as sentinel; give redis+sentinel://, with the master's name"
            )
        if (mode == "cluster") != self.is_cluster:
            raise StoreRefusedError(
                f"Redis at {self._shown_url} runs as {mode}; "
                + ("give redis+cluster://, with some of its nodes" if mode == "cluster" else "give redis:// instead")
            )
        return f"Redis {version}, {mode}"

    def _of_response(self, text: str) -> StoreUnavailableError:
        where = f"Redis at {self._shown_url}"
        if "WARMROUTEFORMAT" in text:
            return self._of_format(text.rpartition("WARMROUTEFORMAT ")[2].split()[0])
        # What a script may not do is no error of its own kind: Redis 6 words it so, and 7 as an ACL failure.
        if "The user executing the script" in text or "ACL failure" in text:
            return StoreRefusedError(f"{where} lets this user do too little: {text}")
        if "command not allowed when used memory" in text:
            return StoreUnavailableError(f"{where} is out of memory (its maxmemory)")
        if "DB index is out of range" in text:
            return StoreRefusedError(f"{where} has no database of this number")
        if "unknown command `SENTINEL`" in text or "unknown command 'SENTINEL'" in text:
            return StoreRefusedError(f"{where} is no Sentinel; give redis:// instead")
        if "unknown command" in text.lower():
            return StoreRefusedError(f"{where} lacks a command that the index needs: {text}")
        return StoreUnavailableError(f"{where} failed: {text}")

    def _of_format(self, found: str) -> StoreRefusedError:
        return StoreRefusedError(
            f"Redis at {self._shown_url} holds an index in namespace {self._settings.namespace} that another major "
            f"version of warmroute wrote (format {found}, and this one writes {FORMAT}): choose another namespace"
        )

    def _new_client(self) -> redis.Redis | RedisCluster:
        address, options = self._address, self._options()
        scheme, _, kind = address.scheme.partition("+")
        # A host and a port would be read from what is a user and the digits that a password begins with.
        if address.fragment or (scheme != "unix" and "@" in address.path):
            raise _UrlError("in user and password, write %40 for @, %3A for :, %2F for /, %23 for #")
        if kind == "cluster":
            if _database(address.path.strip("/")):
                raise _UrlError("a Cluster has no databases but 0")
            nodes = [ClusterNode(host, port) for host, port in _hosts(address, _PORT_DEFAULT)]
            retry = Retry(NoBackoff(), _CLUSTER_RETRIES)
            # Each of the calls may be several commands to one node.
            return RedisCluster(startup_nodes=nodes, max_connections=_CALLS_MAX**2, **{**options, "retry": retry})
        if kind == "sentinel":
            name, _, database = address.path.strip("/").partition("/")
            if not name:
                raise _UrlError("it must name the master, as in redis+sentinel://host:26379/mymaster")
            password = self._settings.redis_sentinel_password
            sentinel = Sentinel(  # type: ignore[no-untyped-call]
                _hosts(address, _SENTINEL_PORT_DEFAULT),
                sentinel_kwargs={
                    **{key: value for key, value in options.items() if key not in ("username", "password")},
                    "password": password.get_secret_value() if password else None,
                },
                db=_database(database),
                **options,
            )
            options = {**sentinel.connection_kwargs, "max_connections": _CALLS_MAX}
            pool = SentinelConnectionPool(name, sentinel, **options)  # type: ignore[no-untyped-call]
            return redis.Redis.from_pool(pool)
        if scheme != "unix":
            _database(address.path.strip("/"))  # What is no number the library would take for 0.
        # The library takes the URL apart; user and password are among the options already.
        host = address.netloc.rpartition("@")[2]
        url = address._replace(netloc=host).geturl()
        return redis.Redis.from_pool(ConnectionPool.from_url(url, max_connections=_CALLS_MAX, **options))

    def _options(self) -> dict[str, Any]:
        address, settings = self._address, self._settings
        password = settings.redis_password.get_secret_value() if settings.redis_password else None
        options: dict[str, Any] = {
            "username": unquote(address.username) if address.username else settings.redis_username,
            "password": unquote(address.password) if address.password else password,
            "socket_connect_timeout": settings.call_timeout_s,
            # A call's own limit is around it, and a read that waits for news may take longer than one.
            "socket_timeout": None,
            # What was sent may have been done. Trying again is the caller's choice, who knows whether it matters.
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
        }
        if address.scheme.startswith("rediss") and settings.redis_ca_file is not None:
            options["ssl_ca_certs"] = str(settings.redis_ca_file)
        if address.scheme.startswith("rediss+"):
            options["ssl"] = True
        return options


async def _side_by_side(client: RedisCluster, commands: Sequence[Sequence[str | bytes | int]]) -> list[Any]:
    """Send commands to their nodes, some at once, for each takes a connection. Raises the first error among them."""
    answers: list[Any] = []
    for first in range(0, len(commands), _CALLS_MAX):
        part = commands[first : first + _CALLS_MAX]
        answers += await asyncio.gather(*(client.execute_command(*words) for words in part))
    return answers


def _packed(words: Sequence[str | bytes | int]) -> bytes:
    # The library's stub has a tuple of one for what takes any number.
    packed: bytes = hiredis.pack_command(tuple(words))  # type: ignore[arg-type]
    return packed


async def _in_one_go(client: redis.Redis, commands: Sequence[Sequence[str | bytes | int]]) -> list[Any]:
    """Send all commands, then read all answers. Raises the first error among them.

    The library's own pipeline does this too; but it packs a command in Python, which for the 65 words of a chain takes
    longer than the whole round trip (benchmarks/index.py), and hiredis packs it in C.
    """
    connection = await client.connection_pool.get_connection()  # type: ignore[no-untyped-call]
    answers: list[Any] = []
    try:
        await connection.send_packed_command([_packed(words) for words in commands])
        for _ in commands:
            try:
                answers.append(await connection.read_response())
            except exceptions.ResponseError as error:
                answers.append(error)  # The other answers are on their way and have to be read.
    except BaseException:
        # Somebody else's question must not meet an answer to one of these.
        await connection.disconnect(nowait=True)
        raise
    finally:
        await client.connection_pool.release(connection)
    for answer in answers:
        if isinstance(answer, exceptions.ResponseError):
            raise answer
    return answers


def _hosts(address: SplitResult, port_default: int) -> list[tuple[str, int]]:
    hosts = []
    for part in address.netloc.rpartition("@")[2].split(","):
        one = urlsplit(f"//{part}")
        if not one.hostname:
            raise _UrlError("one of its hosts has no name")
        hosts.append((one.hostname, one.port or port_default))
    return hosts


def _database(text: str) -> int:
    if text and not text.isdigit():
        raise _UrlError("what follows its last slash is no database number")
    return int(text or 0)


def _check_authorities(settings: IndexSettings) -> None:
    # Now, for else each call would say only that the server can't be reached.
    if settings.redis_ca_file is None:
        return
    try:
        ssl.create_default_context(cafile=settings.redis_ca_file)
    except OSError as error:
        reason = "no certificate is in it" if isinstance(error, ssl.SSLError) else error.strerror
        raise StoreRefusedError(
            f"Redis at {settings.shown_url}: the certificate authorities in {settings.redis_ca_file} can't be read: "
            f"{reason}"
        ) from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
