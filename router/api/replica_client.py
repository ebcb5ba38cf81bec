"""What the gateway asks of the replicas, whatever carries the question."""

from collections.abc import AsyncGenerator
from typing import Protocol

from cache_index.messages import GenerationChunk, GenerationRequest, ModelCard, Refusal

__all__ = ["ReplicaClient"]


class ReplicaClient(Protocol):
    """The replicas as one: which of them serves a request is decided behind this."""

    async def describe(self) -> ModelCard:
        """What the replicas serve, from any one of them. Waits while none is up.

        Raises a RouterError where it can't be told. Cancelling it takes the question back.
        """
        ...

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk | Refusal, None]:
        """Chunks of one generation, or one refusal, from one replica.

        Closing the generator before its end cancels the generation on the replica and frees what it holds there.
        Raises OverloadedError, NoReplicaError or ReplicaError.
        """
        ...
