"""MGPO's loss over packed rows (VibeThinker-3B report, eq. 3).

Kept from the report: the clipped surrogate, the prompt weight w inside it, the mean over tokens within a response
before the mean over responses, on-policy updates, and the correction of the sampler's mismatch by truncated importance
sampling. Left out: a KL term (the report gives no coefficient). Off by default: token-mean aggregation, asymmetric
clipping, rejection filters.
"""

from typing import Literal, NamedTuple, get_args

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from vibethinker_jax.errors import UserError
from vibethinker_jax.objectives.importance import (
    LOG_RATIO_LIMIT,
    RejectionFilters,
    log_ratio,
    mismatch_metrics,
    rejected,
    truncated_importance_weight,
)
from vibethinker_jax.objectives.metrics import Metrics
from vibethinker_jax.objectives.segments import per_token, segment_sums

Aggregation = Literal["sequence_mean", "token_mean"]
NO_FILTERS = RejectionFilters()


class MgpoLoss(NamedTuple):
    """Unreduced loss: add the parts of all micro-batches, then divide loss_sum once by the denominator."""

    loss_sum: Float[Array, ""]
    denominator: Float[Array, ""]
    metrics: Metrics


def mgpo_loss(
    log_probs: Float[Array, "rows seq"],
    old_log_probs: Float[Array, "rows seq"],
    rollout_log_probs: Float[Array, "rows seq"],
    loss_weights: Float[Array, "rows seq"],
    segment_ids: Int[Array, "rows seq"],
    advantages: Float[Array, "rows segments"],
    sequence_weights: Float[Array, "rows segments"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    tis_cap: float | None = 2.0,
    aggregation: Aggregation = "sequence_mean",
    filters: RejectionFilters = NO_FILTERS,
    entropy: Float[Array, "rows seq"] | None = None,
) -> MgpoLoss:
    """Negative of MGPO's objective, summed over the responses of a micro-batch, in float32.

    VibeThinker-3B report eq. 3, with the token weight of truncated importance sampling (see importance.py):

        token  t of response i:   l_it = -sg[min(pi_old / pi_rollout, C)]
                                          * min(rho_it w A_i, clip(rho_it, 1 - clip_low, 1 + clip_high) w A_i)
        sequence_mean (eq. 3):    loss_sum = sum_i sequence_weight_i * mean over kept t of l_it
        token_mean:               loss_sum = sum over kept tokens of l_it

    rho = pi / pi_old. Its logarithm is clamped to +-20, so that an absurd ratio gives no gradient instead of infinity.
    With stop_gradient(log_probs) as `old_log_probs` rho is exactly 1, the clip is inert and the gradient is
    -sequence_weight * w A * TIS * grad log pi. Only `log_probs` is differentiated.

    A token is kept if its loss weight and its response's sequence weight are positive, the rollout's log-probability
    is finite and the filters do not reject it. Any other token leaves numerator and denominator, whatever numbers it
    holds. A response of which nothing is kept contributes 0. A trainer log-probability of a kept token that is not
    finite is an error and makes the loss NaN.

    Args:
        log_probs: log pi of the target of each position under the parameters being trained, nats, at the sampling
            temperature; as the next two.
        old_log_probs: log pi under the parameters at the start of the batch, by the trainer.
        rollout_log_probs: the same as the sampler reported it.
        loss_weights: 1 where the target is a token of a response (0 elsewhere); fractions weigh tokens.
        segment_ids: 1.. per row, 0 = padding. An id above the number of columns of `advantages` makes the loss NaN.
        advantages: w A of each segment (0 in unused columns).
        sequence_weights: 1/G of each segment, G its group's number of verdicts (0 in unused columns). Under token_mean
            only their being positive matters.
        clip_low, clip_high: epsilon of eq. 3 below and above 1.
        tis_cap: C; None for no correction.
        aggregation: as above.
        filters: rejection of mismatched tokens and responses.
        entropy: nats per position, reported only.

    Returns:
        MgpoLoss. `denominator` is, for token_mean, the weight of the kept tokens; for sequence_mean the sum of
        sequence_weights, which over a whole batch is its number of kept groups if every response with a verdict is in
        it. Where some are left out or have weight 0 (masked truncated ones), divide by GroupAdvantages.num_kept.
        Metrics: `policy/ratio`, `policy/clip_fraction`, `policy/entropy` over kept tokens; `mismatch/...` over response
        tokens before filtering; `mismatch/not_finite` and `mismatch/rejected`, the shares dropped for either reason.

    Raises:
        UserError: unknown aggregation; clip_low outside [0, 1] or clip_high negative; tis_cap not positive.
    """
    if aggregation not in get_args(Aggregation):
        raise UserError(f"mgpo_loss: aggregation is {aggregation!r}; use one of {get_args(Aggregation)}")
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise UserError(f"mgpo_loss: clip_low, clip_high are {clip_low}, {clip_high}; use 0..1 and at least 0")
    num_segments = advantages.shape[1]
    response = jnp.where(segment_ids > 0, loss_weights.astype(jnp.float32), 0.0)

    lr, finite = log_ratio(old_log_probs, rollout_log_probs)
    known = jnp.where(finite, response, 0.0)
    refused = rejected(lr, known, segment_ids, num_segments, filters)
    in_use = per_token(sequence_weights.astype(jnp.float32), segment_ids) > 0
    kept = jnp.where(in_use & ~refused, known, 0.0)

    # Zeros instead of whatever the other positions hold: not even a NaN there may reach the loss or its gradient.
    difference = jnp.where(kept > 0, log_probs - lax.stop_gradient(old_log_probs), 0.0).astype(jnp.float32)
    difference = jnp.where(jnp.isfinite(difference), difference, jnp.nan)  # or the clamp would hide an infinity
    rho = jnp.exp(jnp.clip(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    advantage = jnp.where(kept > 0, per_token(advantages.astype(jnp.float32), segment_ids), 0.0)
    # min(rho A, clip(rho) A), written as the choice it is: on the edge of the band the gradient is rho A, not half.
    clipped = jnp.where(advantage > 0, rho > 1 + clip_high, (advantage < 0) & (rho < 1 - clip_low))
    surrogate = jnp.where(clipped, jnp.where(advantage > 0, 1 + clip_high, 1 - clip_low), rho) * advantage
    correction = jnp.where(kept > 0, truncated_importance_weight(lr, tis_cap), 0.0)
    losses = -kept * correction * surrogate

    if aggregation == "sequence_mean":
        counts = segment_sums(kept, segment_ids, num_segments)
        means = segment_sums(losses, segment_ids, num_segments) / jnp.where(counts > 0, counts, 1.0)
        loss_sum, denominator = jnp.sum(sequence_weights * means), jnp.sum(sequence_weights)
    else:
        loss_sum, denominator = jnp.sum(losses), jnp.sum(kept)
    loss_sum *= jnp.where(jnp.any(segment_ids > num_segments), jnp.nan, 1.0)

    metrics = mismatch_metrics(lr, known, tis_cap).add(
        Metrics(
            means={
                "mismatch/not_finite": (jnp.sum(response - known), jnp.sum(response)),
                "mismatch/rejected": (jnp.sum(jnp.where(refused, known, 0.0)), jnp.sum(known)),
                "policy/ratio": (jnp.sum(kept * rho), jnp.sum(kept)),
                "policy/clip_fraction": (jnp.sum(jnp.where(clipped, kept, 0.0)), jnp.sum(kept)),
            }
        )
    )
    if entropy is not None:
        total = jnp.sum(jnp.where(kept > 0, kept * entropy, 0.0))
        metrics = metrics.add(Metrics(means={"policy/entropy": (total, jnp.sum(kept))}))
    return MgpoLoss(loss_sum, denominator, lax.stop_gradient(metrics))
