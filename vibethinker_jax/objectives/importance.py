"""Correction and measurement of the mismatch between the sampler's and the trainer's probabilities.

The rollout engine and the training step compute the same policy with different kernels and in different dtypes. With
lr = log pi_old - log pi_rollout per token (same weights, both at the sampling temperature) and r = exp(lr):

- truncated importance sampling (TIS), the VibeThinker-3B report's reference Yao et al. 2025: every token's loss is
  multiplied by the constant min(r, C);
- filters after the report's reference "mismatch praxis" (llmdata 2025), all off unless asked for, reject tokens or
  whole responses. Rejected tokens leave the denominator too; under sequence_mean a response that is rejected whole
  contributes zero but keeps its place in the 1/G of its group;
- products of r over a response are not offered: at 64K tokens they collapse.

lr is clamped to +-20 wherever it is exponentiated, and the clamped value is used throughout.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from vibethinker_jax.errors import UserError
from vibethinker_jax.objectives.metrics import Metrics
from vibethinker_jax.objectives.segments import per_token, segment_sums

LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class RejectionFilters:
    """Which tokens and responses to reject for their mismatch; None switches a filter off.

    Attributes:
        token_band: (low, high) of r per token; a token outside is rejected. Masked importance sampling is this band
            with a TIS cap equal to its upper end; 0.5 to 2 is usual.
        geometric_band: (low, high) of exp(mean lr) per response; 0.99 to 1.01 or tighter is usual.
        k3_limit: largest mean of (r - 1 - lr) per response; 0.001 to 0.01 is usual.
        veto: a response with any r below it is rejected; 1e-4 is usual.

    Raises:
        UserError: a band that is empty or not positive, a limit that is not positive.
    """

    token_band: tuple[float, float] | None = None
    geometric_band: tuple[float, float] | None = None
    k3_limit: float | None = None
    veto: float | None = None

    def __post_init__(self):
        for name in ("token_band", "geometric_band"):
            band = getattr(self, name)
            if band is not None and not 0 < band[0] <= band[1]:
                raise UserError(f"RejectionFilters: {name} is {band}; pass (low, high) with 0 < low <= high")
        for name in ("k3_limit", "veto"):
            limit = getattr(self, name)
            if limit is not None and not limit > 0:
                raise UserError(f"RejectionFilters: {name} is {limit}; pass a number above 0 or None")


def log_ratio(
    old_log_probs: Float[Array, "rows seq"], rollout_log_probs: Float[Array, "rows seq"]
) -> tuple[Float[Array, "rows seq"], Bool[Array, "rows seq"]]:
    """(lr, finite): log pi_old - log pi_rollout in nats, float32, clamped to +-20, without gradient.

    Where the rollout's log-probability is not finite `finite` is False and lr is 0: the token must leave numerator and
    denominator. A trainer log-probability that is not finite is an error of the trainer and stays visible as NaN.
    """
    finite = jnp.isfinite(rollout_log_probs)
    difference = old_log_probs.astype(jnp.float32) - rollout_log_probs.astype(jnp.float32)
    difference = jnp.where(jnp.isfinite(old_log_probs), difference, jnp.nan)
    lr = jnp.clip(jnp.where(finite, difference, 0.0), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return lax.stop_gradient(lr), finite


def truncated_importance_weight(lr: Float[Array, "rows seq"], cap: float | None) -> Float[Array, "rows seq"]:
    """Token-level TIS weight min(exp(lr), cap), a constant for differentiation; all 1 when cap is None."""
    if cap is None:
        return jnp.ones_like(lr)
    if not cap > 0:
        raise UserError(f"truncated_importance_weight: cap is {cap}; pass a number above 0, or None for no correction")
    return lax.stop_gradient(jnp.minimum(jnp.exp(jnp.clip(lr, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)), cap))


def rejected(
    lr: Float[Array, "rows seq"],
    weights: Float[Array, "rows seq"],
    segment_ids: Int[Array, "rows seq"],
    num_segments: int,
    filters: RejectionFilters,
) -> Bool[Array, "rows seq"]:
    """Which tokens the filters reject. A NaN is never rejected: it is an error that must stay visible.

    The response-level statistics are means over all tokens of positive weight, also those that the token band rejects.
    Positions of weight 0 influence no other position, and their own entry means nothing.

    Args:
        lr: log ratio per token, clamped.
        weights: > 0 at response tokens whose lr is known, 0 elsewhere.
        segment_ids: 1.. per row, 0 = padding.
        num_segments: largest id.
        filters: what to reject.
    """
    tokens = jnp.zeros(lr.shape, bool)
    if filters.token_band is not None:
        tokens = _outside(lr, filters.token_band)
    if filters.geometric_band is None and filters.k3_limit is None and filters.veto is None:
        return tokens

    def total(values: Array) -> Array:
        return segment_sums(jnp.where(weights > 0, weights * values, 0.0), segment_ids, num_segments)

    count = total(jnp.ones_like(lr))
    count = jnp.where(count > 0, count, 1.0)
    responses = jnp.zeros(count.shape, bool)
    if filters.geometric_band is not None:
        responses |= _outside(total(lr) / count, filters.geometric_band)
    if filters.k3_limit is not None:
        responses |= total(k3(lr)) / count > filters.k3_limit
    if filters.veto is not None:
        responses |= total((lr < math.log(filters.veto)).astype(jnp.float32)) > 0
    return tokens | (per_token(responses.astype(jnp.float32), segment_ids) > 0)


def _outside(lr: Array, band: tuple[float, float]) -> Array:
    return (lr < math.log(band[0])) | (lr > math.log(band[1]))


def k3(lr: Float[Array, "..."]) -> Float[Array, "..."]:
    """expm1(lr) - lr >= 0, whose mean under the sampler estimates KL(rollout || old).

    Near 0 the difference cancels (float32 loses all digits at |lr| = 1e-7): there it is its Taylor series, whose
    truncation error at the switch, |lr| = 0.1, is 4e-9 of the value.
    """
    small = jnp.abs(lr) < 0.1
    x = jnp.where(small, lr, 0.0)
    series = x * x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6))))
    return jnp.where(small, series, jnp.expm1(lr) - lr)


def mismatch_metrics(
    lr: Float[Array, "rows seq"], weights: Float[Array, "rows seq"], cap: float | None = None
) -> Metrics:
    """Size of the mismatch over the positions of positive weight, in sums that add over micro-batches.

    Means: `mismatch/k1` = -lr, `mismatch/k3` = expm1(lr) - lr (both estimate KL(rollout || old)), `mismatch/chi_square`
    = r^2 - 1, `mismatch/absolute` = |lr|, `mismatch/ratio` = r and, with a cap, `mismatch/above_cap`, the share of
    tokens with r above it. Share: `mismatch/effective_samples`. Maxima: `mismatch/ratio_max`, `mismatch/absolute_max`.
    Positions of weight 0 may hold anything. No position at all: every summary is NaN.

    Args:
        lr: log ratio per token, clamped.
        weights: > 0 at response tokens whose lr is known, 0 elsewhere.
        cap: the TIS cap C.
    """
    counts = weights > 0
    lr = jnp.where(counts, lr, 0.0)
    ratio = jnp.exp(lr)
    count = jnp.sum(weights)

    def mean(values: Array) -> tuple[Array, Array]:
        return jnp.sum(weights * values), count

    def largest(values: Array) -> Array:
        return jnp.max(jnp.where(counts, values, -jnp.inf))

    means = {
        "mismatch/k1": mean(-lr),
        "mismatch/k3": mean(k3(lr)),
        "mismatch/chi_square": mean(jnp.expm1(2 * lr)),
        "mismatch/absolute": mean(jnp.abs(lr)),
        "mismatch/ratio": mean(ratio),
    }
    if cap is not None:
        means["mismatch/above_cap"] = mean((ratio > cap).astype(jnp.float32))
    return Metrics(
        means=means,
        shares={"mismatch/effective_samples": (jnp.sum(weights * ratio), jnp.sum(weights * ratio**2), count)},
        maxima={"mismatch/ratio_max": largest(ratio), "mismatch/absolute_max": largest(jnp.abs(lr))},
    )
