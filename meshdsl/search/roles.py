"""Roles: sets of dims that share one axis of a mesh; and candidates, which give each axis of a mesh a role.

A role is estimated alone, on an inner axis and on an outer one. Roles grow dim by dim from the best so far; the best
twenty, with those of the workload's named layouts and with the stages of its loops, make the candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import permutations, product

from ..layouts import Layout, Mesh
from .screen import Candidate, Numbers
from .space import Role, Space

Score = Callable[[Sequence[Candidate]], tuple[Numbers, Numbers]]  # seconds and bytes of candidates
Scores = dict[Role, tuple[float, float]]  # seconds and bytes
ROLES = 20  # of an axis
FASTEST = 8  # of them by seconds alone; the others by seconds times bytes
GROWN, GROWN_SMALL = 16, 8  # roles that get another dim: the fastest, and those with the least seconds times bytes
LARGEST = 8  # dims of a role
INNER = 8  # devices of the inner axis on which roles are estimated
DEEP = 7  # roles of meshes with three axes
ALONE = 400  # roles of the only axis of a mesh
MOST = 14_000  # candidates


def named_roles(layouts: Mapping[str, tuple[str, str]], space: Space) -> Iterator[Role]:
    """The roles of the axes of named layouts, with the dims that a search may use."""
    for mesh, rules in layouts.values():
        for axis in Mesh(mesh).axes:
            dims = tuple(sorted(d for d, cut in Layout(rules).rules.items() if axis in cut and d in space.sizes))
            if dims and space.allows(Mesh({axis: 1}), [dims]):
                yield dims


def best_roles(score: Score, space: Space, dims: Sequence[str], meshes: Sequence[Mesh]) -> list[Role]:
    """The best roles of an axis, best first; `dims` may be in them."""
    best: dict[Role, None] = {}
    others: dict[Role, None] = {}
    for known in _grown(score, space, dims, *_probes(meshes)):
        fast, small = _ranked(known)
        best.update(dict.fromkeys(fast[: FASTEST // 2]))
        with_dim = (next((role for role in fast if d in role), None) for d in dims)
        with_dims = [role for role in with_dim if role is not None]
        others.update(
            dict.fromkeys([*fast[FASTEST // 2 : FASTEST], *small[:FASTEST], *with_dims, *fast[FASTEST:ROLES]])
        )
    return list({**best, **others})


def _probes(meshes: Sequence[Mesh]) -> tuple[Mesh, list[int]]:
    """The axes on which roles are estimated: the inner and the outer one of a mesh with an inner axis of a node."""
    usual = [mesh for mesh in meshes if len(mesh.axes) == 2 and [*mesh.axes.values()][-1] == INNER]
    mesh = (usual or list(meshes))[0]
    return mesh, [k for k, n in reversed([*enumerate(mesh.axes.values())]) if n > 1][:2] or [0]


def _grown(score: Score, space: Space, dims: Sequence[str], mesh: Mesh, probes: Sequence[int]) -> list[Scores]:
    """Roles of each of some axes with seconds and bytes; the other axes have the dims of fixed rules alone."""
    fixed = [space.role(mesh, axis) for axis in mesh.axes]
    known: list[Scores] = [{} for _ in probes]
    new: list[tuple[int, Role]] = [(i, role) for i, _ in enumerate(probes) for role in ((), *((d,) for d in dims))]
    while new:
        legal: list[tuple[int, Role, Candidate]] = []
        for i, role in new:
            k = probes[i]
            each = (*fixed[:k], tuple(sorted((*fixed[k], *role))), *fixed[k + 1 :])
            if space.allows(mesh, each):
                legal.append((i, role, Candidate(mesh, each)))
        if not legal:
            break
        seconds, peak = score([candidate for *_, candidate in legal])
        for (i, role, _), s, b in zip(legal, seconds, peak, strict=True):
            known[i][role] = float(s), float(b)
        new = [(i, role) for i, scores in enumerate(known) for role in _longer(scores, dims)]
    return known


def _longer(scores: Scores, dims: Sequence[str]) -> list[Role]:
    """The best roles with another dim each, if they are not known."""
    fast, small = _ranked(scores)
    grown = dict.fromkeys((*fast[:GROWN], *small[:GROWN_SMALL]))
    longer = dict.fromkeys(tuple(sorted((*role, d))) for role in grown for d in dims if d not in role)
    return [role for role in longer if role not in scores and len(role) <= LARGEST]


def _ranked(scores: Scores) -> tuple[list[Role], list[Role]]:
    """The roles by seconds, and by seconds times bytes, but not those that are illegal or cost as a smaller one."""
    each: dict[tuple[str, str], Role] = {}
    for role in sorted((r for r in scores if scores[r][0] < float("inf")), key=lambda r: (len(r), r)):
        each.setdefault((f"{scores[role][0]:.4g}", f"{scores[role][1]:.3g}"), role)
    fast = sorted(each.values(), key=lambda role: (scores[role][0], len(role), role))
    return fast, sorted(fast, key=lambda role: scores[role][0] * scores[role][1])


def candidates(space: Space, meshes: Sequence[Mesh], roles: Sequence[Role], generated: bool) -> list[Candidate]:
    """Meshes with a role for each axis. Of generated meshes, no two axes have one role: one longer axis has it too."""
    found: dict[Candidate, None] = {}
    for mesh in meshes:
        fixed = [space.role(mesh, axis) for axis in mesh.axes]
        for picks in _picks(roles if mesh.size > 1 else [()], len(mesh.axes), generated):
            each = [tuple(sorted({*own, *pick})) for own, pick in zip(fixed, picks, strict=True)]
            if space.allows(mesh, each):
                found[Candidate(mesh, tuple(each))] = None
            if len(found) == MOST:
                return list(found)
    return list(found)


def _picks(roles: Sequence[Role], axes: int, generated: bool) -> Iterable[tuple[Role, ...]]:
    most = ALONE if axes == 1 else len(roles) if axes == 2 else DEEP if axes == 3 else 4
    if generated:
        return permutations(roles[:most], axes)
    return product(dict.fromkeys(((), *roles[:most])), repeat=axes)
