"""RankLink: frames between the leading rank and one other, over a connected socket. Knows nothing of what they mean."""

from __future__ import annotations

import socket
from contextlib import suppress

_LENGTH_BYTES = 4
# As long as a rank may be in a pass, which it reads no orders in.
SEND_TIMEOUT_S = 120.0
# A descriptor travels with at least one byte.
_DESCRIPTOR = b"d"
MAX_FRAME_BYTES = 1 << 30


class RankLost(RuntimeError):
    """The other rank is gone, or did not answer in time; names it."""


class RankLink:
    """Owns the socket. For one thread at a time, except for `close`."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        """`name`: the rank at the other end, for messages."""
        self._connection = connection
        self.name = name

    def send(self, frame: bytes, timeout_s: float = SEND_TIMEOUT_S) -> None:
        """Raises RankLost when nobody is left to read it, or nobody reads."""
        try:
            self._connection.settimeout(timeout_s)
            self._connection.sendall(len(frame).to_bytes(_LENGTH_BYTES, "little") + frame)
            self._connection.settimeout(None)
        except TimeoutError:
            raise RankLost(f"{self.name} took nothing for {timeout_s:g} s") from None
        except OSError as error:
            raise RankLost(f"{self.name} is gone: {error}") from error

    def send_descriptor(self, descriptor: int) -> None:
        """Hands a file over, between two frames. Raises RankLost. For Unix sockets."""
        try:
            socket.send_fds(self._connection, [_DESCRIPTOR], [descriptor])
        except OSError as error:
            raise RankLost(f"{self.name} is gone: {error}") from error

    def receive_descriptor(self, timeout_s: float) -> int:
        """What `send_descriptor` of the other end handed over, now the caller's to close. Raises RankLost."""
        self._connection.settimeout(timeout_s)
        try:
            _, descriptors, _, _ = socket.recv_fds(self._connection, len(_DESCRIPTOR), 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise RankLost(f"{self.name} handed no file over: {error}") from error
        finally:
            with suppress(OSError):
                self._connection.settimeout(None)
        if not descriptors:
            raise RankLost(f"{self.name} handed no file over")
        return descriptors[0]

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        """The next frame; None when the other end was closed between two frames. Raises RankLost."""
        self._connection.settimeout(timeout_s)
        try:
            head = self._read(_LENGTH_BYTES)
            if head is None:
                return None
            num_bytes = int.from_bytes(head, "little")
            if num_bytes > MAX_FRAME_BYTES:
                raise RankLost(f"{self.name} sends a frame of {num_bytes} bytes, limit {MAX_FRAME_BYTES}")
            frame = self._read(num_bytes)
        except TimeoutError:
            raise RankLost(f"{self.name} did not answer within {timeout_s:g} s") from None
        except OSError as error:
            raise RankLost(f"{self.name} is gone: {error}") from error
        finally:
            with suppress(OSError):
                self._connection.settimeout(None)
        if frame is None:
            raise RankLost(f"{self.name} is gone in the middle of a frame")
        return frame

    def close(self) -> None:
        """Ends a `receive` at either end. Idempotent."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _read(self, num_bytes: int) -> bytes | None:
        """None at the end of the stream before the first byte."""
        read = bytearray()
        while len(read) < num_bytes:
            piece = self._connection.recv(num_bytes - len(read))
            if not piece:
                if read:
                    raise RankLost(f"{self.name} is gone in the middle of a frame")
                return None
            read += piece
        return bytes(read)
