"""A whole SFT step on one packed row as long as the recipe's, over eight devices that share its tokens."""

import jax
import numpy as np
import pytest

from tests.models.tiny import tiny_config
from vibethinker_jax.attention.attend import AttentionConfig
from vibethinker_jax.models.parameters import init_params
from vibethinker_jax.parallel.mesh import make_mesh
from vibethinker_jax.parallel.rules import UNPLACED, Placement
from vibethinker_jax.training.forward import PackedForward
from vibethinker_jax.training.optimizer import OptimizerConfig, make_optimizer
from vibethinker_jax.training.sft_step import sft_step


def model_of(layers):
    return tiny_config(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=65_536,
    )


def packed_row(length: int, longest: int, padding: int, vocab: int) -> dict[str, np.ndarray]:
    """One row of documents of 1 to longest / 5 tokens with a document of `longest` among them, and padding at the end.

    The first third of every document is its prompt, which is not trained.
    """
    generator = np.random.default_rng(8)
    lengths = [longest]
    while (rest := length - padding - sum(lengths)) > 0:
        lengths.append(min(rest, int(generator.integers(1, longest // 5))))
    # Not at the start of the row: it begins and ends inside the shards of some devices.
    lengths = [*lengths[1:4], lengths[0], *lengths[4:]]
    batch = {name: np.zeros((1, length), np.int32) for name in ("tokens", "targets", "positions", "segment_ids")}
    batch["loss_weights"] = np.zeros((1, length), np.float32)
    start = 0
    for segment, size in enumerate(lengths, start=1):
        tokens = generator.integers(0, vocab, size)
        here, predicting = slice(start, start + size), slice(start, start + size - 1)
        batch["tokens"][0, here] = tokens
        batch["targets"][0, predicting] = tokens[1:]
        batch["positions"][0, here] = np.arange(size)
        batch["segment_ids"][0, here] = segment
        batch["loss_weights"][0, predicting] = np.arange(1, size) > size // 3
        start += size
    return batch


def step_once(config, batch, placement, strategy):
    """(metrics, largest change of any parameter) of the first optimizer step."""
    optimizer, _ = make_optimizer(OptimizerConfig(1e-3, 1e-3, 0.0, 0.9, 0.95, 1e-8, 0.1, 1.0), config, total_steps=4)
    attention = AttentionConfig("blockwise", strategy)
    forward = PackedForward(config, placement, "float32", "block", head_chunk=2048, attention=attention)
    step = sft_step(forward, optimizer)
    before = init_params(config, seed=4)
    params = jax.tree.map(lambda x: x.copy(), before)
    if placement.mesh is not None:
        params = jax.device_put(params, step.state_shardings.params)
    state, metrics = step(step.init(params), [batch])
    moved = jax.tree.map(lambda a, b: np.max(np.abs(jax.device_get(a) - b)), state.params, before)
    return metrics.summary(), max(jax.tree.leaves(moved))


def assert_a_plausible_step(metrics, moved, batch, vocab):
    assert metrics["filled"] == pytest.approx(np.mean(batch["segment_ids"] > 0), rel=1e-6)
    # Random tokens and fresh parameters: nothing beats knowing nothing by much, and nothing is much worse.
    assert metrics["loss"] == pytest.approx(np.log(vocab), rel=0.05)
    assert 0 < metrics["gradient_norm"] < 10
    # Adam's first step is the learning rate, times the sign of the gradient, and decay.
    assert moved == pytest.approx(1e-3, rel=0.2)


def assert_same_step(found, expected):
    for name in ("loss", "gradient_norm"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5), name


def test_a_row_of_8k_tokens_is_the_same_step_on_one_device_gathered_and_as_a_ring():
    config = model_of(layers=2)
    batch = packed_row(8192, longest=2500, padding=700, vocab=config.vocab_size)
    expected, moved = step_once(config, batch, UNPLACED, "auto")
    assert_a_plausible_step(expected, moved, batch, config.vocab_size)
    for strategy in ("gather", "ring"):
        found, _ = step_once(config, batch, Placement(make_mesh(context=8)), strategy)
        assert_same_step(found, expected)


@pytest.mark.slow
def test_a_row_of_64k_tokens_is_the_same_step_gathered_and_as_a_ring():
    config = model_of(layers=1)
    batch = packed_row(65_536, longest=20_000, padding=3000, vocab=config.vocab_size)
    placement = Placement(make_mesh(context=8))
    gathered, moved = step_once(config, batch, placement, "gather")
    assert_a_plausible_step(gathered, moved, batch, config.vocab_size)
    ring, _ = step_once(config, batch, placement, "ring")
    assert_same_step(ring, gathered)
