"""Attention by blocks of scores in plain jax.numpy: any device, memory linear in the sequence.

Loops over the blocks have trip counts taken from the block map at run time, so a row of packed documents costs what its
documents cost. No automatic differentiation passes through the loops: `backward` is written out, and one pass over the
key blocks yields all three gradients.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from vibethinker_jax.attention.block_map import Blocks, block_map, transposed_block_map
from vibethinker_jax.attention.contract import Attended, Gradients, KeyHeads, PerQuery, QueryHeads
from vibethinker_jax.attention.dense import matmul_precision
from vibethinker_jax.attention.visibility import Keys, Queries, pad_keys, pad_queries, visible


def forward(
    q: QueryHeads,
    k: KeyHeads,
    v: KeyHeads,
    queries: Queries,
    keys: Keys,
    *,
    blocks: Blocks,
) -> Attended:
    """Attention over the visible keys and each query's log-sum-exp of scaled scores.

    A query that sees no key has output 0 and log-sum-exp -inf. Lengths need not be multiples of the blocks.
    """
    length = q.shape[2]
    queries, keys = pad_queries(queries, blocks.q), pad_keys(keys, blocks.kv)
    q = _pad(_group(q, k), blocks.q)
    k, v = _pad(k, blocks.kv), _pad(v, blocks.kv)
    columns, _, counts = block_map(queries, keys, blocks.q, blocks.kv)
    rows, group = counts.shape[1], q.shape[2]

    def query_block(index: Int32[Array, ""]) -> tuple[jax.Array, jax.Array]:
        batch, row = index // rows, index % rows
        q_block = _cut_queries(q, batch, row, blocks.q)
        bounds = _cut_bounds(queries, batch, row, blocks.q, group)

        def key_block(visit: Int32[Array, ""], running: _Softmax) -> _Softmax:
            column = columns[batch, row, visit]
            seen = visible(bounds, _cut(keys, batch, column, blocks.kv))
            k_block, v_block = (_cut(x, batch, column, blocks.kv) for x in (k, v))
            return running.add(_scores(q_block, k_block), seen, v_block)

        softmax = lax.fori_loop(0, counts[batch, row], key_block, _Softmax.empty(q_block.shape))
        return tuple(x.reshape(x.shape[0] * group, blocks.q, -1) for x in softmax.result())

    out, log_sum_exp = lax.map(query_block, jnp.arange(counts.size, dtype=jnp.int32))
    batch = counts.shape[0]
    return _join(out, batch)[:, :, :length], _join(log_sum_exp, batch)[:, :, :length, 0]


def backward(
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
    """The gradients that these keys account for.

    Args:
        log_sum_exp: over all keys that the query sees, of which these may be a part.
        delta: sum(d_out * out) over head_dim, with the output over all keys.
    """
    shape, length = q.shape, k.shape[2]
    queries, keys = pad_queries(queries, blocks.q), pad_keys(keys, blocks.kv)
    # A query without any key subtracts +inf: its probabilities are 0 wherever it looks.
    log_sum_exp = jnp.where(log_sum_exp == -jnp.inf, jnp.inf, log_sum_exp)
    q, d_out, log_sum_exp, delta = (
        _pad(_group(x, k), blocks.q) for x in (q, d_out, log_sum_exp[..., None], delta[..., None])
    )
    k, v = _pad(k, blocks.kv), _pad(v, blocks.kv)
    columns, _, counts = transposed_block_map(queries, keys, blocks.q, blocks.kv)
    rows, group = counts.shape[1], q.shape[2]

    def key_block(dq: jax.Array, index: Int32[Array, ""]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        batch, row = index // rows, index % rows
        codes = _cut(keys, batch, row, blocks.kv)
        k_block, v_block = (_cut(x, batch, row, blocks.kv) for x in (k, v))

        def query_block(visit: Int32[Array, ""], gradients: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            dq, dk, dv = gradients
            column = columns[batch, row, visit]
            seen = visible(_cut_bounds(queries, batch, column, blocks.q, group), codes)
            q_block, d_block, subtracted, delta_block = (
                _cut_queries(x, batch, column, blocks.q) for x in (q, d_out, log_sum_exp, delta)
            )
            probabilities = jnp.where(seen, jnp.exp(_scores(q_block, k_block) - subtracted), 0.0)
            d_probabilities = _matmul("kqd,ksd->kqs", d_block, v_block)
            d_scores = probabilities * (d_probabilities - delta_block) * q.shape[-1] ** -0.5
            d_scores, probabilities = d_scores.astype(q.dtype), probabilities.astype(q.dtype)
            dq = _add_queries(dq, _matmul("kqs,ksd->kqd", d_scores, k_block), batch, column * blocks.q)
            dk = dk + _matmul("kqs,kqd->ksd", d_scores, q_block)
            dv = dv + _matmul("kqs,kqd->ksd", probabilities, d_block)
            return dq, dk, dv

        zeros = jnp.zeros(k_block.shape, jnp.float32)
        dq, dk, dv = lax.fori_loop(0, counts[batch, row], query_block, (dq, zeros, zeros))
        return dq, (dk, dv)

    indices = jnp.arange(counts.size, dtype=jnp.int32)
    dq, (dk, dv) = lax.scan(key_block, jnp.zeros(q.shape, jnp.float32), indices)
    dq = dq[..., : shape[2], :].reshape(shape)
    return dq, _join(dk, counts.shape[0])[:, :, :length], _join(dv, counts.shape[0])[:, :, :length]


class _Softmax(NamedTuple):
    """A softmax-weighted sum over the keys seen so far, relative to the largest score seen so far.

    A row is a query of one of the heads that read the same KV head.
    """

    weighted: Float32[Array, "kv_heads rows head_dim"]
    total: Float32[Array, "kv_heads rows 1"]
    highest: Float32[Array, "kv_heads rows 1"]

    @classmethod
    def empty(cls, shape: tuple[int, ...]) -> "_Softmax":
        column = (*shape[:-1], 1)
        return cls(jnp.zeros(shape, jnp.float32), jnp.zeros(column, jnp.float32), jnp.full(column, -jnp.inf))

    def add(
        self,
        scores: Float32[Array, "kv_heads rows keys"],
        seen: Bool[Array, "rows keys"],
        v: Float[Array, "kv_heads keys head_dim"],
    ) -> "_Softmax":
        # Masking a block that is wholly visible changes nothing and costs less than a branch around it would.
        scores = jnp.where(seen, scores, -jnp.inf)
        highest = jnp.maximum(self.highest, scores.max(-1, keepdims=True))
        # Until a query has seen a key, -inf minus -inf would be NaN.
        finite = jnp.where(highest == -jnp.inf, 0.0, highest)
        weights = jnp.exp(scores - finite)
        shrink = jnp.exp(self.highest - finite)
        weighted = self.weighted * shrink + _matmul("kqs,ksd->kqd", weights.astype(v.dtype), v)
        return _Softmax(weighted, self.total * shrink + weights.sum(-1, keepdims=True), highest)

    def result(
        self,
    ) -> tuple[
        Float32[Array, "kv_heads rows head_dim"],
        Float32[Array, "kv_heads rows 1"],
    ]:
        out = self.weighted / jnp.maximum(self.total, jnp.finfo(jnp.float32).tiny)
        return out, self.highest + jnp.log(self.total)


def _matmul(subscripts: str, left: jax.Array, right: jax.Array) -> jax.Array:
    precision = matmul_precision(right.dtype)
    return jnp.einsum(subscripts, left, right, precision=precision, preferred_element_type=jnp.float32)


def _scores(
    q: Float[Array, "kv_heads rows head_dim"], k: Float[Array, "kv_heads keys head_dim"]
) -> Float32[Array, "kv_heads rows keys"]:
    return _matmul("kqd,ksd->kqs", q, k) * q.shape[-1] ** -0.5


def _group(
    per_head: Float[Array, "batch heads queries width"], k: Float[Array, "batch kv_heads keys head_dim"]
) -> Float[Array, "batch kv_heads group queries width"]:
    """Splits the query heads by the KV head that they read."""
    batch, _, queries, width = per_head.shape
    return per_head.reshape(batch, k.shape[1], -1, queries, width)


def _pad(array: Float[Array, "*leading tokens width"], multiple: int) -> Float[Array, "*leading padded_tokens width"]:
    """Zeros appended until `multiple` divides the number of tokens."""
    missing = -array.shape[-2] % multiple
    return jnp.pad(array, [(0, 0)] * (array.ndim - 2) + [(0, missing), (0, 0)]) if missing else array


def _cut(array: jax.Array, batch: jax.Array, block: jax.Array, size: int) -> jax.Array:
    """One block of tokens of one row of the batch, without the batch dimension.

    Args:
        array: [batch, tokens], or [batch, ..., tokens, width].
    """
    axis = max(array.ndim - 2, 1)
    sizes = (1, *array.shape[1:axis], size, *array.shape[axis + 1 :])
    return lax.dynamic_slice(array, _start(array.ndim, axis, batch, block * size), sizes)[0]


def _cut_queries(
    array: Float[Array, "batch kv_heads group queries width"], batch: jax.Array, block: jax.Array, size: int
) -> Float[Array, "kv_heads rows width"]:
    """One block of queries of one row of the batch, the heads that read one KV head below each other.

    Two dimensions per matrix product keep the compiler from transposing blocks of scores in memory.
    """
    cut = _cut(array, batch, block, size)
    return cut.reshape(cut.shape[0], -1, cut.shape[-1])


def _cut_bounds(queries: Queries, batch: jax.Array, block: jax.Array, size: int, group: int) -> Queries:
    """The bounds that belong to the rows of `_cut_queries`."""
    return Queries(*(jnp.tile(_cut(bound, batch, block, size), group) for bound in queries))


def _add_queries(
    array: Float32[Array, "batch kv_heads group queries width"],
    rows: Float32[Array, "kv_heads rows width"],
    batch: jax.Array,
    token: jax.Array,
) -> Float32[Array, "batch kv_heads group queries width"]:
    """Adds rows as `_cut_queries` makes them to one row of the batch, from `token` on."""
    _, kv_heads, group, _, width = array.shape
    added = rows.reshape(1, kv_heads, group, -1, width)
    start = _start(array.ndim, 3, batch, token)
    return lax.dynamic_update_slice(array, lax.dynamic_slice(array, start, added.shape) + added, start)


def _start(rank: int, axis: int, batch: jax.Array, token: jax.Array) -> list[jax.Array]:
    start = [jnp.int32(0)] * rank
    start[0], start[axis] = batch, token
    return start


def _join(
    blocks: Float32[Array, "batch_x_rows heads tokens width"], batch: int
) -> Float32[Array, "batch heads seq width"]:
    """Puts the blocks of each row of the batch side by side."""
    _, heads, tokens, width = blocks.shape
    return blocks.reshape(batch, -1, heads, tokens, width).swapaxes(1, 2).reshape(batch, heads, -1, width)
