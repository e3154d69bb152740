"""Padding of weights that are sharded for their update: python -m benchmarks.update_formats

For the weights of ResNet-50, the big Transformer and neural collaborative filtering, and several numbers of devices:
the padding bytes over all devices (float32) if each weight is sharded along its best dim (`one_dim`); along flattened
leading dims, if that is better (`combined`); or along several dims, each by a factor of the number of devices
(`several_dims`), as with several mesh axes or a group inside an axis. Prints a JSON line for each model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence

import jax

from meshdsl.models.sharded_update import LARGE

WAYS = (8, 64, 2048)
ITEM = 4  # bytes per float32


def padded(size: int, ways: int) -> int:
    """The size rounded up to a multiple of `ways`.

    >>> padded(9, 8)
    16
    """
    return -(-size // ways) * ways


def one_dim(sizes: Sequence[int], ways: int) -> int:
    """Stored elements, with padding, if the best single dim is sharded.

    >>> one_dim([3, 3, 5, 7], 8)  # 7 is padded to 8
    360
    """
    return min(math.prod(sizes) // n * padded(n, ways) for n in sizes)


def combined(sizes: Sequence[int], ways: int) -> int:
    """Stored elements, with padding, if leading dims may be flattened before sharding.

    >>> combined([3, 3, 5, 7], 8)  # all 315 are padded to 320
    320
    """
    prefixes = (math.prod(sizes[:k]) for k in range(2, len(sizes) + 1))
    return min(one_dim(sizes, ways), *(math.prod(sizes) // n * padded(n, ways) for n in prefixes), 10**18)


def several_dims(sizes: Sequence[int], ways: int) -> int:
    """Stored elements, with padding, if each dim is sharded by a factor of the number of devices, chosen optimally.

    >>> several_dims([3, 3, 64, 64], 2048)
    36864
    """
    if len(sizes) == 1:
        return padded(sizes[0], ways)
    first, *rest = sizes
    return min(padded(first, w) * several_dims(rest, ways // w) for w in range(1, ways + 1) if ways % w == 0)


def weights() -> Iterator[tuple[str, list[list[int]]]]:
    """The sizes of every weight of each model; without the layer dim for models whose layers are stacked."""
    for setting in LARGE:
        leaves = jax.tree.leaves(setting.workload.specs()[0])
        stacked = "layer" if "Transformer" in setting.label else ""
        yield setting.label, [[d.size for d in spec.dims if d.name != stacked] for spec in leaves]


def main() -> None:
    """Print a JSON line for each model and number of devices."""
    for label, shapes in weights():
        real = sum(map(math.prod, shapes))
        for ways in WAYS:
            wasted = {
                method.__name__: ITEM * (sum(method(sizes, ways) for sizes in shapes) - real)
                for method in (one_dim, combined, several_dims)
            }
            undivided = sum(one_dim(sizes, ways) > math.prod(sizes) for sizes in shapes)
            line = {"model": label, "ways": ways, "bytes": ITEM * real, "weights": len(shapes), "undivided": undivided}
            print(json.dumps({**line, **wasted}))


if __name__ == "__main__":
    main()
