"""The zigzag order of a row: equal causal work on every shard of the sequence.

Later tokens see more keys, so contiguous shards work unequally and the last one sets the pace. Cut the row into 2P
chunks and give shard i the chunks i and 2P-1-i: their causal work adds up to the same for every i, which makes
attention over one long document 2 - 1/P times faster than contiguous shards.
"""

import numpy as np

from vibethinker_jax.errors import UserError


def zigzag_order(length: int, shards: int) -> np.ndarray:
    """int64[length] with order[new place] = old place: `row[order]` is the row in zigzag order.

    Args:
        length: tokens in a row.
        shards: P, the size of the mesh axis that the sequence is sharded over; 1 gives the identity.

    Raises:
        UserError: a row cannot be cut into 2P equal chunks.
    """
    if shards < 1:
        raise UserError(f"zigzag: mesh.context is {shards}; use a positive size")
    places = np.arange(length, dtype=np.int64)
    if shards == 1:
        return places
    if length % (2 * shards):
        raise UserError(
            f"zigzag: a sequence of {length} tokens cannot be cut into {2 * shards} equal chunks (2 x mesh.context "
            f"{shards}); use a sequence length that is a multiple of {2 * shards}"
        )
    chunks = places.reshape(2 * shards, -1)
    return np.stack([chunks[:shards], chunks[: shards - 1 : -1]], axis=1).reshape(-1)


def inverse_order(order: np.ndarray) -> np.ndarray:
    """int64[length] that undoes `order`: `row[order][inverse_order(order)]` is `row`."""
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order), dtype=order.dtype)
    return inverse
