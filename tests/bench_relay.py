"""Yardsticks of ``tests.bench overhead``: ways to the engine on which nothing is decided.

``python -m tests.bench_relay KIND PORT ENGINE_PORT``; the kinds are

``relay``  aiohttp on both sides, as its documents show it
``lean``   aiohttp before, the proxy's own transport (a connection opened ahead) behind
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import aiohttp
from aiohttp import web

from proxy.backends.transport import Transport
from proxy.engine import free_port

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

READY = b"ready\n"
HOST = "127.0.0.1"
JSON = {"Content-Type": "application/json"}
KINDS = ("relay", "lean")


@asynccontextmanager
async def by_session(port: int) -> AsyncIterator[Handler]:
    """A handler that asks with aiohttp's session."""
    connector = aiohttp.TCPConnector(force_close=True, limit=0)  # the engine ends them anyway
    async with aiohttp.ClientSession(connector=connector) as session:

        async def relay(request: web.Request) -> web.StreamResponse:
            url, body = f"http://{HOST}:{port}{request.path}", await request.read()
            async with session.post(url, data=body, headers=JSON) as answer:
                response = web.StreamResponse(headers={"Content-Type": answer.content_type})
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
            return response

        yield relay


@asynccontextmanager
async def by_transport(port: int) -> AsyncIterator[Handler]:
    """A handler that asks with what the proxy asks with."""
    transport = Transport(
        f"http://{HOST}:{port}", connect_timeout=5, silence_timeout=60, ahead=True
    )

    async def relay(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        async with transport.send("POST", request.path, list(JSON.items()), body) as answer:
            response = web.StreamResponse(headers=answer.headers)
            await response.prepare(request)
            while chunk := await answer.read_some():
                await response.write(chunk)
            await response.write_eof()
        return response

    yield relay
    await transport.close()


async def serve(kind: str, port: int, engine: int) -> None:
    """Pass every POST on, until cancelled."""
    async with by_session(engine) if kind == "relay" else by_transport(engine) as relay:
        app = web.Application()
        app.router.add_post("/{path:.*}", relay)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, HOST, port).start()
        sys.stdout.buffer.write(READY)
        sys.stdout.buffer.flush()
        await asyncio.Event().wait()


@contextmanager
def yardstick(kind: str, engine: int) -> Iterator[int]:
    """One that runs before the engine's port; its own port."""
    port = free_port()
    command = [sys.executable, "-m", "tests.bench_relay", kind, str(port), str(engine)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == READY
            yield port
        finally:
            process.terminate()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
