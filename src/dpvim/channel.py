"""Messages between the processes of one job: everybody sends to process 0, which answers all.

A message is bytes, never a pickle. Whoever connects has to know the key of the job; what is sent is
not encrypted (docs/processes.md).
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from types import TracebackType
from typing import Any, Self

from dpvim.types import LostProcessError

# A machine that vanishes says nothing. After so many seconds of silence of its network its
# connections are broken; a process that works in silence is asked by the system alone.
_IDLE_SECONDS, _PROBE_SECONDS, _PROBES = 10, 5, 3
_SILENCE_MS = 1000 * (_IDLE_SECONDS + _PROBE_SECONDS * _PROBES)
_HANDSHAKE_SECONDS = 10
_MESSAGE, _ERROR = b"m", b"e"
_NUMBER = struct.Struct("<d")
_BROKEN = (EOFError, OSError)


class Channel:
    """The connections of one process to the others.

    Use as a context manager: an error that leaves it is told to the others, who then fail, too.

    Args:
        number: Of this process, from 0 on.
        peers: Of process 0 the connections to all others, in order; of others that to process 0.
    """

    def __init__(self, number: int, peers: Sequence[Any]) -> None:
        self.number, self._peers = number, list(peers)

    @property
    def leads(self) -> bool:
        """True for process 0."""
        return self.number == 0

    def gather(self, message: bytes) -> list[bytes]:
        """The messages of all processes, in order, at process 0; nothing at others."""
        if not self.leads:
            self._send(0, message)
            return []
        return [message, *(self._receive(place) for place in range(len(self._peers)))]

    def share(self, message: bytes = b"") -> bytes:
        """The message of process 0, at all."""
        if not self.leads:
            return self._receive(0)
        for place in range(len(self._peers)):
            self._send(place, message)
        return message

    def all(self, message: bytes) -> list[bytes]:
        """The messages of all processes, in order, at all."""
        found = self.gather(message)
        lengths = struct.pack(f"<{len(found)}q", *map(len, found))
        parts = self.share(struct.pack("<q", len(found)) + lengths + b"".join(found))
        (count,) = struct.unpack_from("<q", parts)
        place, found = 8 * (1 + count), []
        for length in struct.unpack_from(f"<{count}q", parts, 8):
            found.append(parts[place : place + length])
            place += length
        return found

    def most(self, number: float) -> float:
        """The largest of the processes' numbers, at all."""
        found = [_NUMBER.unpack(each)[0] for each in self.gather(_NUMBER.pack(number))]
        return float(_NUMBER.unpack(self.share(_NUMBER.pack(max(found, default=0.0))))[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for peer in self._peers:
            with contextlib.suppress(*_BROKEN):
                if error is not None:
                    peer.send_bytes(_ERROR + self._why(error).encode())
            peer.close()

    def _why(self, error: BaseException) -> str:
        if isinstance(error, LostProcessError):
            return str(error)
        return f"process {self.number} ended with {type(error).__name__}: {error}"

    def _send(self, place: int, message: bytes) -> None:
        try:
            self._peers[place].send_bytes(_MESSAGE + message)
        except _BROKEN as error:
            self._last_words(place, error)

    def _receive(self, place: int) -> bytes:
        try:
            found: bytes = self._peers[place].recv_bytes()
        except _BROKEN as error:
            raise self._lost(place) from error
        if found[:1] == _ERROR:
            raise LostProcessError(found[1:].decode())
        return found[1:]

    def _last_words(self, place: int, error: Exception) -> None:
        """Of a process that does not listen any more, if it said why."""
        with contextlib.suppress(*_BROKEN):
            while self._peers[place].poll():
                self._receive(place)
        raise self._lost(place) from error

    def _lost(self, place: int) -> LostProcessError:
        lost = place + 1 if self.leads else 0
        return LostProcessError(
            f"process {lost} ended, or its machine does not answer any more. The run ends in all "
            "processes; it costs the steps that were begun."
        )


def listening(host: str) -> socket.socket:
    """A socket on a free port of the address that the others know.

    On all addresses where that is not one of the machine's own, or is a name that stands for the
    loopback here: to others it is another address (Debian's machines call themselves 127.0.1.1).
    """
    with contextlib.suppress(OSError):
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        is_known = host in ("localhost", address[0])
        if is_known or not ipaddress.ip_address(address[0]).is_loopback:
            return socket.create_server(address, family=family)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def accept(server: socket.socket, key: bytes, count: int, seconds: float) -> list[Any]:
    """Connections to `count` others who know the key, in the order of their numbers.

    A stranger who connects and does not know the key is sent away.
    """
    found: dict[int, Any] = {}
    deadline = time.monotonic() + seconds
    while len(found) < count:
        server.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            accepted, _ = server.accept()
        except TimeoutError:
            missing = [i for i in range(1, count + 1) if i not in found]
            raise LostProcessError(
                f"processes {missing} did not come within {seconds:g} seconds. All processes have "
                "to call the same function."
            ) from None
        with contextlib.suppress(*_BROKEN, AuthenticationError):
            connection = _known(accepted, key, first=True)
            number = int.from_bytes(connection.recv_bytes(8), "little")
            if number in found or not 1 <= number <= count:
                connection.close()
                continue
            _settle(connection)
            found[number] = connection
    return [found[i] for i in range(1, count + 1)]


def connect(host: str, port: int, key: bytes, number: int, seconds: float) -> Any:
    """A connection to process 0."""
    try:
        connection = _known(
            socket.create_connection((host, port), timeout=seconds), key, first=False
        )
        connection.send_bytes(number.to_bytes(8, "little"))
        _settle(connection)
        return connection
    except (*_BROKEN, AuthenticationError) as error:
        raise LostProcessError(
            f"process 0 cannot be reached at {host}, port {port} ({error}). Processes have to be "
            "able to connect to the machine of process 0."
        ) from error


def _known(raw: socket.socket, key: bytes, *, first: bool) -> Any:
    """The connection, when both sides have shown that they know the key."""
    raw.setblocking(True)
    _set_patience(raw, _HANDSHAKE_SECONDS)
    connection: Any = Connection(raw.detach())
    try:
        for ask in (deliver_challenge, answer_challenge)[:: 1 if first else -1]:
            ask(connection, key)
    except BaseException:
        connection.close()
        raise
    return connection


def _settle(connection: Any) -> None:
    """Wait for as long as it takes, and notice when the other machine is gone."""
    with socket.socket(fileno=os.dup(connection.fileno())) as raw:
        _set_patience(raw, 0)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", _IDLE_SECONDS),
            ("TCP_KEEPINTVL", _PROBE_SECONDS),
            ("TCP_KEEPCNT", _PROBES),
            ("TCP_USER_TIMEOUT", _SILENCE_MS),
        ):
            if hasattr(socket, name):  # not on every system
                raw.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _set_patience(raw: socket.socket, seconds: int) -> None:
    """Reads that wait longer fail; 0 waits for ever."""
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))
