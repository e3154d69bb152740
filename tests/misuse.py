"""Random wrong calls of public names: a `MeshdslError` names the caller's line, and is no `InternalError`.

`python -m tests.misuse --calls 3000 --seed 1` prints the calls that fail the law and ends with a line of JSON. What a
function does not read itself gives errors of Python, NumPy or JAX, which are counted as "theirs".

Half of the calls have odd arguments only. The others are right calls, of `right`, of which one argument is replaced or
left out. Layers run inside a model, and what `md.vmap` and its like return is called.
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
from tests.test_public_names import REFERENCE

# Names that start devices, read or write files, run a compiler, or search for long
LEFT_OUT = {
    "host_devices", "Checkpoints", "Restored", "export_orbax", "export_safetensors", "import_orbax",
    "import_safetensors", "export_hugging_face", "import_hugging_face", "compile_for", "search",
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


def right() -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Calls that succeed, of names with many arguments."""
    x, y = md.ones("batch:2 length:4 model:8"), md.tensor([1.0, 2.0], "batch")
    image, key = md.ones("batch:2 height:4 width:4 channels:6"), md.random.key(0)
    q, k = md.ones("batch:2 length:4 head:8"), md.ones("batch:2 memory:6 head:8")
    params = {"w": md.ones("model:8 out:3")}
    return [
        ("attention", (q, k, k), {"causal": True, "window": 2, "scale": 0.5, "block": 2, "method": "auto"}),
        ("attention", (q, k, k), {"mask": md.ones("length:4 memory:6", "bool"), "over": "head", "memory": "memory"}),
        ("vmap", (lambda v: v * 2,), {"over": "batch"}),
        ("grad", (lambda v: md.sum(v * v),), {}),
        ("value_and_grad", (lambda v: (md.sum(v), v),), {"has_aux": True}),
        ("checkpoint", (lambda v: v * 2,), {"policy": "products"}),
        ("jvp", (lambda v: v * v, (y,), (y,)), {}),
        ("vjp", (lambda v: v * v, y), {}),
        ("associative_scan", (lambda a, b: a + b, y), {"over": "batch", "reverse": True}),
        ("scan", (lambda c, v: (c + v, c), 0.0, y), {"over": "batch"}),
        ("while_loop", (lambda i: i < 3, lambda i: i + 1, 0), {"max_trips": 4}),
        ("cond", (md.tensor(True), lambda v: v, lambda v: v * 2, y), {}),
        ("switch", (1, [lambda v: v, lambda v: v * 2], y), {}),
        ("cumprod", (x, "length"), {"exclusive": True, "reverse": True}),
        ("print", (y,), {"label": "y"}),
        ("callback", (y, lambda block, part: None), {}),
        ("random.normal", (key, "a:3"), {"dtype": "float32"}),
        ("random.randint", (key, "a:3", 0, 5), {}),
        ("nn.linear", (x, "model", "out:3"), {"bias": False, "name": "linear"}),
        ("nn.conv", (image, {"height": 3, "width": 3}, "channels", "out:4"), {"stride": 2, "padding": "same"}),
        ("nn.batch_norm", (image, "batch height width"), {"momentum": 0.9, "eps": 1e-5, "training": True}),
        ("nn.group_norm", (image, 3), {"over": "channels", "along": "height width"}),
        ("nn.lstm", (x, "hidden:4"), {"over": "model", "along": "length"}),
        ("nn.gru", (x, "hidden:4"), {"over": "model", "along": "length"}),
        ("nn.state_space", (x, "states:4"), {"over": "model", "along": "length"}),
        ("nn.multi_head_attention", (x, md.Dim("heads", 2), md.Dim("head", 4)), {"causal": True}),
        ("nn.softmax_cross_entropy", (x, md.zeros("batch:2 length:4", "int32")), {"over": "model"}),
        ("Plan", ("rows:2", "batch:rows"), {"microbatches": 2, "remat": "full", "weight_update": "sharded"}),
        ("WeightUpdate", ("sharded",), {"group": "rows", "bucket_bytes": 1e6, "regather": True}),
        ("HubConfig", ({"hidden_size": 8},), {"where": "here"}),
        ("compile", (lambda v: v * 2, "rows:2", "batch:rows"), {"donate": 0, "overlap": "none"}),
        ("optim.adamw", (1e-3,), {"b1": 0.9, "weight_decay": 0.1}),
        ("optim.warmup_cosine", (1e-3, 10, 100), {"end": 0.0}),
        ("optim.clip_by_global_norm", (params, 1.0), {}),
        ("einsum", (x, params["w"]), {"out": "batch length out"}),
        ("show", (x, "batch:rows", "rows:2"), {}),
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


def near(seed: int) -> Iterator[Call]:
    """Right calls of which one argument is replaced by an odd one, or left out."""
    draw = random.Random(seed)
    while True:
        name, args, options = draw.choice(right())
        odd, place = draw.choice(values()), draw.randrange(len(args) + len(options))
        kept, named = list(args), dict(options)
        if place >= len(args):
            named[list(options)[place - len(args)]] = odd
        elif draw.random() < 0.9:
            kept[place] = odd
        else:
            del kept[place]
        yield Call(name, tuple(kept), named)


def perform(call: Call) -> None:
    """Make the call, and one of what it returns, if that is the user's function transformed."""
    function = functions()[call.name]
    if call.name.startswith("nn."):
        md.model(lambda: function(*call.args, **call.options)).specs()
        return
    result = function(*call.args, **call.options)
    if call.name in ("vmap", "grad", "value_and_grad", "checkpoint"):
        result(md.tensor([1.0, 2.0], "batch"))


def outcome(call: Call) -> tuple[str, BaseException | None]:
    """ "accepted", "error", "theirs", or what is wrong: "internal", "no line", "wrong line"."""
    try:
        perform(call)
    except md.MeshdslError as error:
        if error.where is None or isinstance(error, md.InternalError):
            return "internal" if isinstance(error, md.InternalError) else "no line", error
        return ("error" if error.where.file == __file__ else "wrong line"), error
    except Exception as error:
        return "theirs", error
    return "accepted", None


def run(number: int, seed: int, show: Callable[[str], None] = print) -> Counter[str]:
    """Draw calls, print those that fail the law, and count the outcomes."""
    counts: Counter[str] = Counter()
    known: set[tuple[str, str]] = set()
    drawn = (call for pair in zip(calls(seed), near(seed), strict=True) for call in pair)
    for call, _ in zip(drawn, range(number), strict=False):
        kind, error = outcome(call)
        counts[kind] += 1
        if kind in ("accepted", "error", "theirs") or error is None:
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
