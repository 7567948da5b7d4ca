"""Which blocks of the score matrix hold anything to compute: found at run time, from one range per block."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from vibethinker_jax.attention.visibility import PADDING_KEY, PADDING_LOW, Keys, Queries

NOTHING_VISIBLE, SOME_VISIBLE, ALL_VISIBLE = 0, 1, 2


class Blocks(NamedTuple):
    """Sizes of a block of scores, in tokens."""

    q: int
    kv: int


class BlockMap(NamedTuple):
    """For each row of blocks the columns to visit: those with anything visible first, in ascending order.

    columns: padded by repeating the last active column (0 where there is none), so that a kernel that walks over all
        columns fetches nothing new once the active ones are done.
    kinds: in the order of `columns`: NOTHING_VISIBLE (the padding), SOME_VISIBLE or ALL_VISIBLE (needs no mask).
    counts: active columns of the row.
    """

    columns: Int32[Array, "batch rows columns"]
    kinds: Int32[Array, "batch rows columns"]
    counts: Int32[Array, "batch rows"]


def block_map(queries: Queries, keys: Keys, block_q: int, block_kv: int) -> BlockMap:
    """Rows are blocks of queries, columns blocks of keys.

    Args:
        queries, keys: their lengths are multiples of the block sizes (callers append padding).
    """
    return _sorted_map(*_classify(queries, keys, block_q, block_kv))


def transposed_block_map(queries: Queries, keys: Keys, block_q: int, block_kv: int) -> BlockMap:
    """Rows are blocks of keys, columns blocks of queries; arguments as in `block_map`."""
    active, full = _classify(queries, keys, block_q, block_kv)
    return _sorted_map(active.swapaxes(1, 2), full.swapaxes(1, 2))


def _classify(
    queries: Queries, keys: Keys, block_q: int, block_kv: int
) -> tuple[Bool[Array, "batch query_blocks key_blocks"], Bool[Array, "batch query_blocks key_blocks"]]:
    """(may hold a visible pair, every pair is visible). Work is O(blocks^2), never O(tokens^2).

    The first errs on the side of visiting: ranges may overlap although no pair is visible.
    """
    low = queries.low.reshape(queries.low.shape[0], -1, block_q, 1)
    high = queries.high.reshape(low.shape)
    codes = keys.reshape(keys.shape[0], 1, -1, block_kv)
    smallest, largest = codes.min(-1), codes.max(-1)
    # The extremes of padding are out of every range, so a block of nothing but padding fails a comparison below.
    smallest_real = jnp.where(codes == PADDING_KEY, PADDING_LOW, codes).min(-1)
    active = (smallest_real <= high.max(2)) & (largest >= low.min(2))
    full = (low.max(2) <= smallest) & (largest <= high.min(2))
    return active, full


def _sorted_map(active: Bool[Array, "batch rows columns"], full: Bool[Array, "batch rows columns"]) -> BlockMap:
    counts = active.sum(-1, dtype=jnp.int32)
    order = jnp.argsort(~active, axis=-1, stable=True).astype(jnp.int32)
    kinds = jnp.where(active, jnp.where(full, ALL_VISIBLE, SOME_VISIBLE), NOTHING_VISIBLE).astype(jnp.int32)
    place = jax.lax.broadcasted_iota(jnp.int32, order.shape, 2)
    last = jnp.maximum(counts - 1, 0)[..., None]
    columns = jnp.take_along_axis(order, jnp.minimum(place, last), axis=-1)
    return BlockMap(
        columns=jnp.where(counts[..., None] > 0, columns, 0),
        kinds=jnp.take_along_axis(kinds, order, axis=-1),
        counts=counts,
    )
