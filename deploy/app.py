"""The Serve application: gateways in front of replicas, and the router between them.

serve run deploy.app:build model=Qwen/Qwen3-0.6B num_replicas=2
import_path: deploy.app:build        (in a Serve config file; `args` are the keys of AppSettings)
"""

import secrets

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from replicas.replica import ReplicaDeployment
from router.api.gateway import Gateway

from .errors import SettingsError
from .index_check import refuse_wrong_index
from .settings import AppSettings, app_settings

__all__ = ["application", "build"]

PREFIX_ROUTER = "router.routing.prefix_router:PrefixRouter"

# Scheduling weights, not limits: small, so that a cluster fits on two cores. What bounds torch is num_threads.
_REPLICA_CPUS = 0.2
_GATEWAY_CPUS = 0.1
# A replica and a gateway refuse what is too much themselves, with a reason. Serve's own bound lies this far above
# theirs, so that it is never the first to bite, and questions about health always pass.
_ONGOING_MARGIN = 64


def build(args: AppSettings) -> serve.Application:
    """The application from the `args` of `serve run` or of a Serve config file, over `WARMROUTE_*` variables.

    Raises SettingsError.
    """
    settings = app_settings(args)
    refuse_wrong_index(settings.index)
    return application(settings)


def application(settings: AppSettings) -> serve.Application:
    """The application, wired. Needs a connection to the Ray cluster that will run it. Raises SettingsError."""
    engine = settings.engine
    if engine.num_threads is None:
        engine = engine.model_copy(update={"num_threads": _threads_per_replica(settings.num_replicas)})
    replicas = serve.deployment(
        name="Replica",
        num_replicas=settings.num_replicas,
        max_ongoing_requests=engine.max_num_seqs + engine.max_num_waiting + _ONGOING_MARGIN,
        ray_actor_options={"num_cpus": _REPLICA_CPUS, "num_gpus": _gpus_per_replica(settings)},
        request_router_config=RequestRouterConfig(
            request_router_class=PREFIX_ROUTER,  # type: ignore[arg-type]  # mypy takes Union[str, Callable] for a dict.
            # Serve keeps them as JSON, and shows them: the index's settings, with a password, go to the gateway.
            request_router_kwargs={"settings": settings.routing.model_dump(mode="json")},
        ),
    )(ReplicaDeployment)
    gateways = serve.deployment(
        name="Gateway",
        num_replicas=settings.num_gateways,
        max_ongoing_requests=settings.gateway.streams_max + _ONGOING_MARGIN,
        ray_actor_options={"num_cpus": _GATEWAY_CPUS},
    )(Gateway)
    # One secret for all gateways of this application: it makes their scopes the same.
    secret = settings.secret.get_secret_value() if settings.secret else secrets.token_hex(32)
    copies = replicas.bind(settings.model_settings(), engine, settings.index)
    return gateways.bind(copies, settings.gateway, settings.index, secret)


def _cluster_resources() -> dict[str, float]:
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return resources


def _threads_per_replica(num_replicas: int) -> int:
    """An equal share of the cluster's CPUs. Where replicas have machines of their own, set engine.num_threads."""
    return max(1, int(_cluster_resources().get("CPU", 1)) // num_replicas)


def _gpus_per_replica(settings: AppSettings) -> int:
    """One GPU each, or none. Raises SettingsError where `auto` finds some, and too few."""
    if settings.device != "auto":
        return int(settings.device == "cuda")
    num_gpus = int(_cluster_resources().get("GPU", 0))
    if 0 < num_gpus < settings.num_replicas:
        raise SettingsError(
            f"{settings.num_replicas} replicas take a GPU each and the cluster has {num_gpus}: "
            "ask for fewer replicas, or name the device",
            key="num_replicas",
        )
    return int(num_gpus > 0)
