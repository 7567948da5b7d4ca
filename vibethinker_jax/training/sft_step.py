"""Supervised fine-tuning: the negative log-likelihood of response tokens, averaged over the global batch."""

import jax
import jax.numpy as jnp
import optax

from vibethinker_jax.models.config import Qwen2Config
from vibethinker_jax.models.parameters import Params
from vibethinker_jax.models.qwen2 import build
from vibethinker_jax.objectives.cross_entropy import cross_entropy_sum, head_statistics
from vibethinker_jax.objectives.metrics import Metrics
from vibethinker_jax.parallel.rules import Placement
from vibethinker_jax.training.step import Batch, TrainStep


def sft_step(
    model: Qwen2Config,
    optimizer: optax.GradientTransformation,
    placement: Placement,
    *,
    compute_dtype: jax.typing.DTypeLike,
    remat: str,
    head_chunk: int,
) -> TrainStep:
    """The compiled SFT step.

    A batch holds tokens, targets, positions, segment_ids (int32) and loss_weights (float32), [rows, row_length] each,
    as data/loader.py packs them. The loss is sum(weight * -log p(target)) / sum(weight) over the global batch.

    Args:
        model: shape of the parameters.
        optimizer: from training/optimizer.py.
        placement: mesh.
        compute_dtype: dtype of activations.
        remat: what the backward pass recomputes (models/qwen2.py).
        head_chunk: tokens per row whose logits exist at once.
    """

    def loss(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array, Metrics]:
        decoder = build(model, params, placement, compute_dtype, remat)
        hidden = decoder(batch["tokens"], batch["positions"], batch["segment_ids"])
        head = head_statistics(
            hidden,
            decoder.head_table,
            batch["targets"],
            vocab_size=model.vocab_size,
            chunk=head_chunk,
            shards=placement.size("context"),
            batch_shards=placement.size("replica", "fsdp"),
        )
        loss_sum, weight_sum = cross_entropy_sum(head.log_probs, batch["loss_weights"])
        tokens = jnp.sum(batch["segment_ids"] > 0).astype(jnp.float32)
        filled = Metrics(means={"filled": (tokens, jnp.float32(batch["tokens"].size))})
        return loss_sum, weight_sum, filled

    return TrainStep(loss, optimizer, model, placement)
