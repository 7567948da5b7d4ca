"""MGPO's weight of a prompt: how close the policy is to solving it half of the time (VibeThinker-3B report, eq. 2)."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vibethinker_jax.errors import UserError


def max_entropy_weight(
    accuracy: Float[Array | np.ndarray, "groups"], gamma: float
) -> Float[Array | np.ndarray, "groups"]:
    """exp(-gamma * KL(Bernoulli(p) || Bernoulli(1/2))), divergence in nats.

    VibeThinker-3B report eq. 2; the divergence D_ME is written out in the 1.5B report, section 3.4. The weight is 1 at
    p = 1/2 and 2**-gamma at p in {0, 1} (0 log 0 = 0); gamma = 0 recovers GRPO. The gradient with respect to p is
    unbounded at 0 and 1 and taken as 0 there. Outside [0, 1], and for a NaN, the weight is NaN.

    Args:
        accuracy: share p of correct responses per prompt, in [0, 1]. A numpy array stays numpy in its own precision.
        gamma: sharpness, >= 0.

    Returns:
        The weights, in (0, 1], same shape as `accuracy`.

    Raises:
        UserError: gamma is negative.
    """
    if gamma < 0:
        raise UserError(f"max_entropy_weight: gamma is {gamma}; it must be at least 0 (0 is plain GRPO)")
    xp = jnp if isinstance(accuracy, jax.Array) else np
    p = xp.asarray(accuracy)
    certain = (p == 0) | (p == 1)
    # The logarithms see 1/2 instead of 0 and 1, or their infinite derivative would turn the gradient into NaN.
    inner = xp.where(certain, 0.5, p)
    with np.errstate(invalid="ignore"):
        divergence = inner * xp.log(2 * inner) + (1 - inner) * xp.log(2 * (1 - inner))
    return xp.exp(-gamma * xp.where(certain, math.log(2), divergence))
