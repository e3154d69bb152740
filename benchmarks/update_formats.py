"""What padding costs when weights are cut for their update: python -m benchmarks.update_formats

For the weights of ResNet-50, the big Transformer and neural collaborative filtering, and numbers of devices: the bytes
that all devices store beyond those of the weights (float32), cut along the dim that wastes least; along leading dims
combined, where that wastes less; and along several dims by factors of the number of devices, as a mesh of several axes
or a group inside an axis allows. One JSON line each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence

import jax

from models.sharded_update import LARGE

WAYS = (8, 64, 2048)
ITEM = 4  # bytes of float32


def padded(size: int, ways: int) -> int:
    """The size rounded up to a multiple.

    >>> padded(9, 8)
    16
    """
    return -(-size // ways) * ways


def one_dim(sizes: Sequence[int], ways: int) -> int:
    """Stored elements where one dim is cut, the best one.

    >>> one_dim([3, 3, 5, 7], 8)  # 7 is padded to 8
    360
    """
    return min(math.prod(sizes) // n * padded(n, ways) for n in sizes)


def combined(sizes: Sequence[int], ways: int) -> int:
    """Stored elements where leading dims may be combined first.

    >>> combined([3, 3, 5, 7], 8)  # all 315 are padded to 320
    320
    """
    prefixes = (math.prod(sizes[:k]) for k in range(2, len(sizes) + 1))
    return min(one_dim(sizes, ways), *(math.prod(sizes) // n * padded(n, ways) for n in prefixes), 10**18)


def several_dims(sizes: Sequence[int], ways: int) -> int:
    """Stored elements where each dim is cut by a factor of the number of devices, the best ones.

    >>> several_dims([3, 3, 64, 64], 2048)
    36864
    """
    if len(sizes) == 1:
        return padded(sizes[0], ways)
    first, *rest = sizes
    return min(padded(first, w) * several_dims(rest, ways // w) for w in range(1, ways + 1) if ways % w == 0)


def weights() -> Iterator[tuple[str, list[list[int]]]]:
    """The sizes of every weight, without the dim of stacked layers where gradients come layer by layer."""
    for setting in LARGE:
        leaves = jax.tree.leaves(setting.workload.specs()[0])
        stacked = "layer" if "Transformer" in setting.label else ""
        yield setting.label, [[d.size for d in spec.shape if d.name != stacked] for spec in leaves]


def main() -> None:
    """Print a line for each model and number of devices."""
    for label, shapes in weights():
        real = sum(map(math.prod, shapes))
        for ways in WAYS:
            wasted = {
                how.__name__: ITEM * (sum(how(sizes, ways) for sizes in shapes) - real)
                for how in (one_dim, combined, several_dims)
            }
            undivided = sum(one_dim(sizes, ways) > math.prod(sizes) for sizes in shapes)
            line = {"model": label, "ways": ways, "bytes": ITEM * real, "weights": len(shapes), "undivided": undivided}
            print(json.dumps({**line, **wasted}))


if __name__ == "__main__":
    main()
