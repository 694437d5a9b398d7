"""The application: three plain classes become deployments; only this file knows `@serve.deployment`.

`import_path: outrider_serve.app:build`. No `from __future__ import annotations` here: Serve reads the
builder's annotation and hands a plain dict to a builder whose annotation is a string.
"""

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import BackpressureConfig

from outrider.config import ReplicaArgs, ServiceArgs
from outrider_serve.desk import LEASES_PER_PLACE
from outrider_serve.drafter import DrafterReplica
from outrider_serve.router import RouterReplica
from outrider_serve.verifier import VerifierReplica


def build(args: ServiceArgs) -> Application:
    """The deployments of one service. Their `user_config` comes from the service's file."""
    verifiers = serve.deployment(
        name="Verifier",
        max_ongoing_requests=LEASES_PER_PLACE * args.max_num_seqs,
        **_common(args, args.verifier),
    )(VerifierReplica).bind(args)
    drafters = None
    if args.drafter.placement == "actor":
        drafters = serve.deployment(
            name="Drafter",
            max_ongoing_requests=LEASES_PER_PLACE * args.drafter.max_num_seqs,
            **_common(args, args.drafter),
        )(DrafterReplica).bind(args)
    # The ASGI application is built by each replica, over its own coordinator: `__serve_build_asgi_app__`.
    router = serve.ingress()(RouterReplica)
    return serve.deployment(
        name="Router",
        max_ongoing_requests=args.router.max_ongoing_requests,
        # The queue that acts is the router's own, inside the limit above. What does not even find a place
        # in a router waits in the HTTP proxy, bounded too; a burst is there for a moment while it is routed.
        max_queued_requests=args.router.max_ongoing_requests,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1.0),
        **_common(args, args.router),
    )(router).bind(args, verifiers, drafters)


def _common(args: ServiceArgs, pool: ReplicaArgs) -> dict[str, Any]:
    return {
        "num_replicas": pool.num_replicas,
        "ray_actor_options": {"num_cpus": pool.num_cpus, "num_gpus": pool.num_gpus},
        "graceful_shutdown_timeout_s": args.router.graceful_shutdown_timeout_s,
        "health_check_period_s": 5.0,
        "health_check_timeout_s": 30.0,
    }
