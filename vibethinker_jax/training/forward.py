"""The forward pass that every training step shares: packed rows in, log-probabilities of their targets out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from vibethinker_jax.models.config import Qwen2Config
from vibethinker_jax.models.parameters import Params
from vibethinker_jax.models.qwen2 import build
from vibethinker_jax.objectives.cross_entropy import HeadOutput, head_statistics
from vibethinker_jax.parallel.rules import Placement

Batch = Mapping[str, Any]  # arrays [rows, row_length], or [rows, segments] for what belongs to a document


@dataclass(frozen=True)
class PackedForward:
    """How a step runs the model.

    Attributes:
        model: shape of the parameters.
        placement: mesh.
        compute_dtype: dtype of activations; parameters are float32.
        remat: what the backward pass recomputes (models/qwen2.py).
        head_chunk: tokens per row whose logits exist at once.
    """

    model: Qwen2Config
    placement: Placement
    compute_dtype: jax.typing.DTypeLike
    remat: str
    head_chunk: int

    def __call__(
        self, params: Params, batch: Batch, *, temperature: float = 1.0, with_entropy: bool = False
    ) -> HeadOutput:
        """float32[rows, row_length] log-probabilities of batch["targets"] under softmax(logits / temperature).

        Args:
            params: of `model`.
            batch: tokens, targets, positions and segment_ids, as data/loader.py packs them.
            temperature: above 0.
            with_entropy: also return the entropy at every position.
        """
        decoder = build(self.model, params, self.placement, self.compute_dtype, self.remat)
        hidden = decoder(batch["tokens"], batch["positions"], batch["segment_ids"])
        return head_statistics(
            hidden,
            decoder.head_table,
            batch["targets"],
            vocab_size=self.model.vocab_size,
            temperature=temperature,
            chunk=self.head_chunk,
            shards=self.placement.size("context"),
            batch_shards=self.placement.size("replica", "fsdp"),
            with_entropy=with_entropy,
        )
