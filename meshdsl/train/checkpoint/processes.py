"""Small collectives between the processes of a program.

All processes must call the same functions in the same order, from their main threads. With one process nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from ...errors import CheckpointError, SaveError


def index() -> int:
    """The index of this process, from 0."""
    return jax.process_index()


def count() -> int:
    """The number of processes."""
    return jax.process_count()


def from_first(data: bytes, size: int) -> bytes:
    """The bytes that process 0 passes, at most `size`; the arguments of other processes are ignored."""
    if count() == 1:
        return data
    message = np.zeros(size + 1, np.uint8)
    message[0] = len(data)
    message[1 : 1 + len(data)] = np.frombuffer(data, np.uint8)
    received = np.asarray(multihost_utils.broadcast_one_to_all(message))
    return received[1 : 1 + int(received[0])].tobytes()


def all_processes(condition: bool) -> bool:
    """True if the condition is true in every process."""
    if count() == 1:
        return condition
    return bool(np.all(multihost_utils.process_allgather(np.array([condition], np.uint8))))


def on_first(failure: str, work: Callable[[], None]) -> None:
    """Run `work` on process 0; if it fails, every process raises an error, a `SaveError` with the text `failure`."""
    problem: Exception | None = None
    if index() == 0:
        try:
            work()
        except (OSError, CheckpointError) as error:
            problem = error
    if all_processes(problem is None):
        return
    if isinstance(problem, CheckpointError):
        raise problem
    raise SaveError(f"{failure}: {problem or 'see the error of process 0'}") from problem
