"""Latent attention (DeepSeek-V2 and V3, 2024): keys and values of all heads are products of one latent.

    c = norm(x w_down);  k = [c w_k, rotate(x w_r)];  v = c w_v;  q = [n w_q, rotate(n w_s)] with n = norm(x w_n)

Without a cache, keys and values are computed. A cache holds the latent c and the rotated part of keys, one vector for
each position; queries are multiplied by w_k instead of keys, and the weighted latents by w_v (V2, section 2.1.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import meshdsl as md
from meshdsl.models import causal

__all__ = ["LatentAttention"]


@dataclass(frozen=True)
class LatentAttention:
    """The layer, with the sizes of a config of models/deepseek.py."""

    config: Any

    def __call__(
        self,
        x: md.Tensor,
        cache: md.Tensor | None = None,
        position: md.Tensor | int = 0,
        segments: md.Tensor | None = None,
    ) -> tuple[md.Tensor, md.Tensor | None]:
        """Self-attention [batch, length, model], and the cache with what it keeps of x, from `position` on."""
        c, precision = self.config, self.config.precision
        (_, wide, heads, _, _), value = c.dims(), md.Dim("value", c.d_value)
        latent, head, both = (md.Dim("latent", c.latent), md.Dim("head", c.d_head), self._sum("head", c.d_head))
        norm = partial(md.nn.rms_norm, eps=1e-6, precision=precision)
        attend = partial(md.attention, causal=True, scale=c.rotary.magnitude**2 / math.sqrt(both.size))

        def rotate(x: md.Tensor) -> md.Tensor:
            length = "length" if "length" in [d.name for d in x.dims] else None
            speeds = c.rotary.speeds(x.dims[-1])
            return md.nn.rotary(x, length, "head", offset=position, speeds=speeds, interleaved=True)

        def product(x: md.Tensor, w: md.Tensor, into: md.Dim) -> md.Tensor:
            y = precision.einsum(x, w, out=[*outer, into])
            return md.cast(md.prefer(y, "batch", heads), precision.compute)

        with md.scope("attention"):
            below = md.Dim("query_latent", c.query_latent)
            q = norm(causal.linear(x, "wq_down", [wide], [below], precision), below, name="norm_q")
            q = causal.linear(q, "wq", [below], [heads, both], precision)
            outer = q.dims[:-1]
            own, turned = md.slice(q, "head", 0, c.d_head), rotate(md.slice(q, "head", c.d_head, c.d_rotary))
            down = causal.linear(x, "wkv_down", [wide], [self._sum("latent", c.latent)], precision)
            kept = norm(md.slice(down, "latent", 0, c.latent), latent, name="norm_kv")
            key = rotate(md.rename(md.slice(down, "latent", c.latent, c.d_rotary), latent="head"))
            pair = md.Dim("key_value", c.d_head + c.d_value)
            w = md.param("wkv", [latent, heads, pair], init=md.init.lecun(fan_in=[latent]), dtype=precision.param)
            w_k = md.rename(md.slice(w, "key_value", 0, c.d_head), key_value="head")
            w_v = md.rename(md.slice(w, "key_value", c.d_head, c.d_value), key_value="value")
            if cache is None:
                shared = md.prefer(md.broadcast(key, [*outer, key.dims[-1]]), "batch", heads)
                k = md.concat([product(kept, w_k, head), shared], "head")
                y = attend(md.concat([own, turned], "head"), k, product(kept, w_v, value), segment_ids=segments)
            else:
                cache = md.nn.write_cache(cache, md.concat([kept, md.rename(key, head="latent")], "latent"), position)
                q = md.concat([product(own, w_k, latent), md.rename(turned, head="latent")], "latent")
                mixed = md.rename(md.slice(cache, "latent", 0, c.latent), latent="mixed")
                y = md.rename(attend(q, cache, mixed, over="latent", offset=position), mixed="latent")
                y = product(y, w_v, value)
            return causal.linear(y, "wo", [heads, value], [wide], precision), cache

    def _sum(self, name: str, size: int) -> md.Dim:
        """A dim of this size and of the part that rotates."""
        return md.Dim(name, size + self.config.d_rotary)

    def cache(self, layer: md.Dim, dims: Sequence[md.Dim]) -> md.Tensor:
        """Zeros [layer, batch, memory, latent]."""
        zero = md.cast(0, self.config.precision.compute)
        return md.broadcast(zero, [layer, *dims, self._sum("latent", self.config.latent)])
