"""The gateway as a Ray Serve ingress: the one file here that knows Ray.

`Gateway` waits for a replica, builds the application of `app`, and reaches the replicas through a deployment handle,
whose router decides which of them serves a request.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from typing import Any, cast

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from cache_index.messages import GenerationChunk, GenerationRequest, ModelCard, Refusal
from cache_index.settings import IndexSettings

from .. import index_link
from ..errors import NoReplicaError, OverloadedError, ReplicaFaultError, ReplicaLostError
from ..settings import GatewaySettings
from .app import build_api

__all__ = ["Gateway", "ServeReplicaClient"]


@contextlib.contextmanager
def _translated(settings: GatewaySettings) -> Iterator[None]:
    """Translate what a handle may raise into this package's errors."""
    try:
        yield
    except BackPressureError as error:
        retry_after_s = settings.overloaded_retry_after_s
        raise OverloadedError("All replicas are full.", retry_after_s=retry_after_s) from error
    except DeploymentUnavailableError as error:
        raise NoReplicaError("The replicas could not be deployed.") from error
    except RayTaskError as error:
        raise ReplicaFaultError(f"a replica failed: {error}") from error
    except (RayError, RayServeException) as error:
        raise ReplicaLostError("The replica that served the request is gone.") from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # Serve raises this, too, where the replica's side was cancelled while nobody cancelled ours.
        raise ReplicaLostError("The replica broke the request off.") from None


class ServeReplicaClient:
    """The replicas behind one deployment handle; a `ReplicaClient`."""

    def __init__(self, replicas: DeploymentHandle[Any], settings: GatewaySettings) -> None:
        self._settings = settings
        self._describe = replicas.describe
        self._generate = replicas.options(method_name="generate", stream=True)

    async def describe(self) -> ModelCard:
        response = self._describe.remote()
        try:
            with _translated(self._settings):
                card: ModelCard = await response
                return card
        except asyncio.CancelledError:
            response.cancel()  # type: ignore[no-untyped-call]
            raise

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk | Refusal, None]:
        # Positional: the prefix router finds the prompt in the first argument.
        response = cast(DeploymentResponseGenerator[GenerationChunk | Refusal], self._generate.remote(request))
        is_over = False
        try:
            while True:
                with _translated(self._settings):
                    try:
                        item = await anext(response)
                    except StopAsyncIteration:
                        is_over = True
                        return
                yield item
        finally:
            # However this ends: a generation that nobody reads must not go on.
            if not is_over:
                response.cancel()  # type: ignore[no-untyped-call]


@serve.ingress()
class Gateway:
    """The HTTP entry of the cluster. Stateless: any number of them serve one cluster."""

    def __init__(
        self, replicas: DeploymentHandle[Any], settings: GatewaySettings, index: IndexSettings, secret: str
    ) -> None:
        """index: for the router of `replicas`, which Serve makes in this process. secret: see `build_api`."""
        # By way of its module: Ray sends this class by value, and with it a copy of every object that it names.
        index_link.LINK.settings = index
        self._client = ServeReplicaClient(replicas, settings)
        self._settings = settings
        self._secret = secret

    async def __serve_build_asgi_app__(self) -> FastAPI:
        # Serve's own server adds x-request-id to every response.
        return await build_api(self._client, self._settings, self._secret, index_link.LINK, echo_request_id=False)
