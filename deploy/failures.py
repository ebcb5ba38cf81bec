"""Reads from Ray Serve's status why an application does not come up.

Serve keeps a failing replica's exception only as text: a traceback inside a message. Its last exception line says why.
"""

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray.serve.schema import ApplicationStatusOverview

__all__ = ["first_failure", "reason"]

# "replicas.errors.ModelError: text" at the start of a line, as the end of a traceback has it.
_EXCEPTION_LINE = re.compile(r"^(?P<name>(?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt)): (?P<text>.+)$", re.MULTILINE)
_FAILED = ("DEPLOY_FAILED", "UNHEALTHY")
_STARTUP_FAILED = "A replica failed to start"


def first_failure(app: "ApplicationStatusOverview") -> str | None:
    """One sentence on why `app` can't start, or None while it may still come up.

    A replica's first failure counts: what stops one copy of a model (its files, its size) stops the others too, and
    Serve's own retries would repeat a slow load of weights three times per replica before they say so.
    """
    for name, deployment in app.deployments.items():
        if deployment.status in _FAILED or deployment.message.startswith(_STARTUP_FAILED):
            return f"{name} can't start: {reason(deployment.message)}"
    if app.status in _FAILED:
        return f"the application can't start: {reason(app.message)}"
    return None


def reason(message: str) -> str:
    """The last exception's text in `message`, or its last line where it holds none."""
    found = list(_EXCEPTION_LINE.finditer(message))
    if found:
        return found[-1]["text"].strip()
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1] if lines else "Ray Serve gives no reason"
