"""The real application on a real port, for whatever `Service` a test makes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeAlias

import pytest
import uvicorn

from outrider_serve.ingress import build_app

Running: TypeAlias = Callable[[Any], AbstractAsyncContextManager[str]]
"""`running(service)`: its application behind a free port; gives the base address."""


@pytest.fixture
def running() -> Running:
    @asynccontextmanager
    async def run(service: Any) -> AsyncIterator[str]:
        config = uvicorn.Config(build_app(service), ws="none", lifespan="off", log_level="critical")
        server = uvicorn.Server(config)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            serving = asyncio.create_task(server.serve([listener]))
            try:
                async with asyncio.timeout(10):
                    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
                        await asyncio.sleep(0.01)
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                server.should_exit = True
                await asyncio.wait_for(serving, 20)

    return run
