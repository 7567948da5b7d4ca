"""Context parallelism by a ring: K/V shards visit every device in turn, and no device ever holds more than a few.

In hop i device r works on the shard of device r - i. Each hop runs the same program on every device; how much work it
is follows from what the queries there see of that shard, and in the zigzag layout that is nearly the same for all. The
transfer for the next hop does not depend on the work of this one, so it runs beside it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from vibethinker_jax.attention.backends import Backend
from vibethinker_jax.attention.block_map import Blocks
from vibethinker_jax.attention.contract import Attended, Gradients, KeyHeads, PerQuery, QueryHeads
from vibethinker_jax.attention.visibility import Keys, Queries


def over_context(backend: Backend, axis: str, shards: int) -> Backend:
    """The backend for sequences sharded over a mesh axis; its functions run inside a shard_map.

    Queries, keys and everything that comes with them are local shards. The log-sum-exp is over all keys of the row.

    Args:
        axis: the mesh axis.
        shards: its size.
    """
    if shards == 1:
        return backend
    return Backend(
        backend.name,
        functools.partial(_forward, backend, axis, shards),
        functools.partial(_backward, backend, axis, shards),
        backend.default_blocks,
    )


def _forward(
    backend: Backend,
    axis: str,
    shards: int,
    q: QueryHeads,
    k: KeyHeads,
    v: KeyHeads,
    queries: Queries,
    keys: Keys,
    *,
    blocks: Blocks,
) -> Attended:
    def hop(carry: tuple[Any, ...], _: None) -> tuple[tuple[Any, ...], None]:
        visitor, merged = carry
        following = _pass_on(visitor, axis, shards)
        part = backend.forward(q, *visitor[:2], queries, visitor[2], blocks=blocks)
        return (following, merge(*merged, *part)), None

    nothing = jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[:3], -jnp.inf, jnp.float32)
    (_, merged), _ = lax.scan(hop, ((k, v, keys), nothing), length=shards)
    return merged


def _backward(
    backend: Backend,
    axis: str,
    shards: int,
    q: QueryHeads,
    k: KeyHeads,
    v: KeyHeads,
    queries: Queries,
    keys: Keys,
    d_out: QueryHeads,
    log_sum_exp: PerQuery,
    delta: PerQuery,
    *,
    blocks: Blocks,
) -> Gradients:
    """dK/dV travel with their shard, one hop behind: what a hop computed leaves beside the next one's work."""

    def hop(carry: tuple[Any, ...], _: None) -> tuple[tuple[Any, ...], None]:
        visitor, dq, arrived, pending = carry
        following = _pass_on(visitor, axis, shards)
        # Both belong to the shard of the previous hop, and move to where that shard is now.
        arrived = _pass_on(jax.tree.map(jnp.add, arrived, pending), axis, shards)
        part, *pending = backend.backward(
            q, *visitor[:2], queries, visitor[2], d_out, log_sum_exp, delta, blocks=blocks
        )
        return (following, dq + part, arrived, tuple(pending)), None

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (k, v))
    start = ((k, v, keys), jnp.zeros(q.shape, jnp.float32), zeros, zeros)
    (_, dq, arrived, pending), _ = lax.scan(hop, start, length=shards)
    dk, dv = _pass_on(jax.tree.map(jnp.add, arrived, pending), axis, shards)
    return dq, dk, dv


def merge(
    out: Float32[Array, "batch heads queries head_dim"],
    log_sum_exp: PerQuery,
    other_out: Float32[Array, "batch heads queries head_dim"],
    other_log_sum_exp: Float32[Array, "batch heads queries"],
) -> Attended:
    """Attention over two disjoint sets of keys from the attention over each.

    A side without keys (log-sum-exp -inf) leaves the other exactly as it is; without keys on both sides the result has
    none.
    """
    highest = jnp.maximum(log_sum_exp, other_log_sum_exp)
    finite = jnp.where(highest == -jnp.inf, 0.0, highest)
    weight, other_weight = jnp.exp(log_sum_exp - finite), jnp.exp(other_log_sum_exp - finite)
    total = weight + other_weight
    divisor = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    merged = out * (weight / divisor)[..., None] + other_out * (other_weight / divisor)[..., None]
    return merged, finite + jnp.log(total)


def _pass_on(tree: Any, axis: str, shards: int) -> Any:
    """Sends every array to the next device of the ring."""
    return lax.ppermute(tree, axis, [(device, (device + 1) % shards) for device in range(shards)])
