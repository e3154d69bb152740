"""The intermediate representation: values with named dims, one `Op` record per operation, equations, graphs."""

from .borders import Border, borders, predicates
from .cause import NO_CAUSE, Because, Cause
from .clean import acts, cse, dce, rewritten, silent, without
from .collective import BlockEffect, Blocks, Collective, CollectiveDefaults, Pairs, Start
from .exact import exact
from .flow import computed_from, read_by, sources_of
from .graph import (
    Call,
    Cond,
    Control,
    Eqn,
    Graph,
    Scan,
    Var,
    While,
    dim_names,
    format_graph,
    known,
    learn,
    operations,
    options,
    params_with,
    scratch_bytes,
    walk,
)
from .op import Bounded, Fuses, Labels, Linear, Op, Params, Product, Reduce, Type, named, no_flops, only_named
from .verify import inferred, verify

__all__ = [
    "NO_CAUSE", "Because", "BlockEffect", "Blocks", "Border", "Bounded", "Call", "Cause", "Collective",
    "CollectiveDefaults", "Cond", "Control", "Eqn", "Fuses", "Graph", "Labels", "Linear", "Op", "Pairs", "Params",
    "Product", "Reduce", "Scan", "Start", "Type", "Var", "While", "acts", "borders", "computed_from", "cse", "dce",
    "dim_names", "exact", "format_graph", "inferred", "known", "learn", "named", "no_flops", "only_named",
    "operations", "options", "params_with", "predicates", "read_by", "rewritten", "scratch_bytes", "silent",
    "sources_of", "verify", "walk", "without",
]  # fmt: skip
