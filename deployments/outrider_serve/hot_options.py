"""A deployment's `user_config` while it serves: the one rule for Router, Verifier and Drafter.

A bad configuration before the replica serves is raised, and the replica does not start. A bad later one is
refused, and what is at work stays: raising would make Serve replace the replica and cut its streams.
`/health/ready` names every replica that refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from outrider.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A hot change that a replica did not take."""

    replica: str  # "Verifier k3x9"
    reason: str


class HotOptions:
    """Which of the two a configuration meets: a replica that starts, or one that serves."""

    def __init__(self, replica: str) -> None:
        """`replica` names it to whoever reads the refusal."""
        self.refusal: Refusal | None = None  # of the last change; None when it was taken
        self._replica = replica
        self._serving = False

    def serves(self) -> None:
        """Called with every health check: Serve's first comes right after the first configuration, if any."""
        self._serving = True

    @contextmanager
    def change(self) -> Iterator[None]:
        """Read and apply a configuration inside; what is raised passes at the start only, and is kept later.

        So the block must check everything before it applies anything.
        """
        try:
            yield
        except Exception as error:  # a plugin's constructor may raise anything, and must not end the replica
            if not self._serving:
                raise
            reason = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            self.refusal = Refusal(self._replica, reason)
            logger.exception("%s refused a user_config; the old one stays", self._replica)
        else:
            self._serving, self.refusal = True, None
