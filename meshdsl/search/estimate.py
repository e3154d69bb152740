"""Seconds and bytes of candidates under weight updates and numbers of micro-batches, from one screen."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property

import numpy as np

from ..cost.machine import Machine
from ..ir import Var
from ..updates.weight_update import WeightUpdate
from .screen import COMPUTE, CRITICAL, KERNELS, MORE, PARTS, WEIGHTS, Numbers, Screen

EXPOSED = 0.5  # of the communication of weights: the first gathers and the last reductions of a loop's trip
KEPT_BY_OFFLOAD = 0.05  # of the saved values, which are in the host's memory


class Estimate:
    """The estimate of one step's graph under every candidate, and any update and number of micro-batches."""

    def __init__(self, screen: Screen, machine: Machine, offload: bool = False):
        self.screen, self.machine, self.axes = screen, machine, screen.axes
        self.saved = screen.saved * (KEPT_BY_OFFLOAD if offload else 1.0)
        self.host = 2 * screen.saved / machine.host_bandwidth if offload else screen.zero

    @cached_property
    def stages(self) -> dict[str, Numbers]:
        """By loop: the pipeline stages of its layers; only loops that a candidate has in stages."""
        every = {loop: self.axes.degree(loop) for loop in sorted(self.screen.work.loops)}
        return {loop: stages for loop, stages in every.items() if (stages > 1).any()}

    def of(self, update: WeightUpdate, microbatches: int) -> tuple[Numbers, Numbers]:
        """Seconds and peak bytes of every candidate; infinite seconds where it is illegal."""
        screen, total = self.screen, self.screen.zero
        hides = "all_gather" in self.machine.overlapped_by_compiler
        slots = screen.zero + 1  # micro-batches whose values a device has at once
        for loop, rows in screen.by_loop.items():
            compute = rows[COMPUTE] + rows[MORE] * (math.log(microbatches) / math.log(PARTS))
            compute = compute + rows[KERNELS] * microbatches * (self.machine.launch + self.machine.operation)
            weights = np.max(rows[WEIGHTS:], axis=0) * microbatches  # axes send side by side
            critical = rows[CRITICAL] + (0.0 if self.machine.pipelined else EXPOSED * weights)
            if loop in self.stages:
                stages = self.stages[loop]
                bubbles = 1 + (stages - 1) / microbatches
                compute, critical, weights = compute / stages * bubbles, critical / stages * bubbles, weights / stages
                slots = np.where(stages > 1, np.minimum(2 * stages - 1, microbatches), slots)
                total = np.where((stages > 1) & (microbatches < 2), math.inf, total)
            total = total + critical + (np.maximum(compute, weights) if hides else compute + weights)
        split = self.axes.degree(screen.work.batch.name) * microbatches
        idle = np.maximum(1.0, split / max(1, screen.work.batch.size)) if microbatches > 1 else 1.0
        total = total * idle  # a micro-batch has fewer samples than devices
        seconds, each, stored = self._updated(update, microbatches)
        total = np.maximum(total, self.host) + seconds + each * microbatches
        peak = stored + (self.saved * slots + screen.temporary) * (idle / microbatches)
        return np.where(screen.bad, math.inf, total), peak

    def _updated(self, update: WeightUpdate, microbatches: int) -> tuple[Numbers, Numbers, Numbers]:
        """Seconds of the update, seconds of gathers in each micro-batch, and bytes of weights, state and gradients."""
        once = each = stored = self.screen.zero
        shared = self.screen.axes.never  # where several devices repeat an update
        work, sharded = self.screen.work, update.mode != "replicated"
        state = sum(map(_elements, work.state)) / max(1, sum(map(_elements, work.weights)))
        for local, ways, pending in self._weights():
            size = local
            for k, on in pending:
                kinds = ("reduce_scatter", GRADIENT), ("all_gather", COMPUTED)
                reduced, gathered = (np.where(on, self.axes.seconds(kind, k, n * size), 0.0) for kind, n in kinds)
                if not sharded:
                    once = once + np.where(on, self.axes.seconds("all_reduce", k, GRADIENT * size), 0.0)
                elif update.regather:
                    each = each + reduced + 2 * gathered
                else:
                    once = once + reduced + gathered
                size = np.where(on, size / self.axes.sizes[k], size)
            shared = shared | (ways > 1)
            shards = ways if sharded else 1.0
            own = WEIGHT * local * (1 + state) / shards
            once = once + 2 * own / self.machine.hbm_bandwidth
            sums = GRADIENT * local / (shards if microbatches == 1 or update.regather else 1.0)
            each = each + 3 * sums * (microbatches > 1) / self.machine.hbm_bandwidth  # are added up
            gathered = COMPUTED * local * (ways > 1) * (sharded and not update.regather)
            gradients = sums * (2 if microbatches > 1 else 1)
            stored = stored + own + gathered + gradients
        return np.where(shared | (not sharded), once, math.inf), each, stored

    def _weights(self) -> Iterator[tuple[Numbers, Numbers, list[tuple[int, Numbers]]]]:
        """For each kind of weight: its elements on one device, the devices that repeat its update, and the axes."""
        screen = self.screen
        for key, pending in screen.pending.items():
            each = [v for v in screen.work.weights if screen.work.key_of(v) == key]
            local = sum((_elements(v) / screen.ways(screen.homes[v]) for v in each), screen.zero)
            on = [(k, where) for k, where in reversed([*enumerate(pending)]) if where.any()]  # inner axes first
            ways = math.prod((np.where(where, self.axes.sizes[k], 1.0) for k, where in on), start=screen.zero + 1)
            yield local, ways, on


WEIGHT, GRADIENT, COMPUTED = 4, 4, 2  # bytes of an element: stored weights, summed gradients, gathered weights


def _elements(v: Var) -> int:
    return math.prod(d.size for d in v.dims)
