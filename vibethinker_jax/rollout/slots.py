"""The host's record of the slots, in the arrays that a decode burst takes."""

import numpy as np

from vibethinker_jax.rollout.sampling import SamplingState, seed_key_data
from vibethinker_jax.rollout.scheduler import SampleJob
from vibethinker_jax.rollout.steps import MAX_STOP_IDS, SlotState


class SlotTable:
    """Numpy arrays with one entry per slot, changed in place.

    Attributes:
        state: what the next burst is given.
    """

    def __init__(self, slots: int) -> None:
        def integers(fill: int = 0) -> np.ndarray:
            return np.full(slots, fill, np.int32)

        self.state = SlotState(
            active=np.zeros(slots, bool),
            token=integers(),
            cached=integers(),
            generated=integers(),
            limit=integers(),
            stop_ids=np.full((slots, MAX_STOP_IDS), -1, np.int32),
            sampling=SamplingState(
                key=np.zeros((slots, 2), np.uint32),
                sample_index=integers(),
                temperature=np.zeros(slots, np.float32),
                top_k=integers(-1),
                top_p=np.ones(slots, np.float32),
                min_p=np.zeros(slots, np.float32),
            ),
        )

    def start(self, slot: int, sample: SampleJob) -> None:
        """Puts a sample into a slot; its prompt but for the last token is in the cache."""
        prompt, state, sampling = sample.prompt, self.state, self.state.sampling
        state.active[slot] = True
        state.token[slot] = prompt.tokens[-1]
        state.cached[slot] = len(prompt.tokens) - 1
        state.generated[slot] = 0
        state.limit[slot] = prompt.limit
        state.stop_ids[slot] = -1
        state.stop_ids[slot, : len(prompt.stop_ids)] = prompt.stop_ids
        sampling.key[slot] = seed_key_data(prompt.params.seed)
        sampling.sample_index[slot] = sample.sample_index
        sampling.temperature[slot] = prompt.params.temperature
        sampling.top_k[slot] = prompt.params.top_k
        sampling.top_p[slot] = prompt.params.top_p
        sampling.min_p[slot] = prompt.params.min_p

    def stop(self, slot: int) -> None:
        """Leaves a slot idle, with settings that ask for no work: greedy, nothing truncated."""
        self.state.active[slot] = False
        self.state.sampling.temperature[slot] = 0

    def advance(self, tokens: np.ndarray, generated: np.ndarray) -> np.ndarray:
        """Follows a burst.

        Args:
            tokens: int32[burst, slots] as the burst returns them.
            generated: int32[slots] after it.

        Returns:
            int32[slots]: how many tokens each slot has got; 0 where nothing runs.
        """
        state = self.state
        new = generated - state.generated
        slots = np.arange(len(new))
        state.token[:] = np.where(new > 0, tokens[new - 1, slots], state.token)
        state.cached[:] += new
        state.generated[:] = generated
        return new
