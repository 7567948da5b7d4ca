"""Sums over the documents of packed rows, and back: the two directions between tokens and responses.

Segment s of a row is document s of it, counted from 1; 0 is padding (data/ packs rows that way).
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def segment_sums(
    values: Float[Array, "rows seq"], segment_ids: Int[Array, "rows seq"], num_segments: int
) -> Float[Array, "rows segments"]:
    """Sum of `values` per document: result[row, s - 1] adds the positions whose id is s; 0 for an absent document.

    Compares and adds instead of scattering: deterministic, the compiler fuses it so that [rows, seq, segments] is never
    stored, and a sequence sharded over devices costs one small all-reduce. Ids above `num_segments` are left out.
    """
    member = segment_ids[:, :, None] == jnp.arange(1, num_segments + 1)
    return jnp.sum(jnp.where(member, values[:, :, None], 0.0), axis=1)


def per_token(values: Float[Array, "rows segments"], segment_ids: Int[Array, "rows seq"]) -> Float[Array, "rows seq"]:
    """The value of its document at every position, 0 at padding, NaN where the id exceeds the number of columns."""
    table = jnp.pad(values, [(0, 0), (1, 0)])
    return jnp.take_along_axis(table, segment_ids, axis=1, mode="fill", fill_value=jnp.nan)
