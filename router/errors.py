"""Errors of the router.

RouterError
├── RequestError                    the client can mend it; `param` names the parameter, if it is one's
│   ├── InvalidRequestError         malformed body, wrong type, unknown or unsupported parameter
│   ├── ContextLengthExceededError  the prompt is longer than the model's context
│   ├── BodyTooLargeError           the body is longer than this gateway reads
│   └── ModelNotFoundError          no such model here
├── OverloadedError                 no room now; `retry_after_s` says when to try again
├── NoReplicaError                  no replica answers at all
├── DeadlineExceededError           a generation took longer than the gateway allows
└── ReplicaError                    a replica failed at a request that another may still serve
    ├── ReplicaLostError            it died, left, or broke the stream off
    └── ReplicaFaultError           it lives, and failed

`router.api.errors` has the one table from these to HTTP.
"""

__all__ = [
    "BodyTooLargeError",
    "ContextLengthExceededError",
    "DeadlineExceededError",
    "InvalidRequestError",
    "ModelNotFoundError",
    "NoReplicaError",
    "OverloadedError",
    "ReplicaError",
    "ReplicaFaultError",
    "ReplicaLostError",
    "RequestError",
    "RouterError",
]


class RouterError(Exception):
    """Base of every error that `router` raises on purpose. Its text is a sentence for whoever sent the request."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class RequestError(RouterError):
    """The request can't be served as it is."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequestError(RequestError):
    """The body, or one parameter in it, is not acceptable."""


class ContextLengthExceededError(RequestError):
    """The prompt has more tokens than the model has positions."""


class BodyTooLargeError(RequestError):
    """The body has more bytes than the gateway reads."""


class ModelNotFoundError(RequestError):
    """The request names a model that is not served here."""

    def __init__(self, model: str) -> None:
        super().__init__(f"The model '{model}' does not exist or you do not have access to it.", param="model")
        self.model = model


class OverloadedError(RouterError):
    """Everything that could serve the request is full."""

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoReplicaError(RouterError):
    """No replica said anything in the time given."""


class DeadlineExceededError(RouterError):
    """The generation was ended because it took too long."""


class ReplicaError(RouterError):
    """One replica failed at this request. Before anything has reached the client, another may be tried."""


class ReplicaLostError(ReplicaError):
    """The replica is gone, or its stream ended before the generation did."""


class ReplicaFaultError(ReplicaError):
    """The replica failed at the request; its own account is for the log, not for the client."""
