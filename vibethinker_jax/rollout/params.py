"""What a caller asks of the rollout engine and what comes back. No JAX."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from vibethinker_jax.errors import UserError

# Temperatures below this, other than 0, would overflow float32 logits.
MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class SamplingParams:
    """How to continue one prompt.

    The next token is drawn from softmax(logits / temperature), truncated by top_k, then by top_p of what is left,
    then by min_p. Log-probabilities are reported for the untruncated distribution.

    Attributes:
        n: completions per prompt.
        temperature: 0 takes the most likely token (the lowest id among equals); otherwise at least 1e-5.
        top_p: keep the smallest set of most likely tokens whose probability reaches this, in (0, 1]; 1 keeps all.
        top_k: keep this many most likely tokens; -1 keeps all.
        min_p: drop tokens less likely than this share of the most likely one, in [0, 1]; 0 keeps all.
        max_new_tokens: longest completion, the stop token included; None: up to the engine's max_length.
        stop_token_ids: tokens that end the completion; None: the tokenizer's; empty: none.
        stop: text that ends the completion: one string, several, or None.
        seed: 0 .. 2**64 - 1. Token t of sample i depends on (seed, i, t) and the prompt alone.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_new_tokens: int | None = None
    stop_token_ids: Sequence[int] | None = None
    stop: str | Sequence[str] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        def replace(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        replace("n", _integer("n", self.n, 1, 2**31 - 1))
        replace("temperature", _number("temperature", self.temperature, 0.0, math.inf))
        replace("top_p", _number("top_p", self.top_p, 0.0, 1.0))
        replace("min_p", _number("min_p", self.min_p, 0.0, 1.0))
        if 0 < self.temperature < MIN_TEMPERATURE or math.isinf(self.temperature):
            raise UserError(f"temperature is {self.temperature}; use 0 for greedy, or a number from {MIN_TEMPERATURE}")
        if self.top_p == 0:
            raise UserError("top_p is 0, which keeps no token; use a number in (0, 1], 1 for no limit")
        if self.top_k != -1:
            replace("top_k", _integer("top_k", self.top_k, 1, 2**31 - 1, "; use -1 for no limit"))
        if self.max_new_tokens is not None:
            replace("max_new_tokens", _integer("max_new_tokens", self.max_new_tokens, 1, 2**31 - 1))
        if self.stop_token_ids is not None:
            if isinstance(self.stop_token_ids, int | str):
                raise UserError(f"stop_token_ids is {self.stop_token_ids!r}; give a list of token ids")
            ids = (_integer("stop_token_ids", token, 0, 2**31 - 1) for token in self.stop_token_ids)
            replace("stop_token_ids", tuple(dict.fromkeys(ids)))
        if self.stop is not None:
            strings = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
            for string in strings:
                # U+FFFD stands for a character whose bytes are not all there yet: no text to wait for.
                if not isinstance(string, str) or not string or "\ufffd" in string:
                    raise UserError(f"stop holds {string!r}; give non-empty strings without U+FFFD")
            replace("stop", strings)
        replace("seed", _integer("seed", self.seed, 0, 2**64 - 1))


@dataclass(frozen=True)
class Completion:
    """One sampled continuation.

    Attributes:
        text: decoded tokens without special tokens, without the stop token and cut before a stop string.
        tokens: everything that was sampled: with the stop token, and with the tokens that spell a stop string up to
            and including the one that completes it. `text` may therefore be shorter than the decoded tokens.
        log_probs: per token, log-probability under softmax(logits / temperature) before any truncation; temperature 1
            for greedy decoding. Each is exactly a float32.
        finish_reason: "stop" (a stop token or string) or "length" (max_new_tokens or max_length).
        stop_reason: the stop token's id or the stop string; None after "length".
        prompt_tokens: the token ids that were continued.
        seed: of the request.
        weights_version: of the weights that sampled it, see RolloutEngine.
    """

    text: str
    tokens: list[int]
    log_probs: list[float]
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None
    prompt_tokens: list[int]
    seed: int
    weights_version: int


@dataclass(frozen=True)
class RequestHandle:
    """Names what one call of `RolloutEngine.submit` asked for."""

    id: int


class FinishedSample(NamedTuple):
    """A completion and what it belongs to: sample `sample_index` of prompt `prompt_index` of the request."""

    handle: RequestHandle
    prompt_index: int
    sample_index: int
    completion: Completion


def _integer(name: str, value: Any, low: int, high: int, hint: str = "") -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or not low <= number <= high:
        raise UserError(f"{name} is {value!r}; use an integer from {low} to {high}{hint}")
    return number


def _number(name: str, value: Any, low: float, high: float) -> float:
    try:
        number = math.nan if isinstance(value, str | bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not low <= number <= high:
        raise UserError(f"{name} is {value!r}; use a number from {low} to {high}")
    return number
