"""Drawing one token per slot from float32 logits: pure functions of (logits, settings, seed, sample, token).

Every row is computed on its own and by the same instructions whatever the other rows ask for, so a token does not
depend on who shares the batch. Work that no row needs (truncation, the noise of greedy rows) is
skipped at run time inside the one compiled function; the choice cannot change any bit of a row.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from vibethinker_jax.errors import UserError


class SamplingState(NamedTuple):
    """Settings per slot; arrays of either numpy or JAX.

    Attributes:
        key: `seed_key_data` of the request's seed.
        sample_index: which of the n samples of a prompt.
        temperature: 0 is greedy.
        top_k: -1 is no limit.
        top_p: 1 is no limit.
        min_p: 0 is no limit.
    """

    key: UInt32[Array, "slots 2"]
    sample_index: Int[Array, " slots"]
    temperature: Float[Array, " slots"]
    top_k: Int[Array, " slots"]
    top_p: Float[Array, " slots"]
    min_p: Float[Array, " slots"]


def seed_key_data(seed: int) -> UInt32[np.ndarray, " 2"]:
    """Data of the Threefry key of a seed below 2**64: `jax.random.key(seed)` for every seed that JAX takes.

    Built on the host: without 64-bit mode JAX would cut larger seeds to 32 bits.
    """
    if not 0 <= seed < 2**64:
        raise UserError(f"seed is {seed}; use an integer from 0 to 2**64 - 1")
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)


def sample_tokens(
    logits: Float[Array, "slots vocab"], state: SamplingState, token_index: Int[Array, " slots"]
) -> tuple[Int[Array, " slots"], Float[Array, " slots"]]:
    """The next token of every slot and its log-probability.

    The token is the argmax of log-probability plus Gumbel noise, which is a draw from the truncated softmax; the noise
    of token t of sample i comes from the key fold_in(fold_in(key(seed), i), t) alone. The noise has float32's 23
    random bits: tokens less likely than about 1e-7 are hardly ever drawn.

    Args:
        logits: float32; -inf where a token must never be drawn (padding of the vocabulary).
        state: settings per slot.
        token_index: how many tokens the sample has already.

    Returns:
        int32 tokens, and their float32 log-probabilities under the untruncated softmax(logits / temperature), with
        temperature 1 for greedy slots.
    """
    greedy = state.temperature == 0
    scaled = logits / jnp.where(greedy, 1.0, state.temperature)[:, None]
    truncated = ~greedy & ((state.top_k > 0) | (state.top_p < 1) | (state.min_p > 0))
    allowed = jax.lax.cond(
        jnp.any(truncated),
        lambda: jnp.where(truncated[:, None] & ~kept_tokens(scaled, state), -jnp.inf, scaled),
        lambda: scaled,
    )
    noise = jax.lax.cond(
        jnp.all(greedy), lambda: jnp.zeros_like(scaled), lambda: _gumbel_noise(state, token_index, logits.shape[1])
    )
    tokens = jnp.argmax(allowed + jnp.where(greedy[:, None], 0.0, noise), axis=-1).astype(jnp.int32)
    chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=-1)[:, 0]
    return tokens, chosen - jax.nn.logsumexp(scaled, axis=-1)


def kept_tokens(scaled: Float[Array, "slots vocab"], state: SamplingState) -> Bool[Array, "slots vocab"]:
    """Tokens that survive top_k, then top_p of the renormalised rest, then min_p. The most likely one always does.

    Args:
        scaled: logits / temperature.
        state: top_k, top_p and min_p are read.
    """
    limits_k, limits_p = state.top_k > 0, state.top_p < 1
    weights = jnp.exp(scaled - jnp.max(scaled, axis=1, keepdims=True))  # relative to the most likely token
    everything = jnp.ones(scaled.shape, bool)
    by_k = jax.lax.cond(
        jnp.any(limits_k),
        lambda: shortest_prefix(scaled, jnp.ones_like(scaled), state.top_k.astype(jnp.float32)) | ~limits_k[:, None],
        lambda: everything,
    )

    def nucleus() -> jax.Array:
        kept = jnp.where(by_k, weights, 0.0)
        return shortest_prefix(scaled, kept, state.top_p * jnp.sum(kept, axis=1)) | ~limits_p[:, None]

    by_p = jax.lax.cond(jnp.any(limits_p), nucleus, lambda: everything)
    return by_k & by_p & (weights >= state.min_p[:, None])


def shortest_prefix(
    scaled: Float[Array, "slots vocab"], weights: Float[Array, "slots vocab"], target: Float[Array, " slots"]
) -> Bool[Array, "slots vocab"]:
    """The fewest tokens, most likely first and of equal ones the lowest id first, whose weights reach the target.

    Finds the last token of the prefix bit by bit instead of sorting: 32 + log2(vocab) sums over the vocabulary, an
    order of magnitude faster than a sort of 150,000. Sums of non-negative numbers in a fixed order do not fall
    when a number is added, so the search is exact for the sums as rounded.

    Args:
        scaled: what "likely" means.
        weights: >= 0.
        target: > 0; everything is kept if the sum of all weights is below.
    """
    slots, vocab = scaled.shape
    # Unsigned integers in the order of the floats, with -0 equal to 0.
    pattern = jax.lax.bitcast_convert_type(jnp.where(scaled == 0, 0.0, scaled), jnp.uint32)
    rank = jnp.where(pattern >> 31 == 1, ~pattern, pattern | jnp.uint32(1 << 31))
    id_rank = jnp.arange(vocab - 1, -1, -1, dtype=jnp.uint32)[None]

    def largest(bits: int, prefix: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Per slot, the largest number of `bits` bits at which the prefix still reaches the target."""

        def add_bit(step: jax.Array, value: jax.Array) -> jax.Array:
            candidate = value | (jnp.uint32(1) << (bits - 1 - step).astype(jnp.uint32))
            reached = jnp.sum(jnp.where(prefix(candidate), weights, 0.0), axis=1, keepdims=True)
            return jnp.where(reached >= target[:, None], candidate, value)

        return jax.lax.fori_loop(0, bits, add_bit, jnp.zeros((slots, 1), jnp.uint32))

    last = largest(32, lambda cut: rank >= cut)
    tied = largest(max(1, (vocab - 1).bit_length()), lambda cut: (rank > last) | ((rank == last) & (id_rank >= cut)))
    return (rank > last) | ((rank == last) & (id_rank >= tied))


def _gumbel_noise(state: SamplingState, token_index: Int[Array, " slots"], vocab: int) -> Float[Array, "slots vocab"]:
    def noise(data: jax.Array, sample: jax.Array, token: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(data, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, sample), token)
        return jax.random.gumbel(key, (vocab,), jnp.float32)

    return jax.vmap(noise)(state.key, state.sample_index, token_index)
