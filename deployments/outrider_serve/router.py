"""The router replica: HTTP in, a coordinator over the pools of verifiers and drafters, hot options."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from outrider.config import RouterOptions, ServiceArgs, SpeculativeConfig, parse
from outrider.contracts import Drafter
from outrider.coordinator import Coordinator
from outrider.engine.loading import target_info
from outrider.errors import ConfigError
from outrider.registry import drafter_factory, needs_device
from outrider.text import Tokenizer
from outrider_serve.desk import Place, this_place
from outrider_serve.drafter import DrafterStats
from outrider_serve.hot_options import HotOptions, Refusal
from outrider_serve.ingress import Readiness, build_app
from outrider_serve.lease import ServeDrafterPool, ServeVerifierPool, lease_caller
from outrider_serve.telemetry import Snapshot, Telemetry, verifier_snapshot
from outrider_serve.verifier import VerifierStats

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 2.0
"""How long replicas have to answer what they are asked for a health check or a scrape."""
READINESS_AGE_S = 1.0
"""Health checks within this time get the same answer, so that probes cost the workers nothing."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RouterSnapshot:
    """A router's metrics, for the router that was scraped."""

    replica: str
    metrics: Snapshot


class RouterReplica:
    """Plain class of the ingress deployment Router; the `Service` behind the HTTP routes."""

    def __init__(
        self,
        args: ServiceArgs,
        verifiers: DeploymentHandle,
        drafters: DeploymentHandle | None,
        place: Place | None = None,
    ) -> None:
        """Reads the tokenizer and no weights. Raises ConfigError."""
        self._args = args
        self._place = place or this_place()
        self._hot = HotOptions(f"Router {self._place.replica}")
        # A router has no device of its own, but a drafter in its process may be given one.
        self._target = target_info(args.model_copy(update={"device": args.drafter.device}))
        self._verifier_handle, self._drafter_handle = verifiers, drafters
        options = RouterOptions()
        self._check(options)
        router, limits = self._place.replica, options.limits
        self._verifiers = ServeVerifierPool(lease_caller(verifiers), router=router, limits=limits)
        self._drafters = (
            ServeDrafterPool(lease_caller(drafters), router=router, limits=limits) if drafters else None
        )
        self._readiness: tuple[float, Readiness] | None = None
        self.created = int(time.time())
        self.tokenizer = Tokenizer(self._target.model)
        self.telemetry = Telemetry(args.model_name, engine=router)
        self.coordinator = Coordinator(
            target=self._target,
            tokenizer=self.tokenizer,
            verifiers=self._verifiers,
            drafters=self._drafters,
            drafter=None,
            options=options,
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve calls this once the replica is made; every HTTP request goes to what it returns."""
        return build_app(self)

    @property
    def model_name(self) -> str:
        return self._args.model_name

    @property
    def max_model_len(self) -> int:
        return self._target.max_model_len

    @property
    def options(self) -> RouterOptions:
        return self.coordinator.options

    # ---- options

    async def reconfigure(self, user_config: dict[str, Any] | None) -> None:
        """Apply new options to the requests that start from now on; streams under way keep theirs.

        What becomes of a bad one: see `hot_options`.
        """
        with self._hot.change():
            options = parse(RouterOptions, user_config, where="Router.user_config")
            self._check(options)
            drafter = await self._drafter_for(options.speculative_config)
            self._verifiers.limits = options.limits
            if self._drafters is not None:
                self._drafters.limits = options.limits
            self.coordinator.drafter = drafter
            self.coordinator.reconfigure(options)
        self._readiness = None

    def check_health(self) -> None:
        """Serve replaces a replica that raises here; a router has nothing that could end unseen."""
        self._hot.serves()

    def _check(self, options: RouterOptions) -> None:
        sequences = self._args.verifier.num_replicas * self._args.max_num_seqs
        self._args.router.check(options.limits, sequences=sequences)

    async def _drafter_for(self, config: SpeculativeConfig | None) -> Drafter | None:
        """The drafter of this process; None where drafters have a deployment, or nobody drafts."""
        if config is None:
            return None
        factory = drafter_factory(config.method)
        if self._drafters is not None:
            return None
        if config == self.options.speculative_config:
            return self.coordinator.drafter
        if self._args.drafter.placement == "auto" and needs_device(config.method):
            raise ConfigError(
                f"speculative_config.method {config.method!r} wants a device of its own: set "
                "drafter.placement: actor in args (or inprocess, to run it in the routers all the same)"
            )
        return await asyncio.to_thread(factory, config, self._target)

    # ---- health and metrics, of all replicas and not just of the one that was hit

    async def ready(self) -> Readiness:
        """Ready when a verifier answers; speculation is active when somebody drafts too."""
        now = time.monotonic()
        if self._readiness is None or now - self._readiness[0] > READINESS_AGE_S:
            self._readiness = (now, await self._ask_readiness())
        return self._readiness[1]

    async def snapshots(self) -> list[Snapshot]:
        """Metrics of this router, and of the other routers and the verifiers that answer in time.

        Of those that are late nothing is shown, rather than what they last said here: another router may
        have shown more since, and a counter that falls reads as a restart.
        """
        routers, verifiers = await asyncio.gather(
            ask_all(_routers(), "snapshot", RouterSnapshot),
            ask_all(self._verifier_handle, "stats", VerifierStats),
        )
        peers = [router.metrics for router in routers if router.replica != self._place.replica]
        engines = {verifier.replica: verifier.engine for verifier in verifiers}
        return [self.telemetry.snapshot(), *peers, verifier_snapshot(self.model_name, engines)]

    async def snapshot(self) -> RouterSnapshot:
        """What this router counted; asked by its peers."""
        return RouterSnapshot(self._place.replica, self.telemetry.snapshot())

    async def refusal(self) -> Refusal | None:
        """The hot change that this router did not take; asked by its peers."""
        return self._hot.refusal

    async def _ask_readiness(self) -> Readiness:
        verifiers, drafters, routers = await asyncio.gather(
            ask_all(self._verifier_handle, "stats", VerifierStats),
            self._ask_drafters(),
            ask_all(_routers(), "refusal", Refusal),
        )
        refusals = {self._hot.refusal, *routers, *(one.refused for one in verifiers)}
        refusals |= {one.refused for one in drafters}
        reason = None if verifiers else "no verifier answers"
        idle = self._why_no_drafts(drafters)
        return Readiness(
            ready=bool(verifiers),
            reason=reason,
            speculation_active=reason is None and idle is None,
            speculation_reason=idle or reason,
            numerics=_numerics(verifiers),
            refusals=tuple(sorted((one for one in refusals if one is not None), key=lambda one: one.replica)),
        )

    async def _ask_drafters(self) -> list[DrafterStats]:
        if self._drafter_handle is None:
            return []
        return await ask_all(self._drafter_handle, "stats", DrafterStats)

    def _why_no_drafts(self, drafters: list[DrafterStats]) -> str | None:
        config = self.options.speculative_config
        if config is None:
            return "no speculative_config is set"
        if config.num_speculative_tokens == 0:
            return "num_speculative_tokens is 0"
        if self._drafters is not None and not drafters:
            return "no drafter answers"
        return None


def _numerics(verifiers: list[VerifierStats]) -> str | None:
    """What a client may rely on, whichever verifier it gets; None where none answers."""
    return min((one.numerics for one in verifiers), default=None)  # "fast" comes before "strict"


def _routers() -> DeploymentHandle:
    """All routers of this application, this one included."""
    return serve.get_deployment_handle("Router", serve.get_replica_context().app_name)


async def ask_all(handle: DeploymentHandle, method: str, answer: type[T]) -> list[T]:
    """What every replica of a deployment answers to a method; of none where the deployment is not up.

    All have `ASK_TIMEOUT_S`; a replica that fails is left out, one that hangs costs all answers.
    """
    try:
        answers = await handle.broadcast(method).results_async(
            timeout_s=ASK_TIMEOUT_S, return_exceptions=True
        )
    except (TimeoutError, RayError, RayServeException) as error:
        logger.info("%s was not answered: %s", method, error or "timed out")
        return []
    return [one for one in answers if isinstance(one, answer)]
