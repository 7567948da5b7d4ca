"""What the engine computes on the device: prefill one chunk of some prompts, decode a burst of tokens in all slots.

A prompt is prefilled without its last token. Decoding starts from that token, so the first new token of a sample is
computed exactly like all others, and a prompt of one token needs no prefill.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from vibethinker_jax.models.qwen2 import KVCache, Qwen2
from vibethinker_jax.rollout.sampling import SamplingState, sample_tokens

# Room for stop ids in a slot; a fixed width, so that requests with more of them compile nothing new.
MAX_STOP_IDS = 16


class SlotState(NamedTuple):
    """What a burst needs to know of each slot; arrays of either numpy or JAX.

    Attributes:
        active: whether it runs; the others compute too, and their results are ignored.
        token: the last token, prompt's or sampled, which the cache does not hold yet.
        cached: tokens in the cache.
        generated: tokens sampled so far.
        limit: tokens after which it ends.
        stop_ids: tokens at which it ends, filled up with -1.
        sampling: how it samples.
    """

    active: Bool[Array, " slots"]
    token: Int[Array, " slots"]
    cached: Int[Array, " slots"]
    generated: Int[Array, " slots"]
    limit: Int[Array, " slots"]
    stop_ids: Int[Array, "slots stops"]
    sampling: SamplingState


class Burst(NamedTuple):
    """Tokens of a burst. Slot s has `generated[s]` tokens after it; its new ones are the first of column s."""

    tokens: Int[Array, "burst slots"]
    log_probs: Float[Array, "burst slots"]
    generated: Int[Array, " slots"]


def prefill_chunk(model: Qwen2, cache: KVCache, tokens: Int[Array, "rows chunk"], start: Int[Array, ""]) -> KVCache:
    """Adds a chunk of tokens to every row.

    Args:
        tokens: the chunk; after the end of a row's prompt anything, which `copy_prompts` leaves behind.
        start: tokens that the rows hold already.
    """
    # What an earlier prompt left behind is masked in the attention, but zero times its NaN would be NaN.
    behind = (jnp.arange(cache.k.shape[2]) >= start)[None, None, :, None, None]
    clean = jax.tree.map(lambda array: jnp.where(behind, 0, array), cache)
    _, extended = model.extend(tokens, clean, jnp.full(tokens.shape[0], start))
    return extended


def decode_burst(
    model: Qwen2, cache: KVCache, slots: SlotState, min_active: Int[Array, ""], *, burst: int
) -> tuple[KVCache, Burst]:
    """Samples up to `burst` tokens in every active slot.

    Every slot computes the same whatever the others do, one token at a time at the full width: what a sample gets
    does not depend on its slot, on its company or on where bursts begin and end.

    Args:
        min_active: the burst ends early when this many slots or fewer are active: 0 to run them all out.
    """
    width = slots.token.shape[0]

    class Carry(NamedTuple):
        step: jax.Array
        cache: KVCache
        slots: SlotState
        tokens: jax.Array
        log_probs: jax.Array

    def running(carry: Carry) -> jax.Array:
        active = jnp.sum(carry.slots.active)
        return (carry.step < burst) & (active > 0) & (active > min_active)

    def step(carry: Carry) -> Carry:
        slots = carry.slots
        hidden, cache = model.extend(slots.token[:, None], carry.cache, slots.cached)
        # One slot's distribution is whole on a device, so sampling needs no exchange of sorted or summed parts.
        logits = model.placement.constrain(model.logits(hidden[:, 0]), "slots", None)
        token, log_prob = sample_tokens(logits, slots.sampling, slots.generated)
        generated = slots.generated + slots.active
        ended = jnp.any(token[:, None] == slots.stop_ids, axis=1) | (generated >= slots.limit)
        after = slots._replace(
            active=slots.active & ~ended,
            token=jnp.where(slots.active, token, slots.token),
            cached=slots.cached + slots.active,
            generated=generated,
        )
        tokens = jax.lax.dynamic_update_index_in_dim(carry.tokens, token, carry.step, 0)
        log_probs = jax.lax.dynamic_update_index_in_dim(carry.log_probs, log_prob, carry.step, 0)
        return Carry(carry.step + 1, cache, after, tokens, log_probs)

    empty = Carry(
        jnp.zeros((), jnp.int32),
        cache,
        slots,
        jnp.zeros((burst, width), jnp.int32),
        jnp.zeros((burst, width), jnp.float32),
    )
    done = jax.lax.while_loop(running, step, empty)
    return done.cache, Burst(done.tokens, done.log_probs, done.slots.generated)
