"""The rollout engine: prompts in, completions out, with slots that are refilled as samples end.

One turn: samples get free slots, prompts that have none yet are prefilled for them (once for all n samples), then all
slots decode a burst of tokens. The host looks at tokens once per burst. It alone decides the schedule, from what was
submitted and what came back, never from time.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
import numpy as np
from tqdm import tqdm

from vibethinker_jax.errors import UserError
from vibethinker_jax.models.qwen2 import KVCache
from vibethinker_jax.rollout.cache import DECODE_BURST, PAGE_SIZE, PREFILL_CHUNK, plan_shape
from vibethinker_jax.rollout.compiled import EngineFunctions
from vibethinker_jax.rollout.ending import extend_sample
from vibethinker_jax.rollout.params import Completion, FinishedSample, RequestHandle, SamplingParams
from vibethinker_jax.rollout.prompts import Prompt, encode_prompts
from vibethinker_jax.rollout.scheduler import Admission, PromptJob, Scheduler
from vibethinker_jax.rollout.slots import SlotTable
from vibethinker_jax.rollout.steps import MAX_STOP_IDS
from vibethinker_jax.rollout.stopping import StopStrings
from vibethinker_jax.rollout.weights import SampledPolicy

# While samples wait, a burst ends as soon as one slot in this many is free for them.
REFILL_SHARE = 8


@dataclass(frozen=True)
class EngineStats:
    """What an engine has done since it was made.

    Attributes:
        prompt_tokens: tokens of prompts, once per prompt whatever its n.
        generated_tokens: tokens of completions, running ones included.
        seconds: wall-clock time in prefill and decoding, compilation included.
        compilations: functions compiled; constant once each kind of work has been done.
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    seconds: float = 0.0
    compilations: int = 0


class RolloutEngine:
    """Samples completions from a policy with continuous batching.

    A completion depends on its prompt, its SamplingParams and the index of the sample only: it is bit-identical alone
    and in any company, in any slot and order, under the same engine settings, weights and devices. Across settings
    (max_slots, prefill_chunk, ...) results agree to rounding.

    Several processes: each makes the same calls in the same order with the same arguments, iterates `completions`
    alike, and gets all completions.

    Not thread-safe. An exception in the middle of the work (device failure, interrupt) drops what waits and runs; the
    engine stays usable.

    Example:
        with RolloutEngine(policy, max_slots=32, max_length=4096) as engine:
            [[completion]] = engine.generate(["1 + 1 ="], SamplingParams(max_new_tokens=8))
    """

    def __init__(
        self,
        policy: SampledPolicy,
        max_slots: int = 32,
        max_length: int = 65536,
        cache_tokens: int | None = None,
        page_size: int = PAGE_SIZE,
        prefill_chunk: int = PREFILL_CHUNK,
        prefill_batch: int | None = None,
        decode_burst: int = DECODE_BURST,
    ) -> None:
        """Allocates nothing yet and compiles nothing yet: the first request does.

        Args:
            policy: `.config`, `.tokenizer`, `.params`, `.placement` and `.compute_dtype` are read. Parameters that
                are in the compute dtype are shared, not copied: a trainer that donates them calls `update_weights`
                before the next request.
            max_slots: samples that decode together. Every step computes all slots, busy or not.
            max_length: most tokens of prompt and completion together.
            cache_tokens: tokens of key-value cache that the slots may take, a multiple of page_size; None: what they
                need. The cache of this engine is contiguous: each slot owns a row of max_length tokens (rounded up
                to whole chunks), and all rows must fit. `prefill_batch` more rows are kept for prompts.
            page_size: tokens per page, the unit of cache_tokens; a contiguous cache is divided no further.
            prefill_chunk: tokens of a prompt per prefill call; at most max_length are used.
            prefill_batch: prompts per prefill call; None: as many as make about 256 tokens.
            decode_burst: most tokens per slot between two looks at the schedule.

        Raises:
            UserError: a setting is malformed, or the cache does not fit in cache_tokens.
        """
        self._config, self._tokenizer = policy.config, policy.tokenizer
        self._shape = plan_shape(
            max_slots,
            max_length,
            policy.config,
            cache_tokens=cache_tokens,
            page_size=page_size,
            prefill_chunk=prefill_chunk,
            prefill_batch=prefill_batch,
            decode_burst=decode_burst,
        )
        self._functions = EngineFunctions(policy, self._shape)
        self._params: Any = self._functions.engine_params(policy)
        self._caches: tuple[KVCache, KVCache] | None = None
        self._weights_version = 0
        self._state = "ready"
        self._next_id = 0
        self._prompt_tokens = self._generated_tokens = 0
        self._seconds = 0.0
        self._finished: deque[FinishedSample] = deque()
        self._forget_requests()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Requests

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams], *, progress: bool = False
    ) -> list[list[Completion]]:
        """Completions of every prompt, in order: result i has n of them.

        Requests submitted earlier run on beside it; what finishes of them waits for `completions`.

        Args:
            prompts: each is text, a list of chat messages (rendered with the checkpoint's template), or token ids.
            params: one for all, or one per prompt. A prompt listed twice under one seed gives the same samples.
            progress: show a progress bar.

        Raises:
            UserError: as `submit`.
        """
        handle = self.submit(prompts, params)
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        results: list[list[Any]] = [[None] * one.n for one in each]
        missing = sum(map(len, results))
        try:
            with tqdm(total=missing, desc="sampling", unit="sample", disable=not progress) as bar:
                while missing:
                    self._turn()
                    others: deque[FinishedSample] = deque()
                    for sample in self._finished:
                        if sample.handle == handle:
                            results[sample.prompt_index][sample.sample_index] = sample.completion
                            missing -= 1
                            bar.update()
                        else:
                            others.append(sample)
                    self._finished = others
        except BaseException:
            self.cancel(handle)
            raise
        return results

    def submit(self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]) -> RequestHandle:
        """Queues prompts; nothing runs until `completions` or `generate` is asked for results.

        All prompts are checked before any is queued, so a refused request leaves no trace.

        Args:
            prompts, params: as `generate`.

        Raises:
            UserError: a prompt is malformed or leaves no room for a new token (the message gives its index, its
                length and the limit), the lengths of the lists differ, or a stop id is outside the vocabulary.
        """
        self._require_ready()
        config, shape = self._config, self._shape
        encoded = encode_prompts(prompts, self._tokenizer, config.vocab_size, shape.max_length)
        each = [params] * len(encoded) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(encoded):
            raise UserError(f"params has {len(each)} entries for {len(encoded)} prompts; give one, or one per prompt")
        handle = RequestHandle(self._next_id)
        jobs = [self._job(handle, index, *pair) for index, pair in enumerate(zip(encoded, each, strict=True))]
        self._next_id += 1
        self._scheduler.add(jobs)
        return handle

    def completions(self) -> Iterator[FinishedSample]:
        """Samples of submitted requests as they finish, until none is left; submitting more meanwhile is fine.

        Yields:
            (handle, prompt_index, sample_index, completion), each once. Samples that finish in one burst come in the
            order of their slots.
        """
        self._require_ready()
        return self._completions()

    def cancel(self, handle: RequestHandle) -> None:
        """Drops what is left of a request: nothing of it will be handed out any more. Its slots are free at once.

        Cancelling a request that is complete or cancelled changes nothing.

        Raises:
            UserError: the handle is not from this engine's `submit`.
        """
        if not isinstance(handle, RequestHandle) or not 0 <= handle.id < self._next_id:
            raise UserError(f"handle is {handle!r}; cancel takes what submit of this engine returned")
        for slot in self._scheduler.cancel(handle):
            self._slots.stop(slot)
        self._finished = deque(sample for sample in self._finished if sample.handle != handle)

    @property
    def stats(self) -> EngineStats:
        """What the engine has done so far."""
        return EngineStats(self._prompt_tokens, self._generated_tokens, self._seconds, self._functions.compilations)

    # Weights and memory

    @property
    def max_length(self) -> int:
        """Most tokens of prompt and completion together."""
        return self._shape.max_length

    @property
    def weights_version(self) -> int:
        """0 for the policy that the engine was made with; 1 more after each `update_weights` or `resume`."""
        return self._weights_version

    def update_weights(self, policy: SampledPolicy) -> None:
        """Samples from another policy of the same shape from now on. Recompiles nothing.

        Refused while requests are in flight, so that a completion comes from one policy.

        Raises:
            UserError: samples are waiting or running, or the policy's shape or compute dtype is another.
        """
        self._require_ready()
        self._require_idle("update_weights")
        self._take_weights(policy)

    def release_memory(self) -> None:
        """Gives up the cache and the weights, e.g. while the trainer needs the memory; `resume` takes it up again.

        Arrays shared with the policy are let go of, not freed.

        Raises:
            UserError: samples are waiting or running.
        """
        self._require_ready()
        self._require_idle("release_memory")
        self._release()
        self._state = "released"

    def resume(self, policy: SampledPolicy) -> None:
        """Takes up work after `release_memory`, with this policy's weights. Recompiles nothing.

        Raises:
            UserError: the engine was not released, or the policy's shape or compute dtype is another.
        """
        if self._state != "released":
            raise UserError(f"resume: the engine is {self._state}; resume follows release_memory")
        self._take_weights(policy)
        self._state = "ready"

    def close(self) -> None:
        """Drops all requests and frees the engine's memory, for good. Closing twice is fine."""
        self._forget_requests()
        self._finished.clear()
        self._release()
        self._state = "closed"

    # One turn

    def _completions(self) -> Iterator[FinishedSample]:
        while self._finished or self._scheduler.busy:
            self._require_ready()
            if self._finished:
                yield self._finished.popleft()
            else:
                self._turn()

    def _turn(self) -> None:
        began = time.perf_counter()
        try:
            if self._caches is None:
                self._caches = self._functions.new_caches()
            self._fill_slots()
            self._decode()
        except BaseException:
            # The caches may have been donated to a call that failed, and slots half recorded: start afresh.
            self._forget_requests()
            self._free_caches()
            raise
        finally:
            self._seconds += time.perf_counter() - began

    def _fill_slots(self) -> None:
        """Gives free slots to waiting samples, prefilling prompts as long as slots are free."""
        while True:
            if admissions := self._scheduler.admit():
                self._admit(admissions)
            prompts = self._scheduler.take_prompts()
            if not prompts:
                return
            self._prefill(prompts)

    def _prefill(self, prompts: Sequence[PromptJob]) -> None:
        """Computes keys and values of prompts, all tokens but the last, at fixed chunk boundaries."""
        rows, chunk = self._shape.prefill_batch, self._shape.prefill_chunk
        longest = max(len(prompt.tokens) for prompt in prompts) - 1
        for start in range(0, longest, chunk):
            tokens = np.zeros((rows, chunk), np.int32)
            for row, prompt in enumerate(prompts):
                part = prompt.tokens[start : min(start + chunk, len(prompt.tokens) - 1)]
                tokens[row, : len(part)] = part
            slots, prefilled = self._caches
            self._caches = slots, self._functions.prefill(self._params, prefilled, tokens, np.int32(start))
        self._prompt_tokens += sum(len(prompt.tokens) for prompt in prompts)

    def _admit(self, admissions: Sequence[Admission]) -> None:
        """Copies prefilled prompts to the slots of their samples."""
        source = np.full(self._shape.slots, -1, np.int32)
        length = np.zeros(self._shape.slots, np.int32)
        for slot, row, sample in admissions:
            source[slot], length[slot] = row, len(sample.prompt.tokens) - 1
            self._slots.start(slot, sample)
        slots, prefilled = self._caches
        self._caches = self._functions.admit(slots, prefilled, source, length), prefilled

    def _decode(self) -> None:
        """One burst, and the completions that it ends."""
        width = self._shape.slots
        min_active = width - max(1, width // REFILL_SHARE) if self._scheduler.pending else 0
        slots, prefilled = self._caches
        slots, burst = self._functions.decode(self._params, slots, self._slots.state, np.int32(min_active))
        self._caches = slots, prefilled
        tokens, log_probs, generated = jax.device_get(burst)
        counts = self._slots.advance(tokens, generated)
        token_rows, log_prob_rows = tokens.T.tolist(), log_probs.T.tolist()
        for slot, count in enumerate(counts.tolist()):
            sample = self._scheduler.slots[slot]
            if sample is None:
                continue
            before = len(sample.tokens)
            new = token_rows[slot][:count], log_prob_rows[slot][:count]
            completion = extend_sample(sample, *new, self._tokenizer, self._weights_version)
            self._generated_tokens += len(sample.tokens) - before
            if completion is not None:
                self._scheduler.slots[slot] = None
                self._slots.stop(slot)
                prompt = sample.prompt
                self._finished.append(FinishedSample(prompt.handle, prompt.index, sample.sample_index, completion))

    # State

    def _job(self, handle: RequestHandle, index: int, tokens: list[int], params: SamplingParams) -> PromptJob:
        if not isinstance(params, SamplingParams):
            raise UserError(f"params[{index}] is {params!r:.80}; give SamplingParams")
        ids = self._tokenizer.stop_token_ids if params.stop_token_ids is None else params.stop_token_ids
        if len(ids) > MAX_STOP_IDS:
            raise UserError(f"params[{index}]: stop_token_ids has {len(ids)} ids; at most {MAX_STOP_IDS} are supported")
        vocab_size = self._config.vocab_size
        if params.stop_token_ids is not None and ids and max(ids) >= vocab_size:
            raise UserError(
                f"params[{index}]: stop_token_ids holds {max(ids)}; the vocabulary has ids 0 to {vocab_size - 1}"
            )
        room = self._shape.max_length - len(tokens)
        limit = room if params.max_new_tokens is None else min(room, params.max_new_tokens)
        stop_strings = StopStrings(params.stop, self._tokenizer.decode) if params.stop else None
        return PromptJob(handle, index, tokens, params, tuple(ids), limit, stop_strings)

    def _take_weights(self, policy: SampledPolicy) -> None:
        self._params = self._functions.engine_params(policy)
        self._weights_version += 1

    def _forget_requests(self) -> None:
        self._scheduler = Scheduler(self._shape.slots, self._shape.prefill_batch)
        self._slots = SlotTable(self._shape.slots)

    def _release(self) -> None:
        self._params = None
        self._free_caches()

    def _free_caches(self) -> None:
        caches, self._caches = self._caches, None
        for array in jax.tree.leaves(caches):
            with contextlib.suppress(RuntimeError):  # donated to a call that failed
                array.delete()

    def _require_ready(self) -> None:
        if self._state == "closed":
            raise UserError("the engine is closed; make a new RolloutEngine")
        if self._state == "released":
            raise UserError("the engine's memory is released; call resume(policy) first")

    def _require_idle(self, what: str) -> None:
        if self._scheduler.busy:
            raise UserError(f"{what}: samples are waiting or running; take all completions() or cancel them first")
