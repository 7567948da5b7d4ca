"""The forward pass that every training step shares: packed rows in, log-probabilities of their targets out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from vibethinker_jax.attention.attend import AttentionConfig
from vibethinker_jax.attention.zigzag import zigzag_order
from vibethinker_jax.errors import UserError
from vibethinker_jax.models.config import Qwen2Config
from vibethinker_jax.models.parameters import Params
from vibethinker_jax.models.qwen2 import AUTO, build
from vibethinker_jax.objectives.cross_entropy import HeadOutput, head_statistics
from vibethinker_jax.parallel.rules import Placement

LAYOUTS = ("zigzag", "contiguous")

Batch = Mapping[str, Any]  # arrays [rows, sequence_length], or [rows, segments] for what belongs to a document


@dataclass(frozen=True)
class PackedForward:
    """How a step runs the model.

    Attributes:
        model: shape of the parameters.
        placement: mesh.
        compute_dtype: dtype of activations; parameters are float32.
        remat: what the backward pass recomputes (models/qwen2.py).
        head_chunk: tokens per row whose logits exist at once.
        attention: backend, block sizes and strategy over a sharded sequence.
        layout: order in which the tokens of a row lie on the shards of `context`: see `order`. Losses, gradients and
            metrics do not depend on it, but for rounding.
        mlp_chunks: parts in which the inner width of an MLP is computed, one after another, to save memory.
    """

    model: Qwen2Config
    placement: Placement
    compute_dtype: jax.typing.DTypeLike
    remat: str
    head_chunk: int
    attention: AttentionConfig = AUTO
    layout: str = "zigzag"
    mlp_chunks: int = 1

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise UserError(f"attention.layout is {self.layout!r}; choose one of {', '.join(LAYOUTS)}")

    def order(self, length: int) -> np.ndarray | None:
        """Permutation of the tokens of a row that the layout asks for (new place -> old place); None for none.

        Raises:
            UserError: `length` cannot be cut into the two chunks per shard of the zigzag layout.
        """
        shards = self.placement.size("context")
        return zigzag_order(length, shards) if self.layout == "zigzag" and shards > 1 else None

    def __call__(
        self, params: Params, batch: Batch, *, temperature: float = 1.0, with_entropy: bool = False
    ) -> HeadOutput:
        """float32[rows, sequence_length] log-probabilities of batch["targets"] under softmax(logits / temperature).

        Args:
            params: of `model`.
            batch: tokens, targets, positions and segment_ids, as data/loader.py packs them.
            temperature: above 0.
            with_entropy: also return the entropy at every position.
        """
        decoder = build(
            self.model, params, self.placement, self.compute_dtype, self.remat, self.attention, self.mlp_chunks
        )
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
            placement=self.placement,
        )
