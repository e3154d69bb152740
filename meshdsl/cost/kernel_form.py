"""The form and the sizes of a kernel: what the times of a `Profile` are kept by."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

from ..dims import Dim
from ..ir import Eqn, Var, options
from ..lowering import Program
from .fusion import Kernel
from .ledger import Line
from .profile import Form


def form_of(kernel: Kernel, program: Program) -> Form:
    """The form and the sizes of a kernel's operations on one device.

    >>> import meshdsl as md
    >>> from meshdsl.cost.fusion import steps
    >>> step = md.compile(lambda x, w: md.relu(md.dot(x, w, "io")), "rows:4", "batch:rows")
    >>> program = step.program(md.spec("batch:8 io:16"), md.spec("io:16 hidden:32"))
    >>> (kernel,) = steps(program)
    >>> form = form_of(kernel, program)
    >>> form.text
    'einsum(float32[a b] float32[b c]; out=(a c)) float32[a c] | relu(%2) float32[a c]'
    >>> form.sizes
    (2, 16, 16, 32, 2, 32, 2, 32)
    """
    return _Writer(program).form(kernel.eqns)


def work_of(lines: Sequence[Line]) -> float:
    """The work of a kernel: FLOPs of its products, or bytes if it has none."""
    products = sum(line.flops for line in lines if line.kind in ("matmul", "conv"))
    return products or float(sum(line.hbm_bytes for line in lines))


class _Writer:
    """Write equations as a form: dims are letters, operands from outside have types, those from inside numbers."""

    def __init__(self, program: Program):
        self.program = program
        self.letters: dict[str, str] = {}
        self.sizes: list[int] = []
        self.names: dict[Var, str] = {}

    def form(self, eqns: Sequence[Eqn]) -> Form:
        return Form(" | ".join(map(self.equation, eqns)), tuple(self.sizes))

    def equation(self, eqn: Eqn) -> str:
        ins = " ".join(map(self.operand, eqn.ins))
        params = " ".join(f"{key}={self.param(value)}" for key, value in options(eqn.params) if self.kept(value))
        outs = " ".join(map(self.typed, eqn.outs))
        self.names.update((v, f"%{len(self.names) + i}") for i, v in enumerate(eqn.outs))
        word = str(eqn.op) if eqn.collective is None else eqn.collective.name
        return f"{word}({ins}{'; ' * bool(params)}{params}) {outs}"

    def operand(self, v: Var) -> str:
        """A value from inside the kernel, or from outside: with its type where it is read first."""
        name = self.names.get(v)
        if name is None:
            self.names[v] = f"%{len(self.names)}"
            return self.typed(v)
        return name

    def typed(self, v: Var) -> str:
        self.sizes += self.program.local_shape(v)
        return f"{v.dtype.name}[{' '.join(self.letter(d.name) for d in v.dims)}]"

    def letter(self, name: str) -> str:
        return self.letters.setdefault(name, _letters(len(self.letters)))

    def kept(self, value: Any) -> bool:
        """True if a parameter may change the time: not numbers, whose effect on sizes is in the result's type."""
        return isinstance(value, bool | str | Enum | Dim | tuple | list) and value not in ((), [])

    def param(self, value: Any) -> str:
        match value:
            case Dim():
                return self.letter(value.name)
            case Enum():
                return str(value.value)
            case str():
                return self.letter(value) if value in self.letters else value
            case bool():
                return str(value)
            case tuple() | list():
                return f"({' '.join(self.param(each) for each in value if self.kept(each))})"
        return ""


def _letters(n: int) -> str:
    """
    >>> [_letters(n) for n in (0, 25, 26)]
    ['a', 'z', 'aa']
    """
    return (_letters(n // 26 - 1) if n >= 26 else "") + chr(ord("a") + n % 26)
