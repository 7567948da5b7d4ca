"""Long2Short: among correct responses to a prompt, prefer the shorter (VibeThinker-3B report, section 2.2.2)."""

import numpy as np
from jaxtyping import Bool, Float, Int

from vibethinker_jax.errors import UserError
from vibethinker_jax.objectives.advantage import GroupAdvantages, NormaliseBy, group_advantages


def length_shift(
    lengths: Int[np.ndarray, "groups samples"], correct: Bool[np.ndarray, "groups samples"], *, lam: float = 0.2
) -> Float[np.ndarray, "groups samples"]:
    """What Long2Short adds to the rewards of each group, float64.

    VibeThinker-3B report, section 2.2.2: over the set C of correct responses of a group, with s_i = 1 / L_i,

        shift_i = lam (s_i - mean s) / max_j |s_j - mean s|        and 0 outside C

    The shifts of a group sum to 0 (up to rounding) and the largest is `lam` in size. All 0 when C has fewer than two
    members or all of them have the same length.

    Args:
        lengths: L, tokens of each response, stop token included; at least 1 where `correct`.
        correct: membership of C: verified correct.
        lam: lambda, the size of the largest shift, >= 0.

    Raises:
        UserError: a correct response has a length below 1; lam is negative.
    """
    lengths, correct = np.asarray(lengths), np.asarray(correct, bool)
    if lam < 0:
        raise UserError(f"length_shift: lam is {lam}; it must be at least 0 (0 changes nothing)")
    if (correct & (lengths < 1)).any():
        group, sample = np.argwhere(correct & (lengths < 1))[0]
        raise UserError(
            f"length_shift: lengths[{group}, {sample}] is {lengths[group, sample]}; count the tokens of the response, "
            "the stop token included"
        )
    inverse = np.where(correct, 1.0 / np.maximum(lengths, 1), 0.0)
    mean = inverse.sum(axis=1, keepdims=True) / np.maximum(correct.sum(axis=1, keepdims=True), 1)
    deviation = np.where(correct, inverse - mean, 0.0)
    largest = np.abs(deviation).max(axis=1, keepdims=True, initial=0.0)
    # Lengths are compared, not deviations: rounding gives equal lengths a tiny deviation, which division would blow up.
    longest = np.where(correct, lengths, 0).max(axis=1, keepdims=True, initial=0)
    differs = (correct & (lengths < longest)).any(axis=1, keepdims=True)
    return np.where(differs, lam * deviation / np.where(differs, largest, 1.0), 0.0)


def long2short_advantages(
    rewards: Float[np.ndarray, "groups samples"],
    correct: Float[np.ndarray, "groups samples"],
    valid: Bool[np.ndarray, "groups samples"],
    lengths: Int[np.ndarray, "groups samples"],
    *,
    gamma: float,
    lam: float = 0.2,
    normalise_by: NormaliseBy = "shaped_std",
    truncated: Bool[np.ndarray, "groups samples"] | None = None,
    mask_truncated: bool = False,
) -> GroupAdvantages:
    """MGPO's advantages of rewards shifted by length; p(q) and w(q) still come from binary correctness.

    A group whose responses are all correct has no signal in plain MGPO; here a difference in length gives it one.
    The report does not say what divides such a group, hence `normalise_by`:

    - `shaped_std`, the literal reading: r' goes through the same advantage. In an all-correct group the division
      cancels lam, so that a small preference becomes a full-size gradient, damped only by w = 2**-gamma.
    - `binary_std`: mixed groups are divided by the std of the unshifted rewards; an all-correct group is not divided,
      so that |A| <= lam.
    - `none`: no group is divided.

    Arguments as in `group_advantages` and `length_shift`. Masked truncated samples and samples without verdict are not
    in the set of correct responses.
    """
    counted = np.asarray(valid, bool) & (np.asarray(correct, np.float64) == 1)
    if mask_truncated and truncated is not None:
        counted &= ~np.asarray(truncated, bool)
    return group_advantages(
        rewards,
        correct,
        valid,
        gamma=gamma,
        truncated=truncated,
        mask_truncated=mask_truncated,
        shift=length_shift(lengths, counted, lam=lam),
        normalise_by=normalise_by,
    )
