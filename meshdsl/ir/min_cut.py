"""Minimum cuts of small graphs with edge capacities, by Dinic's algorithm."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import pairwise

INFINITE = 1 << 62


class FlowGraph:
    """Directed edges with integer capacities between hashable nodes.

    >>> graph = FlowGraph()
    >>> graph.add("s", "a", 3)
    >>> graph.add("a", "t", 2)
    >>> sorted(graph.sink_side("s", "t"))
    ['t']
    """

    def __init__(self) -> None:
        self.room: dict[Hashable, dict[Hashable, int]] = {}

    def add(self, a: Hashable, b: Hashable, capacity: int = INFINITE) -> None:
        """Add an edge, or add capacity to an existing edge."""
        edges = self.room.setdefault(a, {})
        edges[b] = min(edges.get(b, 0) + capacity, INFINITE)
        self.room.setdefault(b, {}).setdefault(a, 0)

    def sink_side(self, source: Hashable, sink: Hashable) -> set[Hashable]:
        """The nodes on the sink's side of the minimum cut; of several minimum cuts, the one nearest the sink."""
        self.room.setdefault(source, {})
        self.room.setdefault(sink, {})
        while level := self._levels(source, sink):
            edges = {node: iter(list(out)) for node, out in self.room.items()}
            while self._push(source, sink, level, edges):
                pass
        side, queue = {sink}, [sink]
        for node in queue:
            for before in self.room[node]:
                if before not in side and self.room[before].get(node, 0) > 0:
                    side.add(before)
                    queue.append(before)
        return side

    def _levels(self, source: Hashable, sink: Hashable) -> dict[Hashable, int]:
        """The distance of each node from the source; empty if the sink is unreachable."""
        level, queue = {source: 0}, [source]
        for node in queue:
            for after, room in self.room[node].items():
                if room > 0 and after not in level:
                    level[after] = level[node] + 1
                    queue.append(after)
        return level if sink in level else {}

    def _push(
        self, source: Hashable, sink: Hashable, level: dict[Hashable, int], edges: dict[Hashable, Iterator[Hashable]]
    ) -> int:
        """Push the maximum flow along one path whose levels increase by one; 0 if there is no such path."""
        path = [source]
        while path[-1] != sink:
            node = path[-1]
            onward = (b for b in edges[node] if self.room[node][b] > 0 and level.get(b) == level[node] + 1)
            after = next(onward, None)
            if after is not None:
                path.append(after)
            elif len(path) == 1:
                return 0
            else:
                level[path.pop()] = -1
        steps = list(pairwise(path))
        amount = min(self.room[a][b] for a, b in steps)
        for a, b in steps:
            self.room[a][b] -= amount
            self.room[b][a] += amount
        for a, _ in steps:  # edges with capacity left may be used again
            edges[a] = iter(list(self.room[a]))
        return amount
