"""The mathematics of training: one formula of the papers per file, pure functions of arrays."""

from vibethinker_jax.objectives.advantage import GroupAdvantages, group_advantages
from vibethinker_jax.objectives.cross_entropy import HeadOutput, cross_entropy_sum, head_statistics
from vibethinker_jax.objectives.importance import RejectionFilters, mismatch_metrics
from vibethinker_jax.objectives.long2short import length_shift, long2short_advantages
from vibethinker_jax.objectives.max_entropy import max_entropy_weight
from vibethinker_jax.objectives.metrics import Metrics
from vibethinker_jax.objectives.mgpo import MgpoLoss, mgpo_loss

__all__ = [
    "GroupAdvantages",
    "HeadOutput",
    "Metrics",
    "MgpoLoss",
    "RejectionFilters",
    "cross_entropy_sum",
    "group_advantages",
    "head_statistics",
    "length_shift",
    "long2short_advantages",
    "max_entropy_weight",
    "mgpo_loss",
    "mismatch_metrics",
]
