"""MGPO: the policy-gradient step over packed responses, and the log-probabilities that it starts from."""

import jax
import numpy as np
import optax

from vibethinker_jax.models.parameters import Params
from vibethinker_jax.objectives.importance import RejectionFilters
from vibethinker_jax.objectives.metrics import Metrics
from vibethinker_jax.objectives.mgpo import NO_FILTERS, Aggregation, mgpo_loss
from vibethinker_jax.training.forward import Batch, PackedForward
from vibethinker_jax.training.step import TrainStep, fill_metrics


class MgpoStep(TrainStep):
    """The compiled MGPO step.

    A batch holds tokens, targets, positions, segment_ids (int32), loss_weights and rollout_log_probs (float32) as
    [rows, sequence_length]; advantages (w A) and sequence_weights (1/G) as float32[rows, segments]; and the scalar
    num_groups, this micro-batch's part of the number of kept groups of the update. For several updates per batch of
    rollouts it also holds old_log_probs, from `log_probs`; without them the update is on-policy: the old
    log-probabilities are the current ones, and no second forward pass is needed.

    Args:
        forward: the model and how to run it.
        optimizer: from training/optimizer.py.
        temperature: of sampling; the trainer's log-probabilities use it too.
        offload: keep the optimizer's moments in host memory between steps.
        clip_low, clip_high, tis_cap, aggregation, filters: see objectives/mgpo.py.
    """

    def __init__(
        self,
        forward: PackedForward,
        optimizer: optax.GradientTransformation,
        *,
        temperature: float,
        clip_low: float,
        clip_high: float,
        tis_cap: float | None,
        aggregation: Aggregation,
        filters: RejectionFilters = NO_FILTERS,
        offload: bool = False,
    ) -> None:
        def loss(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array, Metrics]:
            head = forward(params, batch, temperature=temperature, with_entropy=True)
            result = mgpo_loss(
                head.log_probs,
                batch.get("old_log_probs", jax.lax.stop_gradient(head.log_probs)),
                batch["rollout_log_probs"],
                batch["loss_weights"],
                batch["segment_ids"],
                batch["advantages"],
                batch["sequence_weights"],
                clip_low=clip_low,
                clip_high=clip_high,
                tis_cap=tis_cap,
                aggregation=aggregation,
                filters=filters,
                entropy=head.entropy,
            )
            # Groups are counted on the host: a group's masked responses have weight zero but belong to it.
            denominator = batch["num_groups"] if aggregation == "sequence_mean" else result.denominator
            return result.loss_sum, denominator, result.metrics.add(fill_metrics(batch))

        super().__init__(loss, optimizer, forward, offload=offload)
        self._score = jax.jit(
            lambda params, batch: forward(params, batch, temperature=temperature).log_probs,
            out_shardings=forward.placement.replicated(),
        )

    def log_probs(self, params: Params, batch: Batch) -> np.ndarray:
        """float32[rows, sequence_length] log-probabilities of the targets of a micro-batch, whole on every process."""
        scored = np.asarray(self._score(params, self.place(batch)))
        order = self.forward.order(scored.shape[1])
        if order is None:
            return scored
        restored = np.empty_like(scored)
        restored[:, order] = scored
        return restored
