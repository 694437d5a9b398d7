"""The drafter replica: one plugin on its own thread, leases by Serve, rounds by the link."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any

from outrider.config import DrafterOptions, ServiceArgs, SpeculativeConfig, parse
from outrider.contracts import Drafter
from outrider.engine.loading import target_info
from outrider.registry import drafter_factory
from outrider.speculation.drafting import DrafterLoop, DraftingStats
from outrider_serve.desk import LeaseDesk, Place, this_place
from outrider_serve.frames import TO_DRAFTER
from outrider_serve.hot_options import HotOptions, Refusal
from outrider_serve.lease import Admitted, Full


@dataclass(frozen=True, slots=True)
class DrafterStats:
    """What one replica says of itself when a router asks."""

    replica: str
    pid: int
    leased: int  # sequences that hold a place, opened or not
    method: str
    refused: Refusal | None  # why the last hot change was not taken
    drafting: DraftingStats


class DrafterReplica:
    """Plain class of the deployment Drafter.

    Until its first `user_config` it drafts by the defaults of `DrafterOptions`.
    """

    def __init__(self, args: ServiceArgs, place: Place | None = None) -> None:
        """Listen; made on the replica's event loop. Raises ConfigError."""
        self._place = place or this_place()
        self._hot = HotOptions(f"Drafter {self._place.replica}")
        self._target = target_info(args.model_copy(update={"device": args.drafter.device}))
        self._config = DrafterOptions().speculative_config
        self._loop = DrafterLoop(
            self._make(self._config),
            lambda proposals: self._desk.deliver(proposals),
            max_batch=args.drafter.max_num_seqs,
        )
        self._desk = LeaseDesk(
            self._place,
            role="drafter",
            capacity=args.drafter.max_num_seqs,
            accepts=TO_DRAFTER,
            submit=self._loop.submit,
            port=args.drafter.port,
        )
        self._loop.start()

    async def lease(self, sequence: str) -> AsyncGenerator[Admitted | Full, None]:
        """See `lease.py`: the first item answers, and the call stays open as long as the sequence."""
        async with contextlib.aclosing(self._desk.lease(sequence)) as answers:
            async for answer in answers:
                yield answer

    async def reconfigure(self, user_config: dict[str, Any] | None) -> None:
        """Swap the plugin where its configuration changed; open sequences stay open. See `hot_options`."""
        with self._hot.change():
            options = parse(DrafterOptions, user_config, where="Drafter.user_config")
            if options.speculative_config != self._config:
                self._loop.swap(await asyncio.to_thread(self._make, options.speculative_config))
                self._config = options.speculative_config

    def check_health(self) -> None:
        """Serve replaces a replica that raises here."""
        if not self._loop.alive:
            raise RuntimeError("the drafter's loop has ended")
        self._hot.serves()

    async def stats(self) -> DrafterStats:
        return DrafterStats(
            self._place.replica,
            os.getpid(),
            self._desk.held,
            self._config.method,
            self._hot.refusal,
            replace(self._loop.stats),
        )

    async def stop(self) -> None:
        """Close the links and end the loop, for a replica that lives in a test."""
        await self._desk.stop()
        self._loop.stop()

    def _make(self, config: SpeculativeConfig) -> Drafter:
        return drafter_factory(config.method)(config, self._target)
