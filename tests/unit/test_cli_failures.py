"""Reading a replica's failure out of what Ray Serve says of it."""

import pytest
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, DeploymentStatusOverview

from deploy.failures import first_failure, reason

# As Ray Serve 2.60 words it; the paths are shortened.
RETRYING = """\
A replica failed to start with exception. Retrying 5 more time(s). Error:
\x1b[36mray::ServeReplica:warmroute:Replica.initialize_and_get_metadata()\x1b[39m (pid=1, ip=127.0.0.1)
  File "replica.py", line 1, in initialize
    raise RuntimeError(traceback.format_exc()) from None
RuntimeError: Traceback (most recent call last):
  File "replicas/model.py", line 7, in load
    raise ModelNotFoundError(path)
replicas.errors.ModelNotFoundError: there is no model at gtp2; name a hub id, a folder or a GGUF file

The above is all."""


def overview(
    *, message: str = "", status: str = "UPDATING", app_status: str = "DEPLOYING", app_message: str = ""
) -> ApplicationStatusOverview:
    deployment = DeploymentStatusOverview(
        status=status, status_trigger="CONFIG_UPDATE_STARTED", replica_states={}, message=message
    )
    return ApplicationStatusOverview(
        status=ApplicationStatus(app_status),
        message=app_message,
        last_deployed_time_s=0.0,
        deployments={"Replica": deployment},
    )


def test_the_innermost_exception_is_the_reason() -> None:
    assert reason(RETRYING) == "there is no model at gtp2; name a hub id, a folder or a GGUF file"


def test_a_message_without_an_exception_gives_its_last_line() -> None:
    assert reason("Deploying failed.\nNo node has a GPU.\n\n") == "No node has a GPU."
    assert reason(" \n") == "Ray Serve gives no reason"


def test_a_replica_that_failed_once_is_a_failure_though_serve_would_retry() -> None:
    failure = first_failure(overview(message=RETRYING))
    assert failure == "Replica can't start: there is no model at gtp2; name a hub id, a folder or a GGUF file"


@pytest.mark.parametrize("status", ["DEPLOY_FAILED", "UNHEALTHY"])
def test_a_failed_deployment_is_a_failure(status: str) -> None:
    assert first_failure(overview(status=status, message="ValueError: too big")) == "Replica can't start: too big"


def test_a_failed_application_is_a_failure() -> None:
    failure = first_failure(overview(app_status="DEPLOY_FAILED", app_message="ImportError: no module named deploy"))
    assert failure == "the application can't start: no module named deploy"


def test_what_still_starts_is_no_failure() -> None:
    assert first_failure(overview(message="Waiting for the replicas to start.")) is None
