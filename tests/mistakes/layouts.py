"""Mistakes with meshes, layouts, plans, compiled functions, costs and searches."""
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false, reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

from typing import Any

import jax
import numpy as np

import meshdsl as md
from meshdsl.models.mlp import mlp

X = md.tensor([[1.0, 2.0], [3.0, 4.0]], "batch io")
SPEC = md.spec("batch:8 io:4")
ON_ROWS = md.compile(lambda x: x * 2, "rows:2", "batch:rows")
ON_COLS = md.compile(lambda x: x * 2, "cols:4", "io:cols")
PLACED = md.compile(lambda x: x * 2, "rows:2")(X)
SMALL = mlp.replace(batch=8, io=4, hidden=8)
STEP, ARGS = md.compile(SMALL.train_step(), "rows:2", "batch:rows"), SMALL.specs()


def double(x: md.Tensor) -> md.Tensor:
    return x * 2


def donated() -> md.Tensor:
    """A tensor that a compiled function has overwritten."""
    x = ON_ROWS(X)
    md.compile(lambda x: x * 3, "rows:2", "batch:rows", donate=0)(x)
    return x


def compiled(mesh: Any, layout: Any, **options: Any) -> md.Compiled:
    return md.compile(double, mesh, layout, **options)


MANY = md.Layout({f"d{i}": "rows" for i in range(10_000)})


def many_rules() -> None:
    """An error of 10,000 rules shows ten of them."""
    try:
        md.compile(lambda x: x, "rows:2", MANY).program(md.spec("batch:4"))
    except md.LayoutError as error:
        assert len(str(error)) < 3000, len(str(error))
        raise


ROWS = [
    (many_rules, "10000 problems with the layout 'd0:rows d1:rows"),
    (many_rules, "and 9990 more"),
    (lambda: md.Mesh({f"a{i}": 1 for i in range(40)}).bind(), "a mesh that runs has at most 32 axes, got 40"),
    # Meshes
    (lambda: md.Mesh(8), "a mesh is 8 (int); expected str or dict"),
    (lambda: md.Mesh("rows"), "a mesh axis is written name:size, for example 'rows:2 cols:4';"),
    (lambda: md.Mesh("rows:two"), "a mesh axis is written name:size, for example 'rows:2 cols:4';"),
    (lambda: md.Mesh("rows:0"), "mesh axis 'rows' needs a size of at least 1, got 0"),
    (lambda: md.Mesh("rows=2"), "a mesh axis is written name:size, for example 'rows:2 cols:4';"),
    (lambda: md.Mesh("2x4"), "a mesh axis is written name:size, for example 'rows:2 cols:4';"),
    (lambda: md.Mesh((2, 4)), "a mesh is (2, 4) (tuple); expected str or dict"),
    (lambda: md.Mesh("rows:2 rows:4"), "the mesh axis 'rows' is given twice, in 'rows:2 rows:4'; give"),
    (lambda: md.Mesh({"rows": "2"}), "mesh axis 'rows' needs a size of at least 1, got '2'"),
    (lambda: md.Mesh(rows=2.0), "mesh axis 'rows' needs a size of at least 1, got 2.0"),
    (lambda: md.Mesh("rows:2", rows=4), "the mesh axis 'rows' is given twice, as 2 and 4"),
    (lambda: md.Mesh("rows:2", device_order=[0, 0]), "device_order names a device twice: [0, 0]"),
    (lambda: md.Mesh("rows:2", device_order=[0, 1, 2]), "device_order has 3 entries, and the mesh 'rows:2' has 2"),
    (lambda: md.Mesh("rows:2", devices=jax.devices()), "devices has 8 entries, and the mesh 'rows:2' has 2 places"),
    (lambda: md.Mesh("rows:2").on([0, 1]), "the devices of a mesh are devices of JAX, such as"),
    (lambda: md.Mesh(jax.devices()), "a mesh is [CpuDevice(id=0), CpuDevice(id=1), CpuDevice(id=2),"),
    (lambda: md.host_devices(64), "JAX has already started with 8 CPU devices, so 64 cannot be made"),
    # Layouts
    (lambda: md.Layout(3), "a layout is 3 (int); expected str or dict"),
    (lambda: md.Layout("batch=rows"), "a layout rule is written dim:axis, for example 'batch:rows;"),
    (lambda: md.Layout("batch"), "a layout rule is written dim:axis, for example 'batch:rows;"),
    (lambda: md.Layout("batch:rows; batch:cols"), "the layout gives dim 'batch' twice; write its axes together:"),
    (lambda: compiled("rows:2", "batch:rows,rows").program(SPEC), "dim 'batch' is mapped to the axis 'rows' twice"),
    (lambda: md.Layout({0: "rows"}), "dims are text such as 'batch:8 io:4', a md.Dim, or several of"),
    (lambda: md.Layout([("batch", "rows")]), "a layout is [('batch', 'rows')] (list); expected str or dict"),
    # Compiling
    (lambda: md.compile(double), "md.compile needs a mesh, or a plan"),
    (lambda: md.compile(double(X), "rows:2"), "f is tensor(float64[batch=2 io=2], [[2. 4.] [6. 8.]]) (Tensor);"),
    (lambda: md.compile("double", "rows:2"), "f is 'double' (str); expected a function"),
    (lambda: md.compile(double, "rows:2", "batch:cols").program(SPEC), "dim 'batch' is mapped to axis 'cols', which"),
    (lambda: md.compile(double, "rows:2", "bach:rows").program(SPEC), "the layout names dim 'bach', which the"),
    (lambda: md.compile(double, "rows:2 cols:4", "batch:rows io:rows").program(SPEC), "cannot split dim 'io' over"),
    (lambda: md.compile(double, 8, "batch:rows"), "a mesh is 8 (int); expected str or dict"),
    (lambda: md.compile(double, "rows:2", 8), "a layout is 8 (int); expected str or dict"),
    (lambda: md.compile(double, "batch:rows", "rows:2"), "got 'batch:rows', which is a rule of a layout"),
    (lambda: md.compile(double, "rows:2", donate=1).program(SPEC), "donate=(1,) of a call with 1 arguments"),
    (lambda: md.compile(double, "rows:2", static="y").program(SPEC), "static='y' is no argument; there are: x"),
    (lambda: md.compile(double, "rows:2", weight_update="zero3"), "weight_update='zero3' is not available; there"),
    (lambda: md.compile(double, "rows:2", overlap="ringg"), "overlap='ringg' is not available; did you mean 'ring'?"),
    (lambda: md.compile(double, "rows:2", plan=md.Plan("rows:2", "batch:rows")), "the call has a plan and also mesh,"),
    (lambda: md.compile(double, plan="plan.toml"), "plan is 'plan.toml' (str); expected Plan"),
    (lambda: md.compile(double, "rows:2", machine="tpu-v99", overlap="auto").program(SPEC), "no machine is called"),
    (lambda: md.compile(lambda x: x.numpy(), "rows:2").program(SPEC), "a traced tensor has no values yet, so its"),
    (lambda: md.compile(lambda x: "done", "rows:2").program(SPEC), "expected a tensor, or numbers or booleans; got"),
    (lambda: md.compile(lambda x: x if md.sum(x) > 0 else -x, "rows:2").program(SPEC), "a traced tensor cannot decide"),
    (
        lambda: md.compile(lambda x: [x for _ in range(md.sum(x))], "rows:2").program(SPEC),
        "a traced tensor has no values",
    ),
    (lambda: md.compile(lambda x: md.shard(x, {"batch": "cols"}), "rows:2").program(SPEC), "md.shard names the axis"),
    (lambda: md.shard(X, "batch:zz"), "split is 'batch:zz' (str); expected Mapping"),
    (lambda: md.shard(X, {"bach": "rows"}), "no dim 'bach' here; did you mean 'batch'? there are: batch, io"),
    (lambda: md.shard(X, {"batch": "rows", "io": "rows"}), "md.shard uses the axis 'rows' twice in one tensor"),
    (lambda: md.prefer(X, "bach"), "no dim 'bach' here; did you mean 'batch'? there are: batch, io"),
    # Calling
    (lambda: ON_ROWS(), "<lambda> takes (x), and the call has 0 of them: missing a"),
    (lambda: ON_ROWS(X, X), "<lambda> takes (x), and the call has 2 of them: too many"),
    (lambda: ON_ROWS(np.ones((4, 3))), "argument x: an argument is a tensor, md.spec or number, got"),
    (lambda: ON_ROWS(SPEC), "argument x is the spec float32[batch=8 io=4], and a call needs"),
    (lambda: ON_ROWS(y=X), "<lambda> takes (x): missing a required argument: 'x'"),
    (lambda: ON_ROWS("x"), "argument x: an argument is a tensor, md.spec or number, got"),
    (lambda: ON_ROWS(X) + ON_COLS(X), "add of tensors on different devices: results of functions"),
    (lambda: md.concat([ON_ROWS(X), ON_COLS(X)], "batch"), "concat of tensors on different devices: results of"),
    (
        lambda: md.compile(lambda s, t: (s["w"] + 1, t), "rows:2", donate=0)({"w": PLACED}, PLACED),
        "arguments s/w and t are the same array, and s/w is donated",
    ),
    (
        lambda: md.compile(lambda s: (s["w"] + 1, s["b"]), "rows:2", donate=0)({"w": PLACED, "b": PLACED}),
        "arguments s/b and s/w are the same array, and both are donated",
    ),
    (lambda: donated() + 1, "tensor float64[batch=2 io=2] was donated to an earlier call,"),
    (lambda: donated().numpy(), "tensor float64[batch=2 io=2] was donated to an earlier call,"),
    (lambda: compiled("rows:16", "batch:rows")(md.ones("batch:16")), "the mesh 'rows:16' needs 16 devices, and there"),
    (lambda: jax.jit(ON_ROWS)(X.array), "argument x: an argument is a tensor, md.spec or number, got"),
    (lambda: STEP(*ARGS), "argument params/bias is the spec float32[hidden=8], and a call"),
    (lambda: STEP.program(ARGS), "train_step takes (params, state, batch, key, remat,"),
    (lambda: STEP.program(*ARGS[:2]), "train_step takes (params, state, batch, key, remat,"),
    (lambda: STEP.program({"w": SPEC}, *ARGS[1:]), "the parameters do not match the model two_layers"),
    # Costs and pictures
    (lambda: ON_ROWS.cost(SPEC, machine="tpu-v99"), "no machine is called 'tpu-v99'; did you mean 'tpu-v4'? there"),
    (lambda: ON_ROWS.cost(SPEC, machine="h1000"), "no machine is called 'h1000'; did you mean 'h100'? there are:"),
    (lambda: ON_ROWS.cost(SPEC, machine=3), "machine is 3 (int); expected str or PathLike"),
    (lambda: ON_ROWS.cost(SPEC, limit=-1), "limit is a number of bytes above 0, or None for the machine's"),
    (lambda: ON_ROWS.cost(), "<lambda> takes (x), and the call has 0 of them: missing a"),
    (lambda: ON_ROWS.cost(SPEC, assignment={"cols": "x"}), "the assignment of mesh axes to hardware axes does not fit"),
    (lambda: ON_ROWS.cost(SPEC, machine="tpu-v5e", assignment={"rows": "q"}), "the assignment of mesh axes to"),
    (lambda: md.machine("nothing.toml"), "there is no machine file nothing.toml; the names known are:"),
    (lambda: md.machine("tpu-v4:compiled"), "the machine file "),
    (lambda: md.memory(ON_ROWS), "program is <compiled <lambda> on rows:2, layout batch:rows>"),
    (lambda: md.simulate(ON_ROWS, X), "program is <compiled <lambda> on rows:2, layout batch:rows>"),
    (lambda: md.simulate(ON_ROWS.program(SPEC)), "the program takes inputs of shapes [(8, 4)], got []"),
    (lambda: md.simulate(ON_ROWS.program(SPEC), np.ones((2, 2))), "the program takes inputs of shapes [(8, 4)], got"),
    (lambda: md.show(SPEC), "a tensor is drawn under a layout on a mesh, and one of them is"),
    (lambda: md.show(SPEC, "batch:rows"), "a tensor is drawn under a layout on a mesh, and one of them is"),
    (lambda: md.show(SPEC, "batch:cols", "rows:2"), "the mesh has no axis 'cols'; there are: rows"),
    (lambda: md.show("model"), "a tensor is drawn under a layout on a mesh, and one of them is"),
    (lambda: md.show(ON_ROWS), "md.show draws a program, got a compiled function"),
    (lambda: md.jaxify(double, SPEC), "compiled is <function double"),
    # Plans
    (lambda: md.Plan("rows:2", microbatches=0), "microbatches=0: a step divides its batch into 1 part or more"),
    (lambda: md.Plan("rows:2", microbatches=2.5), "microbatches=2.5: a step divides its batch into 1 part or more"),
    (lambda: md.Plan("rows:2", remat="everything"), "remat='everything' is not available; there are: 'model',"),
    (lambda: md.Plan("rows:2", weight_update="fsdp"), "weight_update='fsdp' is not available; there are: replicated,"),
    (lambda: md.Plan("rows:2", overlap="rings"), "overlap='rings' is not available; did you mean 'ring'? there"),
    (lambda: md.Plan(8), "a mesh is 8 (int); expected str or dict"),
    (lambda: md.Plan("rows:2", machine="tpu-v99"), "machine='tpu-v99' decides nothing in this plan"),
    (lambda: md.Plan.from_toml("mesh = rows:2"), "the plan is not TOML: Invalid value (at line 1, column 8)"),
    (lambda: md.Plan.from_toml('meshh = "rows:2"'), "a plan has no key 'meshh'; did you mean 'mesh'? there are:"),
    (lambda: md.Plan.load("no-such-plan.toml"), "the plan no-such-plan.toml cannot be read: No such file or"),
    (lambda: md.compile(double, plan=md.Plan("rows:2", microbatches=4)).program(SPEC), "the plan has microbatches=4,"),
    (
        lambda: md.compile(SMALL.train_step(), plan=md.Plan("rows:2", microbatches=3)).program(*ARGS),
        "3 micro-batches (microbatches=3, or --microbatches 3) do not divide",
    ),
    (lambda: md.compile(double, plan=md.Plan("", "batch:rows")).program(SPEC), "dim 'batch' is mapped to axis"),
    (lambda: md.WeightUpdate("shard"), "weight_update='shard' is not available; did you mean 'sharded'?"),
    (lambda: md.WeightUpdate("replicated", group="rows"), "group='rows' has no effect with"),
    (lambda: md.WeightUpdate("sharded", bucket_bytes=-1), "bucket_bytes is a number of bytes from 0, or None for the"),
    (
        lambda: compiled("rows:2", "", weight_update=md.WeightUpdate("sharded", group="planes")).program(SPEC),
        "the mesh has no axis",
    ),
    (lambda: md.Overlap("ring", parts=1), "parts=1: a program is cut into 2 parts or more"),
    # Searches
    (lambda: md.search(SMALL), "a search takes a mesh or a number of devices, one of the two;"),
    (lambda: md.search(SMALL, devices=0), "a mesh has at least 1 device, got 0"),
    (lambda: md.search(SMALL, devices=2, mesh="rows:2"), "a search takes a mesh or a number of devices, one of the"),
    (lambda: md.search(SMALL, devices=2, machine="tpu-v99"), "no machine is called 'tpu-v99'; did you mean 'tpu-v4'?"),
    (lambda: md.search(SMALL, devices=2, limit=10), "no plan costed fits 10 B on each device"),
    (lambda: md.search(SMALL, devices=2, dims="bach"), "dim 'bach' is to be searched; did you mean 'batch'? there"),
    (lambda: md.search(SMALL, devices=2, knobs="microbatch"), "a search turns no knob 'microbatch'; did you mean"),
    (lambda: md.search(double, devices=2), "double takes (x), and the call has 0 of them: missing a"),
    (lambda: md.search(ON_ROWS, SPEC, mesh="x:2", layout="batch:rows"), "which the mesh 'x:2' lacks"),
    (
        lambda: md.search(lambda x: md.shard(x, "batch:y"), SPEC, mesh="x:2"),
        "split is 'batch:y' (str); expected Mapping",
    ),
    (lambda: md.search(SMALL, devices="2"), "a mesh has at least 1 device, got '2'"),
    (
        lambda: md.search(SMALL, mesh="rows:2", plans=0),
        "plans is the number of plans to cost, at least 1, or None; got 0",
    ),
]
