"""The engine's memory: one contiguous row of keys and values per slot, and rows in which prompts are prefilled."""

import warnings
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Int

from vibethinker_jax.errors import UserError
from vibethinker_jax.models.config import Qwen2Config
from vibethinker_jax.models.qwen2 import KVCache
from vibethinker_jax.parallel.rules import Placement

# Without an explicit prefill_batch, a prefill call computes about this many tokens: enough to be worth a call on a
# tiny model, few enough not to be wasted on a large one when a single prompt waits.
PREFILL_TOKENS = 256

# What an engine has where nothing else is asked for.
PAGE_SIZE = 128
PREFILL_CHUNK = 256
DECODE_BURST = 16


@dataclass(frozen=True)
class EngineShape:
    """Every size that the compiled functions are compiled for.

    Attributes:
        slots: samples that decode together.
        max_length: most tokens of prompt and completion together.
        length: positions of a cache row: max_length rounded up to whole prefill chunks.
        prefill_batch: prompts that are prefilled together.
        prefill_chunk: tokens of each that one prefill call computes.
        decode_burst: most tokens per slot between two looks at the schedule.
    """

    slots: int
    max_length: int
    length: int
    prefill_batch: int
    prefill_chunk: int
    decode_burst: int


def plan_shape(
    max_slots: int,
    max_length: int,
    config: Qwen2Config,
    *,
    cache_tokens: int | None = None,
    page_size: int = PAGE_SIZE,
    prefill_chunk: int = PREFILL_CHUNK,
    prefill_batch: int | None = None,
    decode_burst: int = DECODE_BURST,
) -> EngineShape:
    """Checks the engine's settings (rollout/engine.py describes them) and derives its shapes.

    Raises:
        UserError: a setting is no positive integer, max_length leaves no room for a completion, or the cache does
            not fit in cache_tokens.
    """
    settings = {
        "max_slots": max_slots,
        "max_length": max_length,
        "page_size": page_size,
        "prefill_chunk": prefill_chunk,
        "decode_burst": decode_burst,
    }
    settings |= {} if cache_tokens is None else {"cache_tokens": cache_tokens}
    settings |= {} if prefill_batch is None else {"prefill_batch": prefill_batch}
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"RolloutEngine: {name} is {value!r}; use a positive integer")
    if max_length < 2:
        raise UserError(f"RolloutEngine: max_length is {max_length}; a prompt and one new token need at least 2")
    if max_length > config.max_position_embeddings:
        warnings.warn(
            f"max_length {max_length} exceeds the {config.max_position_embeddings} positions that the checkpoint "
            "declares (max_position_embeddings); longer texts are outside what it was trained on",
            stacklevel=3,
        )
    chunk = min(prefill_chunk, max_length)
    length = -(-max_length // chunk) * chunk
    if cache_tokens is not None:
        if cache_tokens % page_size:
            raise UserError(
                f"RolloutEngine: cache_tokens {cache_tokens} is not a multiple of page_size {page_size}; "
                f"use {-(-cache_tokens // page_size) * page_size}"
            )
        if max_slots * length > cache_tokens:
            needed = -(-max_slots * length // page_size) * page_size
            raise UserError(
                f"RolloutEngine: {max_slots} slots of {length} tokens (max_length {max_length} in chunks of {chunk}) "
                f"do not fit in cache_tokens {cache_tokens}; set cache_tokens to at least {needed}, max_slots to at "
                f"most {cache_tokens // length}, or a smaller max_length"
            )
    batch = max(1, min(max_slots, PREFILL_TOKENS // chunk)) if prefill_batch is None else prefill_batch
    return EngineShape(max_slots, max_length, length, batch, chunk, decode_burst)


def abstract_cache(
    config: Qwen2Config,
    batch: int,
    length: int,
    dtype: Any,
    placement: Placement,
    default: jax.sharding.Sharding,
    rows: str = "slots",
) -> KVCache:
    """Shape and placement of a cache: rows over their mesh axes, KV heads over tensor, each where it divides.

    Args:
        rows: logical axis of the rows: "slots", or "batch" where several tokens of a row are computed at once.
        default: where it lives without a mesh.
    """
    shape = (config.num_layers, batch, length, config.num_kv_heads, config.head_dim)
    sharding = default
    if placement.mesh is not None:
        spec = placement.spec((None, rows, None, "kv_heads", None), shape, strict=False)
        sharding = NamedSharding(placement.mesh, spec)
    array = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    return KVCache(array, array)


def copy_prompts(
    cache: KVCache, prefilled: KVCache, source: Int[Array, " slots"], length: Int[Array, " slots"]
) -> KVCache:
    """Starts slots with prefilled prompts.

    Args:
        cache: rows of the slots.
        prefilled: rows of prompts, of the same length.
        source: the row of `prefilled` that a slot takes; negative leaves the slot alone.
        length: tokens of it that the slot takes. The rest of its row becomes zero, so that nothing of a previous
            owner, not even a NaN, can reach the attention's sums.
    """
    taken = (source >= 0)[None, :, None, None, None]
    inside = (jnp.arange(cache.k.shape[2])[None] < length[:, None])[None, :, :, None, None]

    def copy(old: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.where(taken, jnp.where(inside, new[:, jnp.maximum(source, 0)], 0), old)

    return KVCache(copy(cache.k, prefilled.k), copy(cache.v, prefilled.v))
