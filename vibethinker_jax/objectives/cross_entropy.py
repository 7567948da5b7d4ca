"""Token log-probabilities from hidden states, without ever holding the logits of a whole row.

At 65,536 tokens and a vocabulary of 151,936 the float32 logits of one row are 37 GiB. Here the head runs over chunks
of the sequence and its backward pass computes each chunk's logits again, so the largest array is one chunk's logits.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from vibethinker_jax.errors import UserError
from vibethinker_jax.parallel.rules import UNPLACED, Placement


class HeadOutput(NamedTuple):
    """What the head says about every position; entropy (nats) has no gradient and is None unless asked for."""

    log_probs: Float[Array, "batch seq"]
    entropy: Float[Array, "batch seq"] | None


def head_statistics(
    hidden: Float[Array, "batch seq hidden"],
    table: Float[Array, "padded_vocab hidden"],
    targets: Int[Array, "batch seq"],
    *,
    vocab_size: int,
    temperature: float = 1.0,
    chunk: int = 512,
    shards: int = 1,
    batch_shards: int = 1,
    with_entropy: bool = False,
    placement: Placement = UNPLACED,
) -> HeadOutput:
    """Log-probability (nats) of every target under softmax(hidden @ table.T / temperature).

    The matrix products run in the dtype of `hidden` and accumulate in float32 (at the highest precision when `hidden`
    is float32); everything between them is float32. The backward pass is written by hand: it gives the cotangents of
    both `hidden` and `table` for any cotangent of the result, so the loss may be scaled outside. The gradient of
    `table` is accumulated over chunks in float32 and returned in the dtype of `table`: pass the float32 master table
    beside bfloat16 hidden states and the sum is never rounded. Forward-mode differentiation is not defined.

    With `table` sharded over the vocabulary (axes context and tensor), each step gathers its chunk of hidden states and
    reduces maximum, sum and target logit over the devices; neither the table nor its gradient is gathered over them.

    Args:
        hidden: final hidden states, after the last norm.
        table: head weights; rows from `vocab_size` on are padding (finite, usually zero), have probability exactly 0
            and get a gradient of exactly 0.
        targets: token ids in [0, vocab_size), any valid id where there is no target. Elsewhere the result is NaN.
        vocab_size: rows of `table` that are tokens.
        temperature: > 0; a constant of the compiled program. Use the sampling temperature for samples.
        chunk: positions of a row per step, over all shards; need not divide the sequence length.
        shards: size of the mesh axis that the sequence is sharded over. Every step then takes a piece of each shard,
            so that the scan cuts no device's share out of the sequence.
        batch_shards: number of devices that the batch is sharded over; must divide it. The table's gradient is summed
            over them once, after the last chunk, instead of once per chunk.
        with_entropy: also return the entropy of the distribution at every position.
        placement: where `table` is sharded, so that each step gathers hidden states and not logits or the table.

    Returns:
        HeadOutput, float32 [batch, seq].

    Raises:
        UserError: temperature, chunk, shards, batch_shards or vocab_size out of range.
    """
    batch, length, _ = hidden.shape
    if not (math.isfinite(temperature) and temperature > 0):
        raise UserError(f"head_statistics: temperature is {temperature}; pass a finite number above 0")
    if chunk < 1 or shards < 1:
        raise UserError(f"head_statistics: chunk is {chunk} and shards is {shards}; both must be at least 1")
    if batch_shards < 1 or batch % batch_shards:
        raise UserError(f"head_statistics: batch_shards is {batch_shards}; pass a divisor of the batch {batch}")
    if not 0 < vocab_size <= table.shape[0]:
        raise UserError(f"head_statistics: vocab_size is {vocab_size}; the table has {table.shape[0]} rows")

    local = -(-length // shards)
    size = max(1, min(-(-chunk // shards), local))
    split = partial(_split, batch_shards=batch_shards, shards=shards, local=local, size=size)
    head = _Head(vocab_size, float(temperature), with_entropy, placement)
    output = _scan_head(head, split(hidden), table, split(targets))
    return jax.tree.map(partial(_join, batch=batch, shards=shards, local=local, length=length), output)


def cross_entropy_sum(
    log_probs: Float[Array, "batch seq"], weights: Float[Array, "batch seq"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Pieces of the SFT loss: (sum of weight * -log_prob, sum of weights), both float32 scalars.

    Unreduced on purpose: add the pairs of all micro-batches and divide once, so that the loss is the mean over the
    response tokens of the global batch whatever their distribution over micro-batches. Positions of weight 0 count
    nothing, whatever their log-probability. All weights zero: (0, 0), and the caller must not divide.
    """
    weights = weights.astype(jnp.float32)
    counted = jnp.where(weights != 0, log_probs, 0.0).astype(jnp.float32)
    return -jnp.sum(weights * counted), jnp.sum(weights)


def _split(x: Array, *, batch_shards: int, shards: int, local: int, size: int) -> Array:
    """[batch, seq, ...] -> [steps, batch_shards, batch / batch_shards, shards, size, ...], zeros where seq is short."""
    batch, length, *rest = x.shape
    still = [(0, 0)] * len(rest)
    x = jnp.pad(x, [(0, 0), (0, shards * local - length), *still]).reshape(batch, shards, local, *rest)
    x = jnp.pad(x, [(0, 0), (0, 0), (0, -local % size), *still])
    return jnp.moveaxis(x.reshape(batch_shards, batch // batch_shards, shards, -1, size, *rest), 3, 0)


def _join(x: Array, *, batch: int, shards: int, local: int, length: int) -> Array:
    """The inverse of `_split` for an array without trailing axes."""
    x = jnp.moveaxis(x, 0, 3).reshape(batch, shards, -1)
    return x[:, :, :local].reshape(batch, -1)[:, :length]


@dataclass(frozen=True)
class _Head:
    """The static settings of a head."""

    vocab_size: int
    temperature: float
    with_entropy: bool
    placement: Placement

    def gather(self, chunk: Array) -> Array:
        """A chunk [batch_shards, batch, shards, size, ...] with the pieces of all shards of the sequence."""
        return self.placement.constrain(chunk, "batch", *[None] * (chunk.ndim - 1))

    def scatter(self, chunk: Array) -> Array:
        """Undoes `gather`."""
        return self.placement.constrain(chunk, "batch", None, "sequence", *[None] * (chunk.ndim - 3))

    def logits(self, hidden: Array, table: Array) -> Array:
        """Float32 logits of one chunk, over the temperature, padding rows at -inf."""
        logits = _einsum("gbkcd,vd->gbkcv", self.gather(hidden), table)
        logits = self.placement.constrain(logits, "batch", None, None, None, "vocab")
        if self.temperature != 1.0:
            logits = logits / self.temperature
        rows = table.shape[0]
        return logits if rows == self.vocab_size else jnp.where(jnp.arange(rows) < self.vocab_size, logits, -jnp.inf)


def _einsum(formula: str, x: Array, y: Array) -> Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(formula, x, y, precision=precision, preferred_element_type=jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan_head(head: _Head, hidden: Array, table: Array, targets: Array) -> HeadOutput:
    return _scan_forward(head, hidden, table, targets)[0]


def _scan_forward(head: _Head, hidden: Array, table: Array, targets: Array) -> tuple[HeadOutput, tuple]:
    weights = table.astype(hidden.dtype)

    def step(_, chunk):
        hidden, targets = chunk
        targets = head.gather(targets)
        logits = head.logits(hidden, weights)
        # Differences to the maximum, never to the log-sum-exp itself: they stay exact for logits of any size.
        maximum = jnp.max(logits, axis=-1)
        shifted = logits - maximum[..., None]
        mass = jnp.exp(shifted)
        total = jnp.sum(mass, axis=-1)
        # A masked sum, not a gather: with a sharded vocabulary each device adds what it holds.
        hit = jnp.sum(jnp.where(_is_target(targets, logits), shifted, 0.0), axis=-1)
        log_probs = jnp.where((targets >= 0) & (targets < head.vocab_size), hit - jnp.log(total), jnp.nan)
        entropy = None
        if head.with_entropy:
            # exp(-inf) * -inf would be NaN
            weighted = jnp.where(mass > 0, mass * shifted, 0.0)
            entropy = jnp.log(total) - jnp.sum(weighted, axis=-1) / total
        return None, jax.tree.map(head.scatter, (HeadOutput(log_probs, entropy), maximum, jnp.log(total)))

    _, (output, maximum, log_total) = lax.scan(step, None, (hidden, targets))
    return output, (hidden, table, targets, maximum, log_total)


def _scan_backward(head: _Head, residuals: tuple, cotangent: HeadOutput) -> tuple[Array, Array, None]:
    hidden, table, targets, maximum, log_total = residuals
    weights = table.astype(hidden.dtype)

    def step(table_bar, chunk):
        hidden, targets, maximum, log_total, log_probs_bar = map(head.gather, chunk)
        logits = head.logits(hidden, weights)
        probabilities = jnp.exp((logits - maximum[..., None]) - log_total[..., None])
        scale = (log_probs_bar / head.temperature)[..., None]
        logits_bar = ((_is_target(targets, logits) - probabilities) * scale).astype(hidden.dtype)
        hidden_bar = head.scatter(_einsum("gbkcv,vd->gbkcd", logits_bar, weights)).astype(hidden.dtype)
        return table_bar + _einsum("gbkcv,gbkcd->gvd", logits_bar, hidden), hidden_bar

    start = jnp.zeros((hidden.shape[1], *table.shape), jnp.float32)
    table_bar, hidden_bar = lax.scan(step, start, (hidden, targets, maximum, log_total, cotangent.log_probs))
    return hidden_bar, jnp.sum(table_bar, axis=0).astype(table.dtype), None


def _is_target(targets: Array, logits: Array) -> Array:
    return targets[..., None] == jnp.arange(logits.shape[-1])


_scan_head.defvjp(_scan_forward, _scan_backward)
