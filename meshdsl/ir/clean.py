"""Remove dead code and common subexpressions, also in the bodies of loops and branches."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

from .exact import exact
from .flow import read_by
from .graph import Cond, Eqn, G, Graph, Scan, Var, known, learn
from .op import Op


def acts(eqn: Eqn) -> bool:
    """True if the equation, or one inside it, does something besides computing its results."""
    if isinstance(eqn.op, Op) and eqn.op.acts:
        return True
    return any(acts(inner) for graph in eqn.graphs().values() for inner in graph.eqns)


def silent(graph: G) -> G:
    """The graph without the equations that act, also inside bodies; they return their operands."""
    plain = without(graph, lambda eqn: isinstance(eqn.op, Op) and eqn.op.acts)
    return plain.replace(eqns=tuple(eqn.map_graphs(silent) for eqn in plain.eqns))


def without(graph: G, drops: Callable[[Eqn], bool]) -> G:
    """The graph without some equations, in place of whose results their operands are read."""
    renamed: dict[Var, Var] = {}
    eqns: list[Eqn] = []
    for eqn in graph.eqns:
        eqn = eqn.reading(renamed)
        if drops(eqn):
            renamed.update(zip(eqn.outs, eqn.ins, strict=False))  # nobody reads what else it returns
        else:
            eqns.append(eqn)
    return graph.replace(eqns=tuple(eqns), outs=tuple(renamed.get(v, v) for v in graph.outs))


def rewritten(graph: G, change: Callable[[Eqn, Mapping[Var, Eqn]], Sequence[Eqn]]) -> G:
    """The graph with other equations in the place of each, bodies first; `change` also gets the producers of values."""
    bodies_changed = (eqn.map_graphs(lambda body: rewritten(body, change)) for eqn in graph.eqns)
    return graph.replace(eqns=tuple(new for eqn in bodies_changed for new in change(eqn, graph.producers)))


def dce(graph: G) -> G:
    """Remove equations whose results are unused, also inside bodies (dead code elimination)."""
    if known(graph, "without dead code"):
        return graph
    live = set(graph.outs)
    eqns: list[Eqn] = []
    for eqn in reversed(graph.eqns):
        if live.isdisjoint(eqn.outs) and not acts(eqn):
            continue
        if eqn.control is not None:
            eqn = _without_unused_results(_without_unused_rows(eqn, live), live).map_graphs(dce)
            eqn = _without_unread_operands(_without_unused_operands(eqn))
        eqns.append(eqn)
        live.update(eqn.ins)
    eqns.reverse()
    return _cleaned(graph, graph.replace(eqns=tuple(eqns)), "without dead code")


def _cleaned(graph: G, cleaned: G, fact: str) -> G:
    """The cleaned graph; loop bodies are cleaned again with each program that contains them."""
    if cleaned is graph:
        learn(graph, fact)
    return cleaned


def _at(values: Sequence[Var], places: Sequence[int]) -> tuple[Var, ...]:
    return tuple(values[i] for i in places)


def _without_unused_rows(eqn: Eqn, live: set[Var]) -> Eqn:
    """Remove a scan's unused stacked results and the carries that only feed themselves."""
    loop = eqn.control
    if not isinstance(loop, Scan):
        return eqn
    body, consts, n = loop.body, loop.consts, loop.carries
    used = {i for i, v in enumerate(eqn.outs) if v in live}
    while True:
        read = _reads(body, [body.outs[i] for i in used])
        more = {i for i in range(n) if body.ins[consts + i] in read} - used
        if not more:
            break
        used |= more
    if len(used) == len(body.outs):
        return eqn
    unused = set(range(n)) - used
    outs = [i for i in range(len(body.outs)) if i in used]
    ins = [i for i in range(len(body.ins)) if i - consts not in unused or not consts <= i < consts + n]
    body = body.replace(ins=_at(body.ins, ins), outs=_at(body.outs, outs))
    eqn = eqn.replace(ins=_at(eqn.ins, ins), outs=_at(eqn.outs, outs))
    return eqn.with_control(body=body, carries=n - len(unused))


def _reads(graph: Graph, outs: Sequence[Var]) -> set[Var]:
    """Every value that `outs` and equations that act depend on, including `outs`."""
    needed = set(outs)
    for eqn in reversed(graph.eqns):
        if not needed.isdisjoint(eqn.outs) or acts(eqn):
            needed.update(eqn.ins)
    return needed


def _without_unused_operands(eqn: Eqn) -> Eqn:
    """Remove the constants and slices that a scan's body does not read; keep all carries."""
    loop = eqn.control
    if not isinstance(loop, Scan):
        return eqn
    body, consts, n = loop.body, loop.consts, loop.carries
    read = read_by(body.eqns, body.outs)
    used = [i for i, v in enumerate(body.ins) if v in read or consts <= i < consts + n]
    if len(used) == len(body.ins):
        return eqn
    body = body.replace(ins=tuple(body.ins[i] for i in used))
    eqn = eqn.replace(ins=tuple(eqn.ins[i] for i in used))
    return eqn.with_control(body=body, consts=sum(i < consts for i in used))


def _without_unused_results(eqn: Eqn, live: set[Var]) -> Eqn:
    """Remove a branch's unused results; keep all of one that only acts."""
    used = [i for i, v in enumerate(eqn.outs) if v in live]
    if not isinstance(eqn.control, Cond) or len(used) in (0, len(eqn.outs)):
        return eqn
    eqn = eqn.map_graphs(lambda graph: graph.replace(outs=_at(graph.outs, used)))
    return eqn.replace(outs=_at(eqn.outs, used))


def _without_unread_operands(eqn: Eqn) -> Eqn:
    """Remove the operands that neither graph of a branch reads."""
    branch = eqn.control
    if not isinstance(branch, Cond):
        return eqn
    read = read_by((*branch.yes.eqns, *branch.no.eqns), (*branch.yes.outs, *branch.no.outs))
    used = [i for i, pair in enumerate(zip(branch.yes.ins, branch.no.ins, strict=True)) if not read.isdisjoint(pair)]
    if len(used) == len(branch.yes.ins):
        return eqn
    eqn = eqn.map_graphs(lambda graph: graph.replace(ins=_at(graph.ins, used)))
    return eqn.replace(ins=(eqn.ins[0], *_at(eqn.ins[1:], used)))


def cse(graph: G) -> G:
    """Compute equal equations on equal values once (common subexpression elimination)."""
    if known(graph, "without duplicates"):
        return graph
    replacements: dict[Var, Var] = {}
    first_eqns: dict[Hashable, Eqn] = {}
    eqns: list[Eqn] = []
    for eqn in graph.eqns:
        if not replacements.keys().isdisjoint(eqn.ins):
            eqn = eqn.reading(replacements)
        eqn = eqn.map_graphs(cse)
        try:
            first = first_eqns.setdefault(_key(eqn), eqn)
        except TypeError:  # a parameter without a hash
            first = eqn
        if first is eqn:
            eqns.append(eqn)
        else:
            replacements.update(zip(eqn.outs, first.outs, strict=True))
    cleaned = graph.replace(eqns=tuple(eqns), outs=tuple(replacements.get(v, v) for v in graph.outs))
    return _cleaned(graph, cleaned, "without duplicates")


def _key(eqn: Eqn) -> Hashable:
    """A key that is equal for equal equations: their results have one type. One that is never merged is its own key."""
    if eqn.control is not None or (isinstance(eqn.op, Op) and eqn.op.effects):
        return eqn
    params = tuple([(name, exact(eqn.params[name])) for name in sorted(eqn.params)])
    return eqn.op, eqn.ins, params, tuple([v.sharding for v in eqn.outs])
