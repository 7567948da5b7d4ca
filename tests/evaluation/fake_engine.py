"""An engine without a model: the same API, completions drawn from (prompt, seed, sample index) alone."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vibethinker_jax.rollout.params import Completion, FinishedSample, RequestHandle, SamplingParams


class Killed(BaseException):
    """Stands for a kill: nothing may catch it."""


@dataclass
class FakeEngine:
    """Answers with the number that the prompt asks for, or with the next one, as a coin keyed by the sample decides.

    Attributes:
        share_right: probability of the right answer.
        kill_after: samples after which iteration dies.
        write: response text from (right number, whether to be right); default: boxed.
    """

    share_right: float = 0.5
    kill_after: int | None = None
    write: Callable[[int, bool], str] = lambda right, luck: f"so \\boxed{{{right if luck else right + 1}}}"
    max_length: int = 4096

    def __post_init__(self) -> None:
        self.submitted: list[list[SamplingParams]] = []
        self.cancelled: list[RequestHandle] = []
        self._waiting: list[FinishedSample] = []

    def submit(self, prompts: Sequence[Any], params: Sequence[SamplingParams]) -> RequestHandle:
        handle = RequestHandle(len(self.submitted))
        self.submitted.append(list(params))
        samples = [
            FinishedSample(handle, index, sample, self._completion(prompt, one, sample))
            for index, (prompt, one) in enumerate(zip(prompts, params, strict=True))
            for sample in range(one.n)
        ]
        # Samples finish in an order that has nothing to do with the prompts'.
        order = np.random.default_rng(len(samples)).permutation(len(samples))
        self._waiting += [samples[i] for i in order]
        return handle

    def completions(self) -> Iterator[FinishedSample]:
        done = 0
        while self._waiting:
            if done == self.kill_after:
                raise Killed
            done += 1
            yield self._waiting.pop(0)

    def cancel(self, handle: RequestHandle) -> None:
        self.cancelled.append(handle)
        self._waiting = [sample for sample in self._waiting if sample.handle != handle]

    def _completion(self, prompt: Any, params: SamplingParams, sample: int) -> Completion:
        right = int(prompt[-1]["content"].split()[-1])
        key = hashlib.sha256(f"{prompt}{params.seed}{sample}".encode()).digest()
        text = self.write(right, key[0] < 256 * self.share_right)
        length = 1 + key[1]
        limit = params.max_new_tokens or self.max_length
        return Completion(
            text=text,
            tokens=[0] * min(length, limit),
            log_probs=[0.0] * min(length, limit),
            finish_reason="stop" if length < limit else "length",
            stop_reason=None,
            prompt_tokens=[0] * 5,
            seed=params.seed,
            weights_version=0,
        )
