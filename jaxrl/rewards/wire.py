"""How the pool and a reward process talk: length-prefixed messages over a socket pair."""

from __future__ import annotations

import socket

HEADER_BYTES = 8


def send_message(channel: socket.socket, payload: bytes) -> None:
    """Write one message. Raises OSError if the other side is gone or does not read."""
    # Two writes: joining them would copy the payload.
    channel.sendall(len(payload).to_bytes(HEADER_BYTES, "big"))
    channel.sendall(payload)


def receive_message(channel: socket.socket) -> bytes | None:
    """Wait for one message; None when the other side has closed."""
    header = _receive_exactly(channel, HEADER_BYTES)
    return None if header is None else _receive_exactly(channel, int.from_bytes(header, "big"))


def _receive_exactly(channel: socket.socket, count: int) -> bytes | None:
    parts, missing = [], count
    while missing:
        part = channel.recv(min(missing, 1 << 20))
        if not part:
            return None
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
