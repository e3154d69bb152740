"""Lancet's first pass: weight gradients move behind all_to_alls of the backward pass (Jiang et al., 2024, Algorithm 1).

Rules that the paper does not state are taken from its published code: a gradient is available once the gradients that
it reads are placed; a window takes no gradient longer than twice its remaining time, unless it is empty; in the last
window where a gradient fits, it is placed regardless of its length. Only the order of computation changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..cost.fusion import Send
from .planner import Candidates, Planner
from .ranges import reductions_early
from .tasks import Task, Tasks, ordered


def dw(planner: Planner) -> Candidates:
    """The step with every weight gradient in the window that it fits best."""
    planner.need_exchanges()
    tasks = planner.tasks(planner.unrolled)
    order = dw_schedule(tasks)
    if order == list(tasks.all):
        raise planner.no_effect(
            "no weight gradient can move behind an all_to_all\n"
            "  use overlap='list', which moves every kind of computation"
        )
    yield "dw", ordered(tasks, reductions_early(order))


def _reach(tasks: Sequence[Task]) -> dict[Task, int]:
    """For every task, its direct and indirect dependencies as bits, by their numbers in the program."""
    above: dict[Task, int] = {}
    for task in tasks:
        bits = 0
        for source in task.needs:
            bits |= above[source] | 1 << source.number
        above[task] = bits
    return above


def weight_gradients(tasks: Tasks) -> dict[Task, list[Task]]:
    """For every all_to_all, the backward computation without a path to or from it.

    Of computation behind another reduction of the backward pass, there is none. Those of the forward pass do not count:
    every gradient depends on the number of targets.
    """
    above = _reach(tasks.all)
    exchanges = [task for task in tasks.all if task.sends and task.eqn.effect.exchanges]
    sends = [task for task in tasks.all if isinstance(task.step, Send) and task.eqn.backward]
    others = sum(1 << task.number for task in sends if task not in exchanges)
    labelled = [t for t in tasks.all if not t.sends and t.eqn.backward and not above[t] & others]
    return {
        exchange: [
            t for t in labelled if not (above[t] >> exchange.number & 1) and not (above[exchange] >> t.number & 1)
        ]
        for exchange in exchanges
    }


def dw_schedule(tasks: Tasks) -> list[Task]:
    """The tasks with every weight gradient in the window that it fits best."""
    free = weight_gradients(tasks)
    gradients = set[Task]().union(*free.values())
    windows = {exchange: {t for t in fitting if _fits(t, exchange, gradients)} for exchange, fitting in free.items()}
    last = {t: exchange for exchange, fitting in windows.items() for t in fitting}
    placed: dict[Task, Task] = {}

    def ready(fitting: Iterable[Task]) -> list[Task]:
        return [t for t in fitting if t not in placed and _available(t, gradients, placed)]

    for exchange, fitting in windows.items():
        left, empty = exchange.seconds, True
        while left > 0:
            best = min(ready(fitting), key=lambda t: (abs(left - t.seconds), t.number), default=None)
            if best is None or (best.seconds > 2 * left and not empty):
                break
            placed[best], left, empty = exchange, left - best.seconds, False
        for t in sorted((t for t in fitting if last[t] is exchange), key=lambda t: t.number):
            placed.update(dict.fromkeys(ready([t]), exchange))
    return _reordered(tasks, placed)


def _fits(task: Task, exchange: Task, gradients: set[Task]) -> bool:
    """True if a gradient may run right after an exchange: after the tasks it reads, and before its readers."""
    before = all(source.number < exchange.number for source in task.needs if source not in gradients)
    return before and all(reader.number > exchange.number for reader in task.readers if reader not in gradients)


def _available(task: Task, gradients: set[Task], placed: dict[Task, Task]) -> bool:
    return all(source in placed for source in task.needs if source in gradients)


def _reordered(tasks: Tasks, placed: dict[Task, Task]) -> list[Task]:
    """The program's order with every placed gradient behind its exchange, or later if its operands require it."""
    behind: dict[Task, list[Task]] = {}
    for task in tasks.all:
        if task in placed:
            behind.setdefault(placed[task], []).append(task)
    order: list[Task] = []
    for task in tasks.all:
        if task not in placed:
            order.append(task)
            order += behind.get(task, [])
    return _topological(order)


def _topological(preferred: Sequence[Task]) -> list[Task]:
    """The order closest to the wanted one in which every task follows the tasks it reads."""
    done: set[Task] = set()
    order: list[Task] = []
    for root in preferred:
        stack = [root]
        while stack:
            task = stack[-1]
            missing = [source for source in task.needs if source not in done]
            if task in done or not missing:
                stack.pop()
                if task not in done:
                    done.add(task)
                    order.append(task)
            else:
                stack += missing
    return order
