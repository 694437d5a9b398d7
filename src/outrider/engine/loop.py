"""The verifier's clock: a thread that takes messages, steps the engine, and hands out what it says."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from outrider.engine.engine import Engine, EngineStats, Event
from outrider.messages import ToVerifier

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 1.0  # a bound, not a poll: submit() wakes the thread at once


class VerifierLoop:
    """Runs one engine. Running sequences need no caller: without orders they decode at K = 0."""

    def __init__(self, engine: Engine, deliver: Callable[[Sequence[Event]], None]) -> None:
        """`deliver` is called on the loop's thread, once a step; it must not block."""
        self._engine = engine
        self._deliver = deliver
        self._inbox: deque[ToVerifier] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="verifier-loop", daemon=True)
        self._stats = engine.stats()

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 10.0) -> None:
        """End after the current step; waits at most `timeout` seconds for it."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def stats(self) -> EngineStats:
        """As of the last step."""
        return self._stats

    def submit(self, messages: Sequence[ToVerifier]) -> None:
        """Queue messages, in order; callable from any thread."""
        with self._wake:
            self._inbox.extend(messages)
            self._wake.notify()

    def _run(self) -> None:
        while self._take_messages():
            if not self._engine.busy:
                continue
            try:
                events = self._engine.step()
            except Exception as error:  # whatever broke the model must not hang its callers
                logger.exception("a verifier step failed; its sequences end with an error")
                events = self._engine.fail_all(f"the verifier's step failed: {type(error).__name__}")
            self._stats = self._engine.stats()
            if events:
                self._deliver(events)

    def _take_messages(self) -> bool:
        """Hand the inbox to the engine, then wait while idle or gated. False when stopping."""
        while not self._stopping:
            with self._wake:
                messages, self._inbox = self._inbox, deque()
            answers = [event for message in messages for event in self._engine.receive(message)]
            if messages:
                self._stats = self._engine.stats()
            if answers:
                self._deliver(answers)
            wait = self._engine.gate(time.monotonic()) if self._engine.busy else IDLE_WAIT_S
            if wait <= 0:
                return True
            with self._wake:
                if not self._inbox and not self._stopping:
                    self._wake.wait(wait)
        return False
