"""`Machine`: the figures of one kind of device and of its network, read from a short TOML file with their sources.

A device is one JAX device: a GPU; a chip for TPU v4 and later; for TPU v2 and v3 a core, which is half a chip.
The files in `meshdsl/cost/machines` come with the package; use them as examples for your own.

Modes of a machine: other figures for the same hardware, as another software reaches them.

A machine file has one table for each, such as `[mode.eager]`, with the top-level keys that it replaces. A machine
is named with its modes after a colon: `a100-p4de:eager`, `h100:eager,flash`. Later modes replace earlier ones.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import expect, nearest
from ..errors.values import load_toml
from ..targets import Target, target_for
from .machine_file import MODE, MachineError, read_machine
from .network import KINDS, Network
from .profile import KernelProfile, load_profile

PACKAGED = Path(__file__).parent / "machines"
ROWS = 8  # sublanes of a TPU's registers


@dataclass(frozen=True)
class Machine:
    """Figures of one device and of the network between devices, in seconds, bytes, and operations per second.

    >>> import dataclasses
    >>> import meshdsl as md
    >>> chip = md.machine("tpu-v5e")
    >>> f"{chip.peak['bfloat16'] / 1e12:.0f} TFLOP/s, {chip.hbm_bandwidth / 1e9:.0f} GB/s; {chip.network}"
    '197 TFLOP/s, 819 GB/s; torus x:16 y:16, in switch slice:64'
    >>> faster = dataclasses.replace(chip, name="faster", hbm_bandwidth=2 * chip.hbm_bandwidth)
    >>> step, x = md.compile(md.exp, "rows:4", "batch:rows"), md.spec("batch:4096 io:4096")
    >>> [f"{1e6 * step.cost(x, machine=each).seconds:.0f} us" for each in (chip, faster)]
    ['43 us', '22 us']
    """

    name: str
    title: str
    device: str  # the hardware behind one JAX device: "GPU", "chip", "core"
    peak: Mapping[str, float]  # FLOP/s of matrix products by dtype; "other" for every dtype not named
    vector: float  # FLOP/s of elementwise operations and reductions
    hbm: float  # bytes available to a program
    hbm_bandwidth: float  # bytes/s of a large copy, reads plus writes
    launch: float  # minimum seconds of any kernel
    efficiency: tuple[tuple[float, float], ...]  # (FLOPs of one matrix product, fraction of the peak it reaches)
    network: Network
    transcendental: float = 0.0  # operations/s of exp, log, tanh and similar; 0: same as `vector`
    memory: tuple[tuple[float, float], ...] = ()  # (bytes of one kernel, fraction of hbm_bandwidth); empty: all of it
    convolution: tuple[tuple[float, float], ...] = ()  # `efficiency` of convolutions; empty: as products
    host_bandwidth: float = 0.0  # bytes/s one way between a device and the host's memory; 0: none is published
    tdp: float = 0.0  # watts of one device at most, by its data sheet; 0: none is published
    tile: int = 1  # side of a matrix unit, to a multiple of which `padded` sizes are rounded up
    reached: Mapping[str, float] = field(default_factory=dict[str, float])  # dtype -> factor on `efficiency`; default 1
    operation: float = 0.0  # seconds of the host to launch one operation; 0: the program is compiled
    attention: float = 0.0  # fraction of the peak that a fused attention kernel reaches; 0: scores are stored
    fused_attention: float = 0.0  # the same for the fused kernel of md.attention, from the mode flash; 0: as a product
    capability: float = 0.0  # of a GPU, which decides its kernels; 0: unknown
    overlap_slowdown: float = 1.13  # factor on compute time while a collective runs
    uncertainty: float | Mapping[str, float] = 0.15  # half-width of the interval as a fraction; or by regime: REGIMES
    asynchronous: tuple[str, ...] = KINDS  # kinds of collectives that run beside compute between a start and a wait
    overlapped_by_compiler: tuple[str, ...] = KINDS  # kinds that the device's compiler is assumed to overlap by itself
    pipelined: bool = False  # a collective of a loop's next trip may start before the trip ends
    sources: Mapping[str, str] = field(default_factory=dict[str, str])  # field -> source of its figure
    file: str = ""
    profile: KernelProfile | None = None  # measured times of kernels, preferred to the figures above

    @property
    def target(self) -> Target:
        """What is known of the compiler of these devices."""
        return target_for(self.device, self.capability)

    def __str__(self) -> str:
        return f"{self.name}: {self.title}; {self.network}"

    def peak_of(self, dtype: np.dtype | str) -> float:
        """FLOP/s of matrix products in this dtype; raises `MachineError` if neither it nor `other` is given."""
        name = np.dtype(dtype).name
        if name not in self.peak and "other" not in self.peak:
            raise MachineError(
                f"machine {self.name!r} gives no peak for {name}; there are: {', '.join(self.peak)}\n"
                f"  add {name}, or other for every dtype not named, to [peak] of {self.file}"
            )
        return self.peak.get(name, self.peak.get("other", math.nan))

    def matmul_efficiency(self, flops: float, dtype: np.dtype | str = "") -> float:
        """Fraction of the peak that one matrix product with this many FLOPs reaches.

        Linear in log(FLOPs) between the points of the curve, and constant outside them; times `reached` of the dtype.
        """
        factor = self.reached.get(np.dtype(dtype).name, 1.0) if self.reached and dtype else 1.0
        return _on(self.efficiency, flops) * factor

    def padded(self, m: int, n: int, k: int) -> tuple[int, int, int]:
        """The sizes of a product [m, k] by [k, n] with its summed dim, and the larger other one, as whole tiles.

        A matrix unit holds a tile of one operand, through which the rows of the other one pass, eight at a time.
        """
        wide, narrow = _up(max(m, n), self.tile), _up(min(m, n), min(self.tile, ROWS))
        return narrow, wide, _up(k, self.tile)

    def half_width(self, regime: str) -> float:
        """Half-width of an estimate's interval in this regime, as a fraction of the estimate."""
        u = self.uncertainty
        return u if isinstance(u, float | int) else u.get(regime, max(u.values()))

    def memory_seconds(self, size: float) -> float:
        """Seconds in which one kernel reads and writes `size` bytes; the bandwidth fraction is interpolated too."""
        return size / (self.hbm_bandwidth * _on(self.memory, size)) if size else 0.0

    def host_seconds(self, size: float) -> float:
        """Seconds of a copy of `size` bytes to or from the host's memory; raises `MachineError` if no rate is given."""
        if not self.host_bandwidth:
            raise MachineError(
                f"machine {self.name!r} gives no host_bandwidth, and the program stores values in the host's memory\n"
                f"  add host_bandwidth, in bytes/s one way, to {self.file}, or use another remat than 'offload'"
            )
        return size / self.host_bandwidth

    def matmul_seconds(self, flops: float, dtype: np.dtype | str) -> float:
        """Compute seconds of one matrix product, without launch and memory time."""
        return flops / (self.peak_of(dtype) * self.matmul_efficiency(flops, dtype)) if flops else 0.0

    def conv_seconds(self, flops: float, dtype: np.dtype | str) -> float:
        """Compute seconds of one convolution, without launch and memory time."""
        return flops / (self.peak_of(dtype) * _on(self.convolution or self.efficiency, flops)) if flops else 0.0


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _on(curve: Sequence[tuple[float, float]], size: float) -> float:
    if not curve:
        return 1.0
    i = bisect_right([x for x, _ in curve], size)
    if i in (0, len(curve)):
        return curve[min(i, len(curve) - 1)][1]
    (x0, y0), (x1, y1) = curve[i - 1], curve[i]
    return y0 + (y1 - y0) * math.log(size / x0) / math.log(x1 / x0)


def machine(name: str | os.PathLike[str], *, profile: str | os.PathLike[str] | None = None) -> Machine:
    """Load the machine with this name, or from this file; with a profile, kernels in it take their measured times.

    A name is looked up in the folders of $MESHDSL_MACHINES (default ~/.config/meshdsl/machines), then among the
    machines of the package. A `name` that ends in `.toml` or contains a path separator is a file. `profile` is a file
    that `meshdsl doctor --profile` has written. After a colon follow modes, which replace figures by those of another
    software: `h100` runs programs of XLA, as this library's; `h100:eager` one operation at a time, as PyTorch launches
    them, and `h100:flash` has fused attention.

    >>> machine("tpu-v5e").peak_of("bfloat16")
    197000000000000.0
    >>> [f"{machine(name).operation * 1e6:.0f} us" for name in ("a100-p4de", "a100-p4de:eager")]
    ['0 us', '16 us']

    Raises `MachineError` for an unknown name or mode, and for a malformed file, with all its problems.
    """
    named = _named(os.fspath(expect("machine", name, str, os.PathLike)))
    return named if profile is None else replace(named, profile=load_profile(profile))


def _named(name: str) -> Machine:
    text, modes = split_modes(name)
    if text.endswith(".toml") or os.sep in text:
        return _load(Path(text).expanduser(), modes)
    for folder in (*users_folders(), PACKAGED):
        if (folder / f"{text}.toml").is_file():
            return _load(folder / f"{text}.toml", modes)
    raise MachineError(
        f"no machine is called {text!r}; {nearest(text, machines())}\n"
        f"  or give the path of a TOML file, written as those in {PACKAGED}"
    )


def machines() -> tuple[str, ...]:
    """Names that `machine` accepts, sorted: the user's own and those of the package."""
    names = {file.stem for folder in (*users_folders(), PACKAGED) for file in folder.glob("*.toml")}
    return tuple(sorted(names))


def users_folders() -> list[Path]:
    setting = os.environ.get("MESHDSL_MACHINES", "")
    folders = [Path(text).expanduser() for text in setting.split(os.pathsep) if text]
    return folders or [Path.home() / ".config" / "meshdsl" / "machines"]


def _load(path: Path, modes: Sequence[str]) -> Machine:
    if not path.exists():
        raise MachineError(f"there is no machine file {path}; the names known are: {', '.join(machines())}")
    document = load_toml(path, "the machine file", MachineError)
    name = ":".join([path.stem, ",".join(modes)]) if modes else path.stem
    return Machine(name=name, file=str(path), **read_machine(in_modes(document, modes, str(path)), str(path)))


def split_modes(name: str) -> tuple[str, tuple[str, ...]]:
    """The machine's name or file, and its modes.

    >>> split_modes("h100:eager,flash"), split_modes("h100"), split_modes("/a:b/mine.toml")
    (('h100', ('eager', 'flash')), ('h100', ()), ('/a:b/mine.toml', ()))
    """
    base, colon, words = name.rpartition(":")
    if not colon or os.sep in words or words.endswith(".toml"):
        return name, ()
    return base, tuple(words.split(","))


def in_modes(document: Mapping[str, Any], modes: Sequence[str], file: str) -> dict[str, Any]:
    """A machine file with the figures of these modes; raises `MachineError` for an unknown one."""
    tables = document.get("mode", {})
    known = tables if isinstance(tables, dict) else {}
    replaced = dict(document)
    for mode in modes:
        if mode not in known:
            suggestion = nearest(mode, list(known)) if known else "there are none"
            raise MachineError(
                f"the machine file {file} has no mode {mode!r}; {suggestion}\n"
                f"  add a table [mode.{mode}] with the figures that it replaces, of: {', '.join(MODE)}"
            )
        values = known[mode]
        replaced |= {key: values[key] for key in MODE if key in values} if isinstance(values, dict) else {}
    return replaced
