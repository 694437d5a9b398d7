"""Serve's part of a lease, played in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import pytest

from outrider_serve.lease import Admitted, Full


class LocalCall:
    """A lease call as a Serve handle makes it, in this process: it runs ahead of its reader."""

    def __init__(self, items: AsyncGenerator[Admitted | Full, None]) -> None:
        self._items = items
        self._ready: asyncio.Queue[Admitted | Full | None] = asyncio.Queue()
        self._running = asyncio.create_task(self._run())
        self.cancelled = False

    async def _run(self) -> None:
        try:
            async for item in self._items:
                self._ready.put_nowait(item)
        finally:
            self._ready.put_nowait(None)

    def __aiter__(self) -> AsyncIterator[Admitted | Full]:
        return self

    async def __anext__(self) -> Admitted | Full:
        item = await self._ready.get()
        if item is None:
            raise StopAsyncIteration
        return item

    def cancel(self) -> None:
        self.cancelled = True
        self._running.cancel()


@pytest.fixture
def local_call() -> type[LocalCall]:
    return LocalCall
