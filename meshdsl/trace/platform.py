"""The platform that a model is traced for, so that choices that depend on the machine can ask it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import jax


@dataclass
class TracedFor:
    """The platform that a trace is for, and whether the traced function read it."""

    platform: str | None  # None: JAX's default backend
    read: bool = False


class _State(threading.local):
    target: TracedFor | None = None


_state = _State()


@contextlib.contextmanager
def tracing_for(target: TracedFor) -> Iterator[None]:
    """Traces in this context are for a platform; `md.platform` tells it."""
    before, _state.target = _state.target, target
    try:
        yield
    finally:
        _state.target = before


def platform() -> str:
    """The platform that decisions of a model are made for: "cpu", "gpu" or "tpu".

    >>> import meshdsl as md
    >>> md.platform()
    'cpu'
    >>> fused = lambda x: md.square(x) if md.platform() == "tpu" else x * x
    >>> [str(eqn.op) for eqn in md.compile(fused, "rows:4", machine="tpu-v5e").graph(md.spec("batch:8")).eqns]
    ['square']

    While `md.compile` traces a function, it is the platform of the machine that `machine=` names, else of the mesh's
    devices (`md.Mesh.on`), else JAX's default backend; elsewhere always the last.
    """
    target = _state.target
    if target is not None:
        target.read = True
        if target.platform is not None:
            return target.platform
    return jax.default_backend()
