"""Several completions at once, in the order in which their pieces come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from jaxrl.serving.generation import Piece


async def merged(
    streams: Sequence[AsyncIterator[Piece]],
) -> AsyncIterator[tuple[int, Piece]]:
    """(index of the stream, its piece). The first error ends them all, and so does closing this."""
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as pieces:
            async for piece in pieces:
                yield 0, piece
        return
    arrived: asyncio.Queue[tuple[int, Piece | Exception | None]] = asyncio.Queue()
    # In this order, so that equal prompts arrive at the driver side by side.
    tasks = [
        asyncio.create_task(_pump(index, pieces, arrived)) for index, pieces in enumerate(streams)
    ]
    try:
        running = len(tasks)
        while running:
            index, piece = await arrived.get()
            if piece is None:
                running -= 1
            elif isinstance(piece, Exception):
                raise piece
            else:
                yield index, piece
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    index: int,
    stream: AsyncIterator[Piece],
    arrived: asyncio.Queue[tuple[int, Piece | Exception | None]],
) -> None:
    try:
        async with contextlib.aclosing(stream) as pieces:
            async for piece in pieces:
                arrived.put_nowait((index, piece))
    except Exception as error:
        arrived.put_nowait((index, error))
    else:
        arrived.put_nowait((index, None))
