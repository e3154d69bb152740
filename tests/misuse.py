"""Random wrong calls of public names: every one succeeds or raises a `MeshdslError` that names the caller's line.

`python -m tests.misuse --calls 3000 --seed 1` prints the calls that fail the law and ends with a line of JSON. A
`TypeError` of Python itself about the number or names of arguments is right: it is raised in the caller's own line.
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import meshdsl as md
from meshdsl.errors import NOWHERE
from tests.test_public_names import REFERENCE

# Names that start devices, read or write files, run a compiler, or search for long
LEFT_OUT = {
    "host_devices", "Checkpoints", "Restored", "export_orbax", "export_safetensors", "import_orbax",
    "import_safetensors", "export_hugging_face", "import_hugging_face", "compile_for", "search", "search_overrides",
    # records that meshdsl builds, and users only read
    "Compilation", "Compiled", "Machine", "Memory", "Program", "Report", "Tensor", "Verification", "nn.moe.Assignment",
    "nn.moe.Choice", "nn.moe.Dispatch", "nn.moe.Picks", "nn.moe.Preset", "nn.moe.Routing",
}  # fmt: skip


class Odd:
    def __repr__(self) -> str:
        return "Odd()"


def values() -> list[Any]:
    """Arguments that users pass by mistake, and some that are right."""
    x = md.tensor([[1.0, 2.0], [3.0, 4.0]], "batch io")
    i = md.tensor([1, 0], "batch")
    return [
        x, i, x > 2, md.tensor(2.0), md.spec("batch:8 io:2"), md.Dim("io", 2), md.dims("batch:2 io:2"),
        md.Mesh("rows:2"), md.Layout("batch:rows"), md.random.key(0), jax.random.key(0), jax.random.PRNGKey(0),
        np.ones((2, 2)), np.ones(2), jnp.ones((2, 2)), np.array(["a", None], object), np.float32(2), [[1, 2], [3]],
        [1.0, "a"], [], (), {}, {"io": 1}, {"w": x}, None, True, 0, 1, -1, 3, 2**40, 10**30, 0.5, float("nan"),
        float("inf"), 1j, "", "io", "batch", "zz", "batch:zz", "io:2", "io:-1", "batch:rows", "rows:2", "float32",
        "int3", "é:2", b"io", lambda x: x, lambda: None, print, md, Odd(), Odd, object(), range(3), iter([1]), slice(2),
        Ellipsis, SHAPE_DTYPE, np.dtype("int8"), np.random.default_rng(0),
    ]  # fmt: skip


SHAPE_DTYPE = jax.ShapeDtypeStruct((2,), np.float32)


@dataclass(frozen=True)
class Call:
    """One call: the public name and its arguments."""

    name: str
    args: tuple[Any, ...]
    options: dict[str, Any]

    def __str__(self) -> str:
        shown = [_short(a) for a in self.args] + [f"{k}={_short(v)}" for k, v in self.options.items()]
        return f"md.{self.name}({', '.join(shown)})"


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) < 60 else text[:57] + "..."


def functions() -> dict[str, Callable[..., Any]]:
    """The public functions and classes, by name."""
    found = {}
    for name in sorted(REFERENCE):
        value: Any = md
        for part in name.split("."):
            value = getattr(value, part)
        is_error = isinstance(value, type) and issubclass(value, BaseException)
        if callable(value) and name not in LEFT_OUT and not is_error:
            found[name] = value
    return found


def calls(seed: int) -> Iterator[Call]:
    """Random calls with arguments that the signature takes."""
    draw, known = random.Random(seed), functions()
    names = list(known)
    while True:
        name = draw.choice(names)
        pool = values()
        parameters = inspect.signature(known[name]).parameters.values()
        args, options = [], {}
        for p in parameters:
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and not options:
                if p.default is p.empty or draw.random() < 0.4:
                    args.append(draw.choice(pool))
                elif draw.random() < 0.2:
                    options[p.name] = draw.choice(pool)
            elif p.kind is p.VAR_POSITIONAL:
                args += [draw.choice(pool) for _ in range(draw.choice((0, 1, 2)))]
            elif p.kind is p.KEYWORD_ONLY and (p.default is p.empty or draw.random() < 0.3):
                options[p.name] = draw.choice(pool)
        yield Call(name, tuple(args), options)


def outcome(call: Call) -> tuple[str, BaseException | None]:
    """ "accepted", "error", or what is wrong: "raw error", "no line", "wrong line"."""
    function = functions()[call.name]
    try:
        function(*call.args, **call.options)
    except md.MeshdslError as error:
        if error.where is None or error.where == NOWHERE:
            return "no line", error
        return ("error" if error.where.file == __file__ else "wrong line"), error
    except TypeError as error:
        own = error.__traceback__ is not None and error.__traceback__.tb_next is None
        return ("error" if own else "raw error"), error
    except Exception as error:
        return "raw error", error
    return "accepted", None


def run(number: int, seed: int, show: Callable[[str], None] = print) -> Counter[str]:
    """Draw calls, print those that fail the law, and count the outcomes."""
    counts: Counter[str] = Counter()
    known: set[tuple[str, str]] = set()
    for call, _ in zip(calls(seed), range(number), strict=False):
        kind, error = outcome(call)
        counts[kind] += 1
        if kind in ("accepted", "error") or error is None:
            continue
        place = traceback.extract_tb(error.__traceback__)[-1]
        if (call.name, f"{place.filename}:{place.lineno}") in known:
            continue
        known.add((call.name, f"{place.filename}:{place.lineno}"))
        file = "/".join(place.filename.split("/")[-2:])
        show(f"{kind}: {call}: {type(error).__name__}: {str(error).splitlines()[0][:90]}  [{file}:{place.lineno}]")
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    print(json.dumps({"seed": arguments.seed, **run(arguments.calls, arguments.seed)}))
