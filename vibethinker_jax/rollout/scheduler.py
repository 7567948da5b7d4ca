"""Which sample runs in which slot: first come, first served. Plain Python, no JAX, no clock.

Every decision follows from what was submitted and which samples have finished, so that all processes of a
multi-process run come to the same one.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from vibethinker_jax.rollout.params import RequestHandle, SamplingParams
from vibethinker_jax.rollout.stopping import StopStrings


@dataclass(eq=False)
class PromptJob:
    """A prompt on its way: waiting, then in a prefill row until the last of its samples has a slot.

    Attributes:
        index: its place in the request.
        stop_ids: tokens that end a sample.
        limit: most tokens a sample may have.
        stop_strings: text that ends a sample, or None.
        placed: how many of its n samples have got a slot.
    """

    handle: RequestHandle
    index: int
    tokens: list[int]
    params: SamplingParams
    stop_ids: tuple[int, ...]
    limit: int
    stop_strings: StopStrings | None
    placed: int = 0


@dataclass(eq=False)
class SampleJob:
    """One sample in a slot, and what it has so far."""

    prompt: PromptJob
    sample_index: int
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


class Admission(NamedTuple):
    """A sample that gets `slot`; its prompt is in prefill row `row`."""

    slot: int
    row: int
    sample: SampleJob


class Scheduler:
    """A queue of prompts, prefilled prompts, and slots.

    Attributes:
        slots: the sample in each slot, or None.
        waiting: prompts that are not prefilled yet.
        prefilled: (row, prompt) of those that are, oldest first, until their last sample has a slot.
    """

    def __init__(self, max_slots: int, prefill_batch: int) -> None:
        self.slots: list[SampleJob | None] = [None] * max_slots
        self.waiting: deque[PromptJob] = deque()
        self.prefilled: deque[tuple[int, PromptJob]] = deque()
        self._prefill_batch = prefill_batch

    @property
    def busy(self) -> bool:
        """Whether anything waits or runs."""
        return self.pending or any(sample is not None for sample in self.slots)

    @property
    def pending(self) -> bool:
        """Whether any sample has no slot yet."""
        return bool(self.waiting or self.prefilled)

    def add(self, prompts: Iterable[PromptJob]) -> None:
        """Queues prompts behind those that wait."""
        self.waiting.extend(prompts)

    def take_prompts(self) -> list[PromptJob]:
        """Prompts to prefill now, the first in row 0: while a slot is free and all rows are.

        `admit` comes first: it leaves a slot free only when it has emptied the rows.
        """
        if None not in self.slots or self.prefilled:
            return []
        count = min(self._prefill_batch, len(self.waiting))
        self.prefilled.extend(enumerate(self.waiting.popleft() for _ in range(count)))
        return [prompt for _, prompt in self.prefilled]

    def admit(self) -> list[Admission]:
        """Gives free slots to samples of prefilled prompts; a prompt whose last sample is placed leaves its row."""
        admissions = []
        for slot, occupant in enumerate(self.slots):
            if occupant is None and self.prefilled:
                row, prompt = self.prefilled[0]
                sample = self.slots[slot] = SampleJob(prompt, prompt.placed)
                admissions.append(Admission(slot, row, sample))
                prompt.placed += 1
                if prompt.placed == prompt.params.n:
                    self.prefilled.popleft()
        return admissions

    def cancel(self, handle: RequestHandle) -> list[int]:
        """Forgets a request; returns the slots that it leaves."""
        self.waiting = deque(prompt for prompt in self.waiting if prompt.handle != handle)
        self.prefilled = deque((row, prompt) for row, prompt in self.prefilled if prompt.handle != handle)
        left = [slot for slot, sample in enumerate(self.slots) if sample and sample.prompt.handle == handle]
        for slot in left:
            self.slots[slot] = None
        return left
