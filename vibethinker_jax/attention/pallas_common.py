"""What the two TPU kernels share: the list of steps they walk, numbers of the softmax, block sizes, padding."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from vibethinker_jax.attention.block_map import BlockMap, Blocks
from vibethinker_jax.attention.dense import matmul_precision
from vibethinker_jax.attention.visibility import Queries
from vibethinker_jax.errors import UserError

LANES = 128
# The hardware has powers of two, so the softmax runs on them: exp(x) = exp2(x * LOG2_E).
LOG2_E = math.log2(math.e)
# A hidden score lies so far below LOWEST, where running maxima start, that its power is exactly zero even in a row that
# has seen no key yet. Both are finite, so no difference of them is NaN.
HIDDEN = -1e38
LOWEST = -1e30
# Cost by tools/kernel_profile.py per 512 x 1,024 scores (forward, backward): v5e 2,168 and 5,238 bundles, v6e 1,688 and
# 2,732; with blocks of 512 x 1,024, v5e 2,290 and 5,356, v6e 1,910 and 2,952. Twice as many keys save 2% more on v5e,
# but visit more hidden scores at the edges of documents.
DEFAULT_BLOCKS = Blocks(1024, 1024)
# Vector memory that a kernel may use, of 64 MiB per core on v5p and 128 MiB on v5e and v6e.
VMEM_LIMIT_BYTES = 56 * 2**20
# Scalar memory is 1 MiB per core on v5e, v5p and v6e; the compiler needs some of it.
MAX_STEPS = 512 * 1024 // 4

# A step is one int32. From the lowest bit: kind (2), first of its row (1), last of its row (1), column (14), row (13).
_FIRST_SHIFT, _LAST_SHIFT, _COLUMN_SHIFT, _ROW_SHIFT = 2, 3, 4, 18
_MAX_COLUMNS, _MAX_ROWS = 1 << (_ROW_SHIFT - _COLUMN_SHIFT), 1 << (31 - _ROW_SHIFT)


class Steps(NamedTuple):
    """The blocks that a kernel visits, in its order.

    packed: `batch * steps_per_row` steps; unpack one with `kind_of`, `is_first`, `is_last`, `column_of`, `row_of`.
    steps_per_row: room for every block of a batch row (static).
    longest: steps of the busiest batch row: the extent of the grid.
    """

    packed: Int32[Array, "batch_x_steps"]
    steps_per_row: int
    longest: Int32[Array, ""]


def list_steps(blocks: BlockMap) -> Steps:
    """The active blocks of a map as one list per batch row, row of blocks by row of blocks.

    A row without an active block gets one step, so that its result is written. A list shorter than the longest goes on
    with steps that stay on its last block and do nothing.

    Raises:
        UserError: more blocks than scalar memory or the packed fields can hold.
    """
    batch, rows, columns = blocks.columns.shape
    steps_per_row = rows * columns
    if batch * steps_per_row > MAX_STEPS or rows > _MAX_ROWS or columns > _MAX_COLUMNS:
        raise UserError(
            f"attention blocks: {batch} batch rows of {rows} x {columns} blocks are more than a TPU kernel can list "
            f"({MAX_STEPS}); enlarge block_q or block_kv, or shard the batch or the sequence over more devices"
        )
    visits = jnp.maximum(blocks.counts, 1)
    ends = jnp.cumsum(visits, axis=-1)
    total = ends[:, -1:]
    index = jnp.arange(steps_per_row, dtype=jnp.int32)[None]
    listed = index < total
    step = jnp.minimum(index, total - 1)
    row = jax.vmap(lambda end, at: jnp.searchsorted(end, at, side="right"))(ends, step).astype(jnp.int32)
    length = jnp.take_along_axis(visits, row, axis=-1)
    place = step - (jnp.take_along_axis(ends, row, axis=-1) - length)
    column, kind = (
        jnp.take_along_axis(field.reshape(batch, steps_per_row), row * columns + place, axis=-1)
        for field in (blocks.columns, blocks.kinds)
    )
    first, last = (jnp.int32(listed & flag) for flag in (place == 0, place == length - 1))
    packed = (
        jnp.where(listed, kind, 0)
        | (first << _FIRST_SHIFT)
        | (last << _LAST_SHIFT)
        | (column << _COLUMN_SHIFT)
        | (row << _ROW_SHIFT)
    )
    return Steps(packed.reshape(-1), steps_per_row, total.max())


def kind_of(step: jax.Array) -> jax.Array:
    return step & ((1 << _FIRST_SHIFT) - 1)


def is_first(step: jax.Array) -> jax.Array:
    return (step & (1 << _FIRST_SHIFT)) != 0


def is_last(step: jax.Array) -> jax.Array:
    return (step & (1 << _LAST_SHIFT)) != 0


def column_of(step: jax.Array) -> jax.Array:
    return (step >> _COLUMN_SHIFT) & (_MAX_COLUMNS - 1)


def row_of(step: jax.Array) -> jax.Array:
    return step >> _ROW_SHIFT


def fit_blocks(blocks: Blocks, queries: int, keys: int, head_dim: int, interpret: object) -> Blocks:
    """The blocks, cut down to the sequences and checked.

    Raises:
        UserError: a size that the kernels cannot tile, or on a TPU a head_dim that they were not built for.
    """
    if not interpret and head_dim % (LANES // 2):
        raise UserError(f"head_dim is {head_dim}: the TPU attention kernels need a multiple of 64; use another backend")
    sizes = []
    for field, size, tokens in (("block_q", blocks.q, queries), ("block_kv", blocks.kv, keys)):
        if size <= 0 or ((size > LANES or not interpret) and size % LANES):
            raise UserError(f"{field} is {size}: the TPU attention kernels need a positive multiple of {LANES}")
        sizes.append(min(size, tokens + -tokens % min(size, LANES)))
    return Blocks(*sizes)


def pad_tokens(x: Float[Array, "batch heads tokens width"], multiple: int) -> Float[Array, "batch heads padded width"]:
    """Appends zeros until `multiple` divides the tokens."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % multiple), (0, 0)))


def interval_rows(queries: Queries) -> Int32[Array, "batch 2 queries"]:
    """The visible interval of each query as (low, its length), for a test of two operations.

    A query sees a key iff key - low <= high - low as unsigned numbers; with both sides shifted by -2**31 (here, and in
    `key_row`) a signed comparison decides the same. Arithmetic wraps around, which padding relies on.
    """
    return jnp.stack([queries.low, queries.high - queries.low + jnp.int32(-(2**31))], axis=1)


def key_row(keys: Int32[Array, "batch keys"]) -> Int32[Array, "batch 1 keys"]:
    return (keys + jnp.int32(-(2**31)))[:, None]


def matmul(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Product of two matrices over dimension contract[0] of a and contract[1] of b, accumulated in float32."""
    return lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=matmul_precision(a.dtype),
        preferred_element_type=jnp.float32,
    )


def spread(column: jax.Array, width: int) -> jax.Array:
    """A `[rows, LANES]` array with equal lanes as `[rows, width]`: no data moves between lanes."""
    return jnp.tile(column, (1, width // LANES)) if width % LANES == 0 else column[:, :width]
