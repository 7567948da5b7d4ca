"""A tiny model and recorded batches that exercise packing, padding and unequal lengths."""

import jax
import numpy as np
import pytest

from tests.models.tiny import tiny_config
from vibethinker_jax.models.parameters import init_params


@pytest.fixture(scope="session")
def tiny():
    """(config, params): 2 layers, 6 query and 2 KV heads, biases and norms away from their neutral values."""
    config = tiny_config(num_hidden_layers=2)
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: (
            x + 0.1 * jax.random.normal(jax.random.key(len(str(path))), x.shape)
            if path[-1].key in ("bias", "scale")
            else x
        ),
        init_params(config, seed=1),
    )
    return config, params


def packed_batch(seed: int, rows: int, sequence_length: int, vocab: int) -> dict[str, np.ndarray]:
    """Rows with documents of random lengths, some padding, and prompts that are not trained."""
    generator = np.random.default_rng(seed)
    shape = (rows, sequence_length)
    batch = {name: np.zeros(shape, np.int32) for name in ("tokens", "targets", "positions", "segment_ids")}
    batch["loss_weights"] = np.zeros(shape, np.float32)
    for row in range(rows):
        start, segment = 0, 0
        while True:
            length = int(generator.integers(2, 9))
            if start + length > sequence_length or segment == 4:
                break
            segment += 1
            tokens = generator.integers(0, vocab, length)
            here, predicting = slice(start, start + length), slice(start, start + length - 1)
            batch["tokens"][row, here] = tokens
            batch["targets"][row, predicting] = tokens[1:]
            batch["positions"][row, here] = np.arange(length)
            batch["segment_ids"][row, here] = segment
            prompt = int(generator.integers(1, length))
            batch["loss_weights"][row, predicting] = np.arange(1, length) >= prompt
            start += length
    return batch


@pytest.fixture(scope="session")
def sft_batch(tiny):
    return packed_batch(0, rows=8, sequence_length=24, vocab=tiny[0].vocab_size)


@pytest.fixture(scope="session")
def mgpo_batch(tiny):
    """A recorded RL batch: off-policy by noise, advantages of both signs, one masked response, one bad log-prob."""
    batch = packed_batch(1, rows=8, sequence_length=24, vocab=tiny[0].vocab_size)
    generator = np.random.default_rng(2)
    old = generator.normal(-4.5, 0.3, batch["tokens"].shape).astype(np.float32)
    batch["old_log_probs"] = old
    batch["rollout_log_probs"] = old + generator.normal(0, 0.4, old.shape).astype(np.float32)
    batch["rollout_log_probs"][0, 1] = np.nan
    batch["advantages"] = generator.normal(0, 1, (8, 5)).astype(np.float32)
    batch["sequence_weights"] = np.full((8, 5), 1 / 8, np.float32)
    batch["sequence_weights"][3, 0] = 0
    batch["num_groups"] = np.float32(4)
    return batch
