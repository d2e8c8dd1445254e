"""The yardstick of ``tests.bench overhead``: what a relay costs that only passes bytes.

``python -m tests.bench_relay PORT URL``: aiohttp on both sides, as its documents show it.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
from aiohttp import web

from proxy.engine import free_port

READY = b"ready\n"


async def serve(port: int, url: str) -> None:
    """Pass every POST on, until cancelled."""
    connector = aiohttp.TCPConnector(force_close=True, limit=0)  # the engine ends them anyway
    async with aiohttp.ClientSession(connector=connector) as session:

        async def relay(request: web.Request) -> web.StreamResponse:
            body = await request.read()
            kind = {"Content-Type": request.headers["Content-Type"]}
            async with session.post(url + request.path, data=body, headers=kind) as answer:
                kind = {"Content-Type": answer.content_type}
                response = web.StreamResponse(status=answer.status, headers=kind)
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
            return response

        app = web.Application()
        app.router.add_post("/{path:.*}", relay)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        sys.stdout.buffer.write(READY)
        sys.stdout.buffer.flush()
        await asyncio.Event().wait()


@contextmanager
def relay_before(url: str) -> Iterator[int]:
    """One that runs before ``url``; its port."""
    port = free_port()
    command = [sys.executable, "-m", "tests.bench_relay", str(port), url]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == READY
            yield port
        finally:
            process.terminate()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), sys.argv[2]))
