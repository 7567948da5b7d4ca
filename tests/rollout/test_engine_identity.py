"""A completion's bits depend on prompt, parameters and sample index alone."""

import numpy as np
import pytest

from tests.rollout.conftest import bits
from vibethinker_jax.rollout.engine import RolloutEngine
from vibethinker_jax.rollout.params import SamplingParams

RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, 99, length).tolist() for length in (1, 4, 9, 8, 17, 30, 12)]
PARAMS = [
    SamplingParams(n=3, seed=1),
    SamplingParams(n=1, seed=2, temperature=0.7, max_new_tokens=9),
    SamplingParams(n=2, seed=3, top_p=0.8),
    SamplingParams(n=2, seed=4, temperature=0),
    SamplingParams(n=1, seed=5, top_k=5, min_p=0.05, temperature=1.5),
    SamplingParams(n=4, seed=6, stop="a"),
    SamplingParams(n=2, seed=7, stop_token_ids=[], max_new_tokens=30),
]


@pytest.fixture(scope="module", params=[1, 5, 12], ids=lambda slots: f"{slots}-slots")
def engine(request, policy):
    """Widths with and without a remainder modulo the vector widths of a CPU."""
    return RolloutEngine(
        policy, max_slots=request.param, max_length=44, prefill_chunk=8, prefill_batch=3, decode_burst=4
    )


@pytest.fixture(scope="module")
def alone(engine):
    """Every prompt by itself in an engine that is otherwise idle."""
    return [[bits(c) for c in engine.generate([p], [q])[0]] for p, q in zip(PROMPTS, PARAMS, strict=True)]


@pytest.mark.parametrize("order_seed", [None, 1, 2, 3])
def test_alone_and_in_a_batch_in_any_order(engine, alone, order_seed):
    order = np.arange(7) if order_seed is None else np.random.default_rng(order_seed).permutation(7)
    results = engine.generate([PROMPTS[i] for i in order], [PARAMS[i] for i in order])
    for i, samples in zip(order, results, strict=True):
        assert [bits(c) for c in samples] == alone[i]


def test_every_slot_gives_the_same(engine, alone, monkeypatch):
    width = len(engine._scheduler.slots)
    visited = set()
    start = engine._slots.start

    def record(slot, sample):
        visited.update({slot} if sample.prompt.tokens == PROMPTS[4] else ())
        start(slot, sample)

    monkeypatch.setattr(engine._slots, "start", record)
    # Fillers of several lengths in between, so that slots fall free in changing order.
    fillers = [SamplingParams(seed=100 + i, max_new_tokens=1 + 3 * (i % 3)) for i in range(3 * width)]
    params = [one for filler in fillers for one in (filler, PARAMS[4])]
    results = engine.generate([prompt for i in range(3 * width) for prompt in ([i % 90], PROMPTS[4])], params)
    assert visited == set(range(width))
    for [completion] in results[1::2]:
        assert bits(completion) == alone[4][0]


def test_submitted_in_pieces_and_with_cancellations_in_between(engine, alone):
    rng = np.random.default_rng(4)
    handles = {}
    doomed = []
    for i in rng.permutation(7):
        handles[engine.submit([PROMPTS[i]], [PARAMS[i]])] = i
        doomed.append(engine.submit([PROMPTS[rng.integers(7)]], SamplingParams(n=2, seed=50)))
    results = {}
    for sample in engine.completions():
        if doomed and rng.random() < 0.5:
            engine.cancel(doomed.pop())
        if sample.handle in handles:
            results[handles[sample.handle], sample.sample_index] = bits(sample.completion)
    assert results == {(i, j): one for i, samples in enumerate(alone) for j, one in enumerate(samples)}


def test_the_first_of_n_samples_is_the_only_one_of_one(engine, alone):
    for i in (0, 2, 6):
        [[completion]] = engine.generate([PROMPTS[i]], SamplingParams(**{**vars(PARAMS[i]), "n": 1}))
        assert bits(completion) == alone[i][0]


def test_the_length_of_a_burst_changes_nothing(policy):
    engines = [
        RolloutEngine(policy, max_slots=5, max_length=44, prefill_chunk=8, prefill_batch=3, decode_burst=burst)
        for burst in (4, 7)
    ]
    short, long = ([[bits(c) for c in samples] for samples in e.generate(PROMPTS, PARAMS)] for e in engines)
    assert short == long
