"""Shapes of the batches that the training steps take, for compiling without data."""

import jax
import jax.numpy as jnp

AbstractBatch = dict[str, jax.ShapeDtypeStruct]


def sft_batch(rows: int, length: int) -> AbstractBatch:
    """One micro-batch of training/sft_step.py: `rows` rows of `length` tokens over all devices."""
    integers = ("tokens", "targets", "positions", "segment_ids")
    return _per_token(rows, length, integers, ("loss_weights",))


def mgpo_batch(rows: int, length: int, max_segments: int) -> AbstractBatch:
    """One on-policy micro-batch of training/mgpo_step.py with at most `max_segments` responses per row."""
    integers = ("tokens", "targets", "positions", "segment_ids")
    batch = _per_token(rows, length, integers, ("loss_weights", "rollout_log_probs"))
    for name in ("advantages", "sequence_weights"):
        batch[name] = jax.ShapeDtypeStruct((rows, max_segments), jnp.float32)
    return {**batch, "num_groups": jax.ShapeDtypeStruct((), jnp.float32)}


def _per_token(rows: int, length: int, integers: tuple[str, ...], floats: tuple[str, ...]) -> AbstractBatch:
    dtypes = dict.fromkeys(integers, jnp.int32) | dict.fromkeys(floats, jnp.float32)
    return {name: jax.ShapeDtypeStruct((rows, length), dtype) for name, dtype in dtypes.items()}
