"""The verifier replica: an engine on its own thread, leases by Serve, rounds by the link."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from outrider.config import ServiceArgs, VerifierOptions, parse
from outrider.engine.engine import EngineStats
from outrider.engine.loading import load_engine
from outrider.engine.loop import VerifierLoop
from outrider_serve.desk import LeaseDesk, Place, this_place
from outrider_serve.frames import TO_VERIFIER
from outrider_serve.hot_options import HotOptions, Refusal
from outrider_serve.lease import Admitted, Full


@dataclass(frozen=True, slots=True)
class VerifierStats:
    """What one replica says of itself when a router asks."""

    replica: str
    pid: int
    leased: int  # sequences that hold a place, opened or not
    refused: Refusal | None  # why the last hot change was not taken
    numerics: str  # strict or fast: what `numerics: auto` came to
    engine: EngineStats


class VerifierReplica:
    """Plain class of the deployment Verifier."""

    def __init__(self, args: ServiceArgs, place: Place | None = None) -> None:
        """Load the model and listen; made on the replica's event loop. Raises ConfigError."""
        self._place = place or this_place()
        self._hot = HotOptions(f"Verifier {self._place.replica}")
        engine = load_engine(args)
        self._numerics: str = getattr(engine.model, "numerics", "fast")
        self._loop = VerifierLoop(engine, lambda events: self._desk.deliver(events))
        self._desk = LeaseDesk(
            self._place,
            role="verifier",
            capacity=args.max_num_seqs,
            accepts=TO_VERIFIER,
            submit=self._loop.submit,
            port=args.verifier.port,
        )
        self._loop.start()

    async def lease(self, sequence: str) -> AsyncGenerator[Admitted | Full, None]:
        """See `lease.py`: the first item answers, and the call stays open as long as the sequence."""
        async with contextlib.aclosing(self._desk.lease(sequence)) as answers:
            async for answer in answers:
                yield answer

    def reconfigure(self, user_config: dict[str, Any] | None) -> None:
        """Nothing is hot here yet; a key that is not known is a bad configuration, see `hot_options`."""
        with self._hot.change():
            parse(VerifierOptions, user_config, where="Verifier.user_config")

    def check_health(self) -> None:
        """Serve replaces a replica that raises here."""
        if not self._loop.alive:
            raise RuntimeError("the verifier's loop has ended")
        self._hot.serves()

    async def stats(self) -> VerifierStats:
        return VerifierStats(
            self._place.replica,
            os.getpid(),
            self._desk.held,
            self._hot.refusal,
            self._numerics,
            self._loop.stats,
        )

    async def stop(self) -> None:
        """Close the links and end the loop, for a replica that lives in a test."""
        await self._desk.stop()
        self._loop.stop()
