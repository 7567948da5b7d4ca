"""Supervised fine-tuning: the negative log-likelihood of response tokens, averaged over the global batch."""

import jax
import optax

from vibethinker_jax.models.parameters import Params
from vibethinker_jax.objectives.cross_entropy import cross_entropy_sum
from vibethinker_jax.objectives.metrics import Metrics
from vibethinker_jax.training.forward import Batch, PackedForward
from vibethinker_jax.training.step import TrainStep, fill_metrics


def sft_step(forward: PackedForward, optimizer: optax.GradientTransformation, *, offload: bool = False) -> TrainStep:
    """The compiled SFT step.

    A batch holds tokens, targets, positions, segment_ids (int32) and loss_weights (float32), each
    [rows, sequence_length], as data/loader.py packs them. The loss is sum(weight * -log p(target)) / sum(weight) over
    the global batch.

    Args:
        forward: the model and how to run it.
        optimizer: from training/optimizer.py.
        offload: keep the optimizer's moments in host memory between steps.
    """

    def loss(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array, Metrics]:
        loss_sum, weight_sum = cross_entropy_sum(forward(params, batch).log_probs, batch["loss_weights"])
        return loss_sum, weight_sum, fill_metrics(batch)

    return TrainStep(loss, optimizer, forward, offload=offload)
