"""Context parallelism by gathering: every device gets all K/V of its rows and attends with its own queries.

The backward pass gathers again (nothing gathered is ever kept) and sums dK/dV over the devices while scattering them.
K/V travel sequence-major, `[seq, everything else]`: gathered and scattered along their leading dimension, they are
contiguous on the links, and the compiler keeps the scatter what it is instead of reducing whole arrays everywhere.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from vibethinker_jax.attention.backends import Backend
from vibethinker_jax.attention.block_map import Blocks
from vibethinker_jax.attention.contract import Attended, Gradients, KeyHeads, PerQuery, QueryHeads
from vibethinker_jax.attention.visibility import Keys, Queries
from vibethinker_jax.parallel.collectives import reduce_scatter


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
        functools.partial(_forward, backend, axis),
        functools.partial(_backward, backend, axis, shards),
        backend.default_blocks,
    )


def _forward(
    backend: Backend,
    axis: str,
    q: QueryHeads,
    k: KeyHeads,
    v: KeyHeads,
    queries: Queries,
    keys: Keys,
    *,
    blocks: Blocks,
) -> Attended:
    k, v, keys = _gather_row(axis, k, v, keys)
    return backend.forward(q, k, v, queries, keys, blocks=blocks)


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
    k, v, keys = _gather_row(axis, k, v, keys)
    dq, dk, dv = backend.backward(q, k, v, queries, keys, d_out, log_sum_exp, delta, blocks=blocks)
    return dq, *(_from_rows(reduce_scatter(_to_rows(x), axis, shards, axis=0), x) for x in (dk, dv))


def _gather_row(axis: str, k: jax.Array, v: jax.Array, keys: Keys) -> tuple[jax.Array, jax.Array, Keys]:
    k, v = (_from_rows(lax.all_gather(_to_rows(x), axis, tiled=True), x) for x in (k, v))
    return k, v, lax.all_gather(keys, axis, axis=1, tiled=True)


def _to_rows(array: Float[Array, "batch kv_heads seq head_dim"]) -> Float[Array, "seq width"]:
    """Sequence-major, with all that a token has in one row."""
    return array.transpose(2, 0, 1, 3).reshape(array.shape[2], -1)


def _from_rows(
    rows: Float[Array, "seq width"], like: Float[Array, "batch kv_heads other_seq head_dim"]
) -> Float[Array, "batch kv_heads seq head_dim"]:
    """Undoes `_to_rows` for an array that differs from `like` in its sequence length only."""
    batch, kv_heads, _, head_dim = like.shape
    return jnp.transpose(rows.reshape(-1, batch, kv_heads, head_dim), (1, 2, 0, 3))
