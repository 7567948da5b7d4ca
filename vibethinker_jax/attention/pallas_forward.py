"""Flash-attention forward kernel for TPU: visits the blocks of a run-time map, shares K/V among grouped query heads."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vibethinker_jax.attention import pallas_common as common
from vibethinker_jax.attention.block_map import ALL_VISIBLE, SOME_VISIBLE, Blocks, block_map
from vibethinker_jax.attention.contract import KeyHeads, PerQuery, QueryHeads
from vibethinker_jax.attention.pallas_common import HIDDEN, LANES, LOG2_E, LOWEST, matmul, spread
from vibethinker_jax.attention.visibility import Keys, Queries, pad_keys, pad_queries


def forward(
    q: QueryHeads,
    k: KeyHeads,
    v: KeyHeads,
    queries: Queries,
    keys: Keys,
    *,
    blocks: Blocks,
    interpret: bool | pltpu.InterpretParams = False,
    out_dtype: jax.typing.DTypeLike = jnp.float32,
) -> tuple[QueryHeads, PerQuery]:
    """(softmax(q k^T / sqrt(head_dim)) v over the visible keys, log-sum-exp of the scaled scores).

    A query that sees no key gives 0 and -inf.

    Args:
        q, k, v: float32 (multiplied in full precision) or bfloat16. Query head h reads KV head
            h // (heads / kv_heads). Lengths need not be multiples of the blocks.
        queries, keys: who sees whom.
        blocks: queries and keys of one step; multiples of 128, cut down to the sequences.
        interpret: run the kernel's arithmetic on any device, for tests; with parameters, simulate a TPU's memory too.
        out_dtype: of the first result; the second is float32.

    Raises:
        UserError: blocks or a head_dim that the kernel cannot tile.
    """
    batch, heads, tokens, head_dim = q.shape
    group = heads // k.shape[1]
    block_q, block_kv = blocks = common.fit_blocks(blocks, tokens, k.shape[2], head_dim, interpret)
    q, k, v = common.pad_tokens(q, block_q), common.pad_tokens(k, block_kv), common.pad_tokens(v, block_kv)
    queries, keys = pad_queries(queries, block_q), pad_keys(keys, block_kv)
    steps = common.list_steps(block_map(queries, keys, block_q, block_kv))

    # Places in the grid: (row of the batch, query head, step).
    def query_block(row: jax.Array, step: jax.Array, packed: jax.Array) -> jax.Array:
        return common.row_of(packed[row * steps.steps_per_row + step])

    def key_block(row: jax.Array, step: jax.Array, packed: jax.Array) -> jax.Array:
        return common.column_of(packed[row * steps.steps_per_row + step])

    q_spec = pl.BlockSpec((None, None, block_q, head_dim), lambda r, h, i, s: (r, h, query_block(r, i, s), 0))
    kv_spec = pl.BlockSpec(
        (None, None, block_kv, head_dim), lambda r, h, i, s: (r, lax.div(h, group), key_block(r, i, s), 0)
    )
    out, log_sum_exp = pl.pallas_call(
        functools.partial(_kernel, steps_per_row=steps.steps_per_row, sub_tile=_sub_tile(block_kv)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, heads, steps.longest),
            in_specs=[
                q_spec,
                kv_spec,
                kv_spec,
                pl.BlockSpec((None, 2, block_q), lambda r, h, i, s: (r, 0, query_block(r, i, s))),
                pl.BlockSpec((None, 1, block_kv), lambda r, h, i, s: (r, 0, key_block(r, i, s))),
            ],
            out_specs=[
                q_spec,
                pl.BlockSpec((None, None, 1, block_q), lambda r, h, i, s: (r, h, 0, query_block(r, i, s))),
            ],
            scratch_shapes=[
                pltpu.VMEM((block_q, LANES), jnp.float32),
                pltpu.VMEM((block_q, min(LANES, block_kv)), jnp.float32),
                pltpu.VMEM((block_q, head_dim), jnp.float32),
                pltpu.VMEM((2, block_q, LANES), jnp.int32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, out_dtype),
            jax.ShapeDtypeStruct((batch, heads, 1, q.shape[2]), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=common.VMEM_LIMIT_BYTES,
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name="attention_forward",
    )(steps.packed, q, k, v, common.interval_rows(queries), common.key_row(keys))
    return out[:, :, :tokens], log_sum_exp[:, :, 0, :tokens]


def _kernel(
    # Prefetched, inputs
    steps: jax.Ref,
    q: jax.Ref,
    k: jax.Ref,
    v: jax.Ref,
    interval_row: jax.Ref,
    key_row: jax.Ref,
    # Results
    out: jax.Ref,
    log_sum_exp: jax.Ref,
    # Scratch
    highest: jax.Ref,
    total: jax.Ref,
    weighted: jax.Ref,
    interval: jax.Ref,
    *,
    steps_per_row: int,
    sub_tile: int,
) -> None:
    """One step: a block of queries of one head against a block of keys.

    Of the keys so far, highest[block_q, LANES] is the largest score, the same in every lane; total[block_q, LANES] the
    sum of powers, lane by lane (lanes are added once, at the end); weighted[block_q, head_dim] the sum of values.
    """
    step = steps[pl.program_id(0) * steps_per_row + pl.program_id(2)]
    block_q, head_dim = q.shape
    # Scores stay unscaled: the factor 1/sqrt(head_dim) costs nothing where the exponent changes its base.
    to_exponent = head_dim**-0.5 * LOG2_E

    @pl.when(common.is_first(step))
    def start() -> None:
        for place in range(2):
            interval[place] = jnp.broadcast_to(interval_row[place : place + 1], (LANES, block_q)).T
        highest[...] = jnp.full_like(highest, LOWEST)
        total[...] = jnp.zeros_like(total)
        weighted[...] = jnp.zeros_like(weighted)

    def accumulate(masked: bool) -> None:
        before, mass, values = highest[...], total[...], weighted[...]
        lanes = total.shape[1]
        parts = [pl.ds(start, sub_tile) for start in range(0, k.shape[0], sub_tile)]
        # Without a mask, the product of the next part is started before this part's softmax and overlaps it. A mask
        # takes the registers that this needs.
        ahead = 0 if masked else 1
        products = []
        for index, part in enumerate(parts):
            products += [matmul(q[...], k[later, :], (1, 1)) for later in parts[len(products) : index + ahead + 1]]
            scores = products[index]
            if masked:
                offset = key_row[:, part] - spread(interval[0], sub_tile)
                scores = jnp.where(offset <= spread(interval[1], sub_tile), scores, HIDDEN)
            now = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
            powers = jnp.exp2((scores - spread(now, sub_tile)) * to_exponent)
            decay = jnp.exp2((before - now) * to_exponent)
            mass = decay[:, :lanes] * mass + sum(powers[:, lane : lane + lanes] for lane in range(0, sub_tile, lanes))
            values = spread(decay, head_dim) * values + matmul(powers.astype(v.dtype), v[part, :], (1, 0))
            before = now
        highest[...], total[...], weighted[...] = before, mass, values

    pl.when(common.kind_of(step) == SOME_VISIBLE)(lambda: accumulate(masked=True))
    pl.when(common.kind_of(step) == ALL_VISIBLE)(lambda: accumulate(masked=False))

    @pl.when(common.is_last(step))
    def finish() -> None:
        mass = jnp.sum(total[...], axis=1, keepdims=True)
        # The largest score adds exactly 1, so only a query that saw nothing has less.
        out[...] = (weighted[...] * (1 / jnp.maximum(mass, 1.0))).astype(out.dtype)
        # One transposition brings both statistics into rows, where a logarithm takes an eighth of the registers.
        lane = lax.broadcasted_iota(jnp.int32, highest.shape, 1)
        rows = jnp.where(lane == 0, highest[...], mass).T
        logarithm = (rows[:1] * to_exponent + jnp.log2(rows[1:2])) * (1 / LOG2_E)
        log_sum_exp[...] = jnp.where(rows[1:2] > 0, logarithm, -jnp.inf)


def _sub_tile(block_kv: int) -> int:
    """Keys whose scores are in flight together: two or more parts per block let matmuls of one overlap the softmax of
    another, and fewer scores wait in memory."""
    return 512 if block_kv % 512 == 0 else block_kv
