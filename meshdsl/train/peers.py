"""The processes of a run watch each other: when one ends, whatever the reason, the others say so and end in seconds.

A process whose partner is gone waits in a collective for minutes, or for ever. So every process has a connection to
process 0, apart from JAX's, on which a thread sends its step once a second, and an error when it ends. What process 0
learns, it tells the others: an error, a closed connection (the process was killed) or `silence` seconds without a word
(it was stopped, or its host is gone). A thread can say so while the main thread waits in a collective.

Before a run starts, all processes must also agree on what it is: settings, data, versions (`Peers.agree`).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import jax
import numpy as np

from ..errors import MeshdslError
from .checkpoint import processes
from .checkpoint.digest import block_sums
from .watch import LEFT, POLL, Position, Watch

BEAT, SILENCE, GRACE, CONNECT = 1.0, 8.0, 2.0, 60.0  # seconds
SAME_START = "start all of them with the same command, files and packages"
Message = dict[str, Any]


class PeersDifferError(MeshdslError):
    """The processes of a run were started differently, or have different copies of a value."""

    exit_code = 2


@dataclass(eq=False)
class _Peer:
    """A connection to another process, and what is known of it."""

    number: int
    socket: socket.socket
    heard: float
    done: bool = False
    text: bytes = b""
    at: Position | None = None  # where it is

    def send(self, message: Message) -> None:
        """Send a message, unless the process is gone, which reading notices."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> list[Message] | None:
        """The complete messages that have come; None if the connection is closed."""
        try:
            data = self.socket.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            return None
        *lines, self.text = (self.text + data).split(b"\n")
        return [json.loads(line) for line in lines]


class Peers:
    """This process and the others of its run, as a context manager around the run.

    `say` prints a line. An exception that leaves the context is told to the others, which end with exit code `LEFT`.
    `host` is the address at which process 0 is reached, if it is known. `watch` knows where this process is.
    """

    def __init__(self, say: Callable[[str], object], watch: Watch, host: str | None = None, silence: float = SILENCE):
        self.number, self.count, self.silence, self._say = jax.process_index(), jax.process_count(), silence, say
        self.watch, self._on_time = watch, time.monotonic()  # when no step took too long, the last time
        self.saved: int | None = None
        self._lock = threading.Lock()
        self._ending, self._gone, self._alone = threading.Event(), threading.Event(), threading.Event()
        self._selector = selectors.DefaultSelector()
        self._peers = self._accepted(host) if self.number == 0 else [self._connected()]
        for peer in self._peers:
            self._selector.register(peer.socket, selectors.EVENT_READ, peer)
        threading.Thread(target=self._watch, name="meshdsl-peers", daemon=True).start()

    def _accepted(self, host: str | None) -> list[_Peer]:
        """Listen, tell the others where, and wait for them."""
        with socket.create_server(("", 0), backlog=self.count) as server:
            token = secrets.token_hex(8)
            hello = {"at": host or socket.gethostname(), "port": server.getsockname()[1], "token": token}
            processes.gathered(json.dumps(hello).encode())
            server.settimeout(CONNECT)
            found: dict[int, _Peer] = {}
            while len(found) < self.count - 1:
                try:
                    connection, _ = server.accept()
                    connection.settimeout(CONNECT)
                    said = json.loads(first_line(connection))
                except (OSError, ValueError) as error:
                    missing = ", ".join(str(n) for n in range(1, self.count) if n not in found)
                    raise MeshdslError(f"process {missing} did not reach process 0 at {hello['at']}: {error}") from None
                if said.get("token") == token:
                    found[said["process"]] = _Peer(said["process"], connection, time.monotonic())
                else:
                    connection.close()
            return list(found.values())

    def _connected(self) -> _Peer:
        hello = json.loads(processes.gathered(b"")[0])
        try:
            connection = socket.create_connection((hello["at"], hello["port"]), CONNECT)
        except OSError as error:
            raise MeshdslError(
                f"process {self.number} cannot reach process 0 at {hello['at']}:{hello['port']}: {error}\n"
                "  processes of a run tell each other when one of them fails; let them connect to each other"
            ) from None
        peer = _Peer(0, connection, time.monotonic())
        peer.send({"process": self.number, "token": hello["token"]})
        return peer

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # a collective fails when another process is gone: `_leave` says which
        if error is not None and self._gone.wait(BEAT) and isinstance(error, jax.errors.JaxRuntimeError):
            time.sleep(self.silence)
        self._ending.set()
        if error is not None:  # what is closed on the way out may wait for the others
            threading.Timer(self.silence - GRACE, self._leave_late, [error]).start()
        first = next(iter(str(error).splitlines()), "") if error is not None else ""
        said: Message = {"done": True} if error is None else {"ended": f"{type(error).__name__}: {first}"}
        self._tell(said if self.number or error is None else {"leave": f"process 0 ended: {said['ended']}"})
        if self.number == 0 and error is not None:
            self._alone.wait(2 * GRACE)  # as in `_wait_alone`

    def _leave_late(self, error: BaseException) -> None:
        self._say(f"{type(error).__name__}: {error}")
        os._exit(1)

    def note(self, record: Mapping[str, Any]) -> None:
        """Remember the newest step that is saved, from the records of a run."""
        if record["event"] in ("save", "resume"):
            self.saved = record["step"]

    def agree(self, about: str, values: Mapping[str, Any], way_out: str = SAME_START) -> None:
        """Wait until all processes have said the same; raises `PeersDifferError` with the values that differ.

        All make the same calls; a process that does not is noticed by its silence, or its end. Names that only some
        have, such as parts of a tensor that others do not store, are not compared.
        """
        said = processes.gathered(json.dumps(values, default=str).encode())
        if differences := [*differences_of({n: json.loads(text) for n, text in enumerate(said)})]:
            raise PeersDifferError("\n  ".join([f"the processes of this run differ in {about}", *differences, way_out]))

    def _tell(self, message: Message) -> None:
        with self._lock:
            for peer in self._peers:
                peer.send(message)

    def _watch(self) -> None:
        """Read what others say, and say that this process is here, until it ends."""
        beat = time.monotonic()
        while True:
            for key, _ in self._selector.select(POLL):
                self._read(key.data)
            if not self._selector.get_map():
                self._alone.set()
            now = time.monotonic()
            if now - beat >= BEAT:
                self._tell({"at": self._position()})
                beat = now
            if self.number == 0:
                self._check_step(now)
            for peer in self._peers:
                if not peer.done and now - peer.heard > self.silence:
                    self._selector.unregister(peer.socket)
                    how = f"has said nothing for {self.silence:.0f} s: it was stopped, or its host is gone"
                    how += f"\n  last, it {peer.at['what']}" if peer.at else ""
                    self._lost(peer, how, grace=0)

    def _position(self) -> Position:
        """The position of this process in its run; of one whose step takes too long, also its stack."""
        at = self.watch.position()
        return {**at, "stack": self.watch.stack()} if at["overdue"] else at

    def _check_step(self, now: float) -> None:
        """End the run if a step takes too long for a process, and where all have been since then shows who is late."""
        silent = [peer for peer in self._peers if now - peer.heard > GRACE]
        others = {peer.number: {**peer.at, "silent": peer in silent} for peer in self._peers if peer.at}
        positions = {0: self._position(), **others}
        if not any(at["overdue"] for at in positions.values()):
            self._on_time = now
        elif now - self._on_time > GRACE and (text := self.watch.report(positions)):
            self._tell({"leave": text, "grace": 0})
            for peer in silent:
                if not peer.done:  # it is not waited for
                    self._selector.unregister(peer.socket)
            self._leave(text, grace=0)

    def _read(self, peer: _Peer) -> None:
        messages = peer.read()
        if messages is None:
            self._selector.unregister(peer.socket)
            if not peer.done:
                self._lost(peer, "is gone: it was killed, or its host is", grace=0)
            return
        peer.heard = time.monotonic()
        for message in messages:
            if "leave" in message:
                self._leave(message["leave"], message.get("grace", GRACE))
            elif "at" in message:
                peer.at = message["at"]
            elif "ended" in message:
                self._lost(peer, f"ended: {message['ended']}")
            peer.done = peer.done or "done" in message

    def _lost(self, peer: _Peer, how: str, grace: float = GRACE) -> None:
        """Another process has ended: tell the others, and end."""
        text, peer.done = f"process {peer.number} {how}", True
        if self.number == 0:
            self._tell({"leave": text, "grace": grace})
        self._leave(text, grace)

    def _wait_alone(self) -> None:
        """Wait until the others have ended: without JAX's coordinator, which is in process 0, they would abort."""
        end = time.monotonic() + 2 * GRACE
        while self._selector.get_map() and time.monotonic() < end:
            for key, _ in self._selector.select(POLL):
                if key.data.read() is None:
                    self._selector.unregister(key.fileobj)

    def _leave(self, text: str, grace: float = GRACE) -> None:
        """End this process, unless it ends by itself: often all processes have the same error."""
        self._gone.set()
        if self._ending.wait(grace):
            return  # the main thread prints its own error and ends the process
        if self.number == 0:
            self._wait_alone()
        saved = "no step is saved" if self.saved is None else f"step {self.saved} is the last that this process saved"
        self._say(f"{text}\n  so process {self.number} ends in step {self.watch.step}; {saved}")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(LEFT)


def first_line(connection: socket.socket) -> bytes:
    """The first line that comes, at most 1,000 bytes. What comes after it stays to be read.

    >>> one, other = socket.socketpair()
    >>> one.sendall(b"token\\nvalues\\n")
    >>> first_line(other), other.recv(100)
    (b'token\\n', b'values\\n')
    >>> one.close(), other.close()
    (None, None)
    """
    line = b""
    while len(line) < 1000 and not line.endswith(b"\n") and (byte := connection.recv(1)):
        line += byte
    return line


def differences_of(said: Mapping[int, Mapping[str, Any]]) -> Iterator[str]:
    """The values in which two processes differ, one line each; a name that one of them lacks is not compared.

    >>> list(differences_of({0: {"seed": 0, "rate": 0.1}, 1: {"seed": 1, "rate": 0.1}}))
    ['seed: 0 in process 0, 1 in process 1']
    """
    first: dict[str, tuple[int, Any]] = {}
    for number, values in sorted(said.items()):
        for name, value in values.items():
            other, known = first.setdefault(name, (number, value))
            if value != known:
                yield f"{name}: {known} in process {other}, {value} in process {number}"


def digests(tree: Any) -> dict[str, Any]:
    """A sum of the bits of each part of a tree's tensors that several devices store, by path and place.

    >>> import meshdsl as md
    >>> digests({"w": md.ones("io:2")})
    {}
    """
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    found: dict[str, Any] = {}
    for path, blocks in block_sums({path: x for path, x in leaves.items() if _has_copies(x.stored)}).items():
        by_place: dict[str, list[int]] = {}
        for block in blocks:
            by_place.setdefault(block.place, []).append(block.value)
        for place, values in by_place.items():  # several values: the devices of this process differ
            found[f"{path}{place}"] = values[0] if len({*values}) == 1 else values
    return found


def _has_copies(array: jax.Array) -> bool:
    places = [str(index) for index in array.sharding.devices_indices_map(array.shape).values()]
    return len(set(places)) < len(places)


def versions() -> dict[str, str]:
    """The versions that decide what a step computes."""
    from .. import __version__

    return {
        "meshdsl": __version__,
        "jax": jax.__version__,
        "numpy": np.__version__,
        "python": sys.version.split()[0],
    }
