"""From the verdicts of one batch of groups to advantages, weights and denominators (VibeThinker-3B report, eq. 1-3).

Host code, numpy float64: the inputs come from the verifiers, and every process computes the same numbers from them.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from jaxtyping import Bool, Float

from vibethinker_jax.errors import UserError
from vibethinker_jax.objectives.max_entropy import max_entropy_weight
from vibethinker_jax.objectives.metrics import Metrics

EPSILON = 1e-6
MIN_VERDICTS = 2

NormaliseBy = Literal["shaped_std", "binary_std", "none"]


@dataclass(frozen=True)
class GroupAdvantages:
    """What the update needs to know about each response of a batch of groups. All arrays are float64 unless said.

    Attributes:
        advantages: [groups, samples], w(q) * A_i; 0 for samples without verdict and in dropped groups.
        sample_weights: [groups, samples], the 1/G of eq. 3, G counting the samples with a verdict; 0 for samples
            without verdict, in dropped groups, and for truncated samples when these are masked.
        kept: bool [groups], groups with enough verdicts.
        accuracy: [groups], p(q); NaN where `correct` is undefined or the group has no verdict.
        weight: [groups], w(q); 1 where `correct` is undefined.
        metrics: means over the batch, names under `groups/` and `samples/`.
    """

    advantages: Float[np.ndarray, "groups samples"]
    sample_weights: Float[np.ndarray, "groups samples"]
    kept: Bool[np.ndarray, "groups"]
    accuracy: Float[np.ndarray, "groups"]
    weight: Float[np.ndarray, "groups"]
    metrics: Metrics

    @property
    def num_kept(self) -> int:
        """Number of kept groups: what the sum of the sequence-mean loss over the whole batch is divided by."""
        return int(self.kept.sum())


def group_advantages(
    rewards: Float[np.ndarray, "groups samples"],
    correct: Float[np.ndarray, "groups samples"],
    valid: Bool[np.ndarray, "groups samples"],
    *,
    gamma: float,
    truncated: Bool[np.ndarray, "groups samples"] | None = None,
    mask_truncated: bool = False,
    shift: Float[np.ndarray, "groups samples"] | None = None,
    normalise_by: NormaliseBy = "shaped_std",
) -> GroupAdvantages:
    """Group-relative advantages times MGPO's prompt weight.

    VibeThinker-3B report eq. 1-3; the advantage is given in the 1.5B report, section 3.4. With r' = rewards + shift,

        A_i = (r'_i - mean r') / (std + 1e-6)      population std over the samples with a verdict
        p   = mean of `correct`, w = exp(-gamma KL(p || 1/2)), advantages = w A

    A is exactly 0 where all r' of a group are equal, whatever rounding does to their mean. Samples without a verdict
    leave p, mean, std and G. A group with fewer than two verdicts is dropped and counted.

    Args:
        rewards: reward of each sample; must be finite where `valid`, ignored elsewhere.
        correct: 1 or 0, NaN where the verifier decides no correctness (rubrics): such a group takes w = 1.
        valid: the sample has a verdict; False after a failure of the machinery.
        gamma: sharpness of w, >= 0.
        truncated: the sample hit the length limit.
        mask_truncated: a truncated sample counts in the group as incorrect with reward 0, and gets sample weight 0.
        shift: added to the rewards, for shaping that must not change p.
        normalise_by: the std that divides. `shaped_std`: of r'. `binary_std`: of `rewards`; where these are all equal
            A is not divided. `none`: A is never divided.

    Raises:
        UserError: shapes differ, a valid reward is not finite, `correct` is not 0, 1 or NaN, unknown `normalise_by`.
    """
    rewards, correct = np.asarray(rewards, np.float64), np.asarray(correct, np.float64)
    valid = np.asarray(valid, bool)
    shift = np.zeros_like(rewards) if shift is None else np.asarray(shift, np.float64)
    masked = np.zeros_like(valid)
    if mask_truncated:
        if truncated is None:
            raise UserError("group_advantages: mask_truncated is True without `truncated`; pass which samples were cut")
        masked = np.asarray(truncated, bool) & valid
    _check(rewards, correct, valid, masked, shift, normalise_by)

    rewards = np.where(valid & ~masked, rewards, 0.0)
    correct = np.where(masked & ~np.isnan(correct), 0.0, correct)
    shaped = rewards + np.where(valid & ~masked, shift, 0.0)
    verdicts = valid.sum(axis=1)
    kept = verdicts >= MIN_VERDICTS

    accuracy = _mean(correct, valid)
    undefined = np.isnan(accuracy)
    weight = np.where(undefined, 1.0, max_entropy_weight(np.where(undefined, 0.5, accuracy), gamma))

    centred = shaped - _mean(shaped, valid)[:, None]
    if normalise_by == "shaped_std":
        scale = _std(shaped, valid) + EPSILON
    elif normalise_by == "binary_std":
        scale = np.where(_all_equal(rewards, valid), 1.0, _std(rewards, valid) + EPSILON)
    else:
        scale = np.ones(len(rewards))
    signal = kept & ~_all_equal(shaped, valid)
    advantages = np.where(signal[:, None] & valid, weight[:, None] * centred / scale[:, None], 0.0)
    counted = kept[:, None] & valid & ~masked
    return GroupAdvantages(
        advantages=advantages,
        sample_weights=np.where(counted, 1.0 / np.maximum(verdicts, 1)[:, None], 0.0),
        kept=kept,
        accuracy=accuracy,
        weight=weight,
        metrics=_metrics(kept, signal, accuracy, weight, valid, masked),
    )


def _check(
    rewards: np.ndarray,
    correct: np.ndarray,
    valid: np.ndarray,
    masked: np.ndarray,
    shift: np.ndarray,
    normalise_by: str,
) -> None:
    if normalise_by not in get_args(NormaliseBy):
        raise UserError(f"group_advantages: normalise_by is {normalise_by!r}; use one of {get_args(NormaliseBy)}")
    shapes = [x.shape for x in (rewards, correct, valid, masked, shift)]
    if rewards.ndim != 2 or len(set(shapes)) != 1:
        raise UserError(f"group_advantages: shapes are {shapes}; pass equal [groups, samples] arrays")
    checks = {
        "rewards": (rewards, ~np.isfinite(rewards), "clear `valid` for samples without a verdict"),
        "shift": (shift, ~np.isfinite(shift), "pass finite shifts"),
        "correct": (correct, ~np.isnan(correct) & (correct != 0) & (correct != 1), "pass 0, 1 or NaN (undefined)"),
    }
    for name, (values, bad, remedy) in checks.items():
        if (bad & valid).any():
            group, sample = np.argwhere(bad & valid)[0]
            raise UserError(f"group_advantages: {name}[{group}, {sample}] is {values[group, sample]}; {remedy}")


def _mean(values: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Mean over the valid samples of each group, NaN where there is none."""
    count = valid.sum(axis=1)
    total = np.where(valid, values, 0.0).sum(axis=1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _std(values: np.ndarray, valid: np.ndarray) -> np.ndarray:
    return np.sqrt(_mean((values - _mean(values, valid)[:, None]) ** 2, valid))


def _all_equal(values: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Whether a group's valid values are one number: compared, because the std of equal floats need not be 0."""
    lowest = np.where(valid, values, np.inf).min(axis=1, initial=np.inf)
    highest = np.where(valid, values, -np.inf).max(axis=1, initial=-np.inf)
    return lowest >= highest


def _metrics(
    kept: np.ndarray,
    signal: np.ndarray,
    accuracy: np.ndarray,
    weight: np.ndarray,
    valid: np.ndarray,
    masked: np.ndarray,
) -> Metrics:
    def over(values: np.ndarray, members: np.ndarray) -> tuple[float, float]:
        return float(values[members].sum()), float(members.sum())

    every = np.ones_like(kept)
    judged = kept & ~np.isnan(accuracy)
    return Metrics(
        means={
            "groups/accuracy": over(accuracy, judged),
            "groups/all_wrong": over(accuracy == 0, judged),
            "groups/all_correct": over(accuracy == 1, judged),
            "groups/weight": over(weight, kept),
            "groups/without_signal": over(~signal, kept),
            "groups/dropped": over(~kept, every),
            "samples/without_verdict": over(~valid, np.ones_like(valid)),
            "samples/masked": over(masked, valid),
        }
    )
