"""A tiny random policy and engines around it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vibethinker_jax.models.config import Qwen2Config
from vibethinker_jax.models.parameters import Params, init_params
from vibethinker_jax.models.qwen2 import build
from vibethinker_jax.parallel.rules import UNPLACED, Placement
from vibethinker_jax.rollout.engine import RolloutEngine
from vibethinker_jax.rollout.params import Completion

# Asymmetric on purpose; 101 tokens are padded to 128. The wide initialisation makes peaked distributions in which
# every token of the context matters.
RAW_CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "initializer_range": 0.3,
}
STOP_IDS = (99, 100)


class ByteTokenizer:
    """Tokens 0..98 are the bytes of 'a', 'b', ... and of the pieces below; the stop ids have no text."""

    stop_token_ids = STOP_IDS
    # 'é' needs two tokens, 0xC3 0xA9, as in a byte-level vocabulary.
    pieces = (*(bytes([code]) for code in range(32, 127)), b"\xc3", b"\xa9", b"the ", b"abc")

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 32 for letter in text]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.encode("".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>")

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        assert skip_special_tokens
        return b"".join(self.pieces[token] for token in tokens if token < 99).decode("utf-8", errors="replace")


@dataclasses.dataclass(frozen=True)
class StandInPolicy:
    """What the engine reads of a policy."""

    config: Qwen2Config
    params: Params
    tokenizer: Any = dataclasses.field(default_factory=ByteTokenizer)
    placement: Placement = UNPLACED
    compute_dtype: Any = jnp.float32


@pytest.fixture(scope="session")
def config() -> Qwen2Config:
    return Qwen2Config.from_hf(RAW_CONFIG, source="test")


@pytest.fixture(scope="session")
def policy(config: Qwen2Config) -> StandInPolicy:
    return StandInPolicy(config, random_params(config, seed=0))


@pytest.fixture(scope="session")
def other_policy(config: Qwen2Config) -> StandInPolicy:
    """Other weights, same shape."""
    return StandInPolicy(config, random_params(config, seed=1))


@pytest.fixture(scope="session")
def shared_engine(policy: StandInPolicy) -> RolloutEngine:
    """One engine for tests that leave it idle: five slots, chunks of 8, rows of 48 tokens, bursts of 4."""
    return RolloutEngine(policy, max_slots=5, max_length=44, prefill_chunk=8, prefill_batch=3, decode_burst=4)


@pytest.fixture
def engine(shared_engine: RolloutEngine) -> RolloutEngine:
    yield shared_engine
    assert list(shared_engine.completions()) == [], "the test left work behind"


@pytest.fixture(scope="session")
def dense_logits(config: Qwen2Config) -> Callable[[StandInPolicy, Sequence[int]], np.ndarray]:
    """float32 logits at every position of a text by one forward over all of it, as the trainer does it."""
    forward = jax.jit(lambda params, tokens: (model := build(config, params)).logits(model(tokens)))

    def logits(policy: StandInPolicy, tokens: Sequence[int]) -> np.ndarray:
        padded = np.zeros((1, 64), np.int32)  # causal: what follows changes nothing
        padded[0, : len(tokens)] = tokens
        return np.asarray(forward(policy.params, padded))[0, : len(tokens), : config.vocab_size]

    return logits


@pytest.fixture(scope="session")
def trainer_log_probs(dense_logits: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Log-probabilities of a completion's tokens: a dense forward in float32, its softmax in float64."""

    def log_probs(policy: StandInPolicy, completion: Completion, temperature: float = 1.0) -> np.ndarray:
        tokens = completion.prompt_tokens + completion.tokens
        positions = np.arange(len(completion.prompt_tokens), len(tokens))
        return log_softmax(dense_logits(policy, tokens), temperature)[positions - 1, np.array(tokens)[positions]]

    return log_probs


def log_softmax(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """In float64, over the last axis."""
    scaled = logits.astype(np.float64) / temperature
    scaled -= scaled.max(-1, keepdims=True)
    return scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))


def random_params(config: Qwen2Config, seed: int) -> Params:
    """Initial parameters with random biases and norms instead of zeros and ones."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: leaf + 0.1 * rng.standard_normal(leaf.shape, dtype=np.float32), init_params(config, seed)
    )


def bits(completion: Completion) -> tuple[Any, ...]:
    """Everything about a completion, log-probabilities as bit patterns."""
    return (
        completion.text,
        completion.tokens,
        np.array(completion.log_probs, np.float32).tobytes(),
        completion.finish_reason,
        completion.stop_reason,
        completion.prompt_tokens,
    )
