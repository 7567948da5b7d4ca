"""Flash-attention backward kernel for TPU: dQ, dK and dV in one pass over the blocks, with five matmuls per block."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from vibethinker_jax.attention import pallas_common as common
from vibethinker_jax.attention.block_map import ALL_VISIBLE, SOME_VISIBLE, Blocks, transposed_block_map
from vibethinker_jax.attention.contract import Gradients, KeyHeads, PerQuery, QueryHeads
from vibethinker_jax.attention.pallas_common import HIDDEN, LANES, LOG2_E, LOWEST, matmul, spread
from vibethinker_jax.attention.visibility import Keys, Queries, pad_keys, pad_queries

# dQ of all query heads of one KV head stays in vector memory while the kernel walks over the keys. This much of it (8
# heads of 128 for 4,096 queries) fits twice: writing it out overlaps the start of the next KV head.
RESIDENT_BYTES = 16 * 2**20


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
    interpret: bool | pltpu.InterpretParams = False,
) -> Gradients:
    """Gradients of q, k and v, all float32, as far as these keys contribute to them.

    Args:
        q, k, v, queries, keys, blocks, interpret: as in `pallas_forward.forward`.
        d_out: gradient of the result, in q's dtype.
        log_sum_exp: float32, of each query over all keys anywhere; -inf gives zeros.
        delta: float32, sum(d_out * out, -1).

    Raises:
        UserError: blocks or a head_dim that the kernel cannot tile.
    """
    tokens, known, head_dim = q.shape[2], k.shape[2], q.shape[3]
    blocks = common.fit_blocks(blocks, tokens, known, head_dim, interpret)
    chunk = _chunk_tokens(tokens, blocks.q, bytes_per_token=q.shape[1] // k.shape[1] * head_dim * 4)

    k, v, keys = common.pad_tokens(k, blocks.kv), common.pad_tokens(v, blocks.kv), pad_keys(keys, blocks.kv)
    # exp(score - log_sum_exp) is a power of two here; a query that saw nothing gets an exponent that makes it zero.
    exponents = jnp.where(jnp.isneginf(log_sum_exp), -LOWEST, log_sum_exp * LOG2_E)
    statistics = common.pad_tokens(jnp.stack([exponents, delta], axis=-1), chunk).swapaxes(2, 3)
    q, d_out, queries = common.pad_tokens(q, chunk), common.pad_tokens(d_out, chunk), pad_queries(queries, chunk)
    gradients = functools.partial(_chunk_gradients, k=k, v=v, keys=keys, blocks=blocks, interpret=interpret)

    def add_chunk(sums: tuple[jax.Array, jax.Array], start: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        def cut(x: jax.Array, axis: int) -> jax.Array:
            return lax.dynamic_slice_in_dim(x, start, chunk, axis)

        interval = Queries(cut(queries.low, 1), cut(queries.high, 1))
        dq, dk, dv = gradients(cut(q, 2), interval, cut(d_out, 2), cut(statistics, 3))
        return (sums[0] + dk, sums[1] + dv), dq

    if q.shape[2] == chunk:
        dq, dk, dv = gradients(q, queries, d_out, statistics)
    else:
        zeros = jnp.zeros(k.shape, jnp.float32)
        (dk, dv), dq = lax.scan(add_chunk, (zeros, zeros), jnp.arange(0, q.shape[2], chunk))
        dq = jnp.moveaxis(dq, 0, 2).reshape(q.shape)
    return dq[:, :, :tokens], dk[:, :, :known], dv[:, :, :known]


def _chunk_tokens(tokens: int, block_q: int, bytes_per_token: int) -> int:
    """Queries whose dQ is resident at once: whole blocks, spread evenly over as few chunks as possible."""
    blocks = pl.cdiv(tokens, block_q)
    chunks = pl.cdiv(blocks, max(1, RESIDENT_BYTES // (bytes_per_token * block_q)))
    return block_q * pl.cdiv(blocks, chunks)


def _chunk_gradients(
    q: QueryHeads,
    queries: Queries,
    d_out: QueryHeads,
    statistics: Float[Array, "batch heads 2 queries"],
    *,
    k: KeyHeads,
    v: KeyHeads,
    keys: Keys,
    blocks: Blocks,
    interpret: bool | pltpu.InterpretParams,
) -> Gradients:
    """The gradients from as many queries as fit; all lengths are multiples of the blocks."""
    batch, heads, tokens, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    block_q, block_kv = blocks
    steps = common.list_steps(transposed_block_map(queries, keys, block_q, block_kv))

    # Places in the grid: (row of the batch, KV head, step, query head of the KV head).
    def query_block(row: jax.Array, step: jax.Array, packed: jax.Array) -> jax.Array:
        return common.column_of(packed[row * steps.steps_per_row + step])

    def key_block(row: jax.Array, step: jax.Array, packed: jax.Array) -> jax.Array:
        return common.row_of(packed[row * steps.steps_per_row + step])

    q_spec = pl.BlockSpec(
        (None, None, block_q, head_dim), lambda r, h, i, g, s: (r, h * group + g, query_block(r, i, s), 0)
    )
    kv_spec = pl.BlockSpec((None, None, block_kv, head_dim), lambda r, h, i, g, s: (r, h, key_block(r, i, s), 0))
    dq, dk, dv = pl.pallas_call(
        functools.partial(_kernel, steps_per_row=steps.steps_per_row, sub_tile=_sub_tile(block_kv)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, kv_heads, steps.longest, group),
            in_specs=[
                q_spec,
                q_spec,
                kv_spec,
                kv_spec,
                pl.BlockSpec((None, 2, block_q), lambda r, h, i, g, s: (r, 0, query_block(r, i, s))),
                pl.BlockSpec((None, 1, block_kv), lambda r, h, i, g, s: (r, 0, key_block(r, i, s))),
                pl.BlockSpec(
                    (None, None, 2, block_q), lambda r, h, i, g, s: (r, h * group + g, 0, query_block(r, i, s))
                ),
            ],
            out_specs=[
                pl.BlockSpec((None, None, group, head_dim, tokens), lambda r, h, i, g, s: (r, h, 0, 0, 0)),
                kv_spec,
                kv_spec,
            ],
            scratch_shapes=[pltpu.VMEM((block_kv, LANES), jnp.int32), pltpu.VMEM((head_dim, block_kv), k.dtype)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, kv_heads, group, head_dim, tokens), jnp.float32),
            jax.ShapeDtypeStruct(k.shape, jnp.float32),
            jax.ShapeDtypeStruct(k.shape, jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=common.VMEM_LIMIT_BYTES,
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name="attention_backward",
    )(steps.packed, q, d_out, k, v, common.interval_rows(queries), common.key_row(keys), statistics)
    return (dq.swapaxes(3, 4) * head_dim**-0.5).reshape(q.shape), dk, dv


def _kernel(
    # Prefetched, inputs
    steps: jax.Ref,
    q: jax.Ref,
    d_out: jax.Ref,
    k: jax.Ref,
    v: jax.Ref,
    interval: jax.Ref,
    key_row: jax.Ref,
    statistics: jax.Ref,
    # Results
    dq: jax.Ref,
    dk: jax.Ref,
    dv: jax.Ref,
    # Scratch
    key_column: jax.Ref,
    k_transposed: jax.Ref,
    *,
    steps_per_row: int,
    sub_tile: int,
) -> None:
    """One step: a block of keys of one KV head against a block of queries of one of its query heads.

    Scores are `[keys, queries]`, so that the statistics of the queries are rows, which broadcast for free, and so that
    dK, dV and (transposed, as k^T dS) dQ are plain products: no block of scores is ever transposed. dq[query heads of
    the KV head, head_dim, queries] stays for all steps of the KV head, dk and dv for all of the block of keys.
    """
    index, member = pl.program_id(2), pl.program_id(3)
    step = steps[pl.program_id(0) * steps_per_row + index]
    block_q, head_dim = q.shape
    block_kv = k.shape[0]
    to_exponent = head_dim**-0.5 * LOG2_E

    @pl.when((index == 0) & (member == 0))
    def start_kv_head() -> None:
        @pl.loop(0, dq.shape[0])
        def clear_head(head: jax.Array) -> None:
            @pl.loop(0, head_dim, step=8)
            def clear(row: jax.Array) -> None:
                dq[head, pl.ds(pl.multiple_of(row, 8), 8), :] = jnp.zeros((8, dq.shape[2]), dq.dtype)

    @pl.when(common.is_first(step) & (member == 0))
    def start_key_block() -> None:
        dk[...] = jnp.zeros_like(dk)
        dv[...] = jnp.zeros_like(dv)
        key_column[...] = jnp.broadcast_to(key_row[...], (LANES, block_kv)).T
        k_transposed[...] = k[...].T

    def accumulate(masked: bool) -> None:
        d_query = jnp.zeros((head_dim, block_q), jnp.float32)
        for start in range(0, block_kv, sub_tile):
            part = pl.ds(start, sub_tile)
            scores = matmul(k[part, :], q[...], (1, 1))
            if masked:
                offset = spread(key_column[part, :], block_q) - interval[:1]
                scores = jnp.where(offset <= interval[1:], scores, HIDDEN)
            probabilities = jnp.exp2(scores * to_exponent - statistics[:1])
            dv[part, :] += matmul(probabilities.astype(q.dtype), d_out[...], (1, 0))
            d_probabilities = matmul(v[part, :], d_out[...], (1, 1))
            d_scores = (probabilities * (d_probabilities - statistics[1:])).astype(q.dtype)
            dk[part, :] += matmul(d_scores, q[...], (1, 0))
            d_query += matmul(k_transposed[:, part], d_scores, (1, 0))
        columns = pl.ds(pl.multiple_of(common.column_of(step) * block_q, block_q), block_q)
        dq[member, :, columns] += d_query

    pl.when(common.kind_of(step) == SOME_VISIBLE)(lambda: accumulate(masked=True))
    pl.when(common.kind_of(step) == ALL_VISIBLE)(lambda: accumulate(masked=False))

    @pl.when(common.is_last(step) & (member == pl.num_programs(3) - 1))
    def finish_key_block() -> None:
        dk[...] *= head_dim**-0.5


def _sub_tile(block_kv: int) -> int:
    """Keys whose scores are in flight together: two or more parts per block let matmuls of one overlap the arithmetic
    of another."""
    return 512 if block_kv % 512 == 0 else block_kv
