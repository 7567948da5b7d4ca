"""Weights, memory and compilations over an engine's life."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.rollout.conftest import RAW_CONFIG, StandInPolicy, bits, random_params
from vibethinker_jax.errors import UserError
from vibethinker_jax.models.config import Qwen2Config
from vibethinker_jax.models.qwen2 import build
from vibethinker_jax.rollout.engine import RolloutEngine
from vibethinker_jax.rollout.params import SamplingParams
from vibethinker_jax.rollout.weights import cast_for_compute, needs_cast

PROMPTS = [[5], list(range(20, 29)), list(range(40, 57))]
PARAMS = SamplingParams(n=2, max_new_tokens=12, seed=3)


@pytest.fixture
def engine(policy):
    return RolloutEngine(policy, max_slots=5, max_length=44, prefill_chunk=8, prefill_batch=3, decode_burst=4)


@pytest.fixture
def backend_compilations():
    """Counts what XLA compiles or fetches from its cache, anywhere in the process."""
    count = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            count.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield count
    jax.monitoring.unregister_event_duration_listener(listen)


def everything(engine):
    return [[bits(c) for c in samples] for samples in engine.generate(PROMPTS, PARAMS)]


def test_new_weights_change_completions_and_their_version_and_compile_nothing(
    engine, policy, other_policy, trainer_log_probs, backend_compilations
):
    before = everything(engine)
    assert backend_compilations, "the listener should have seen the engine's functions"
    backend_compilations.clear()
    compiled = engine.stats.compilations
    for version, current in enumerate([other_policy, policy, other_policy], start=1):
        engine.update_weights(current)
        completions = [c for samples in engine.generate(PROMPTS, PARAMS) for c in samples]
        assert {c.weights_version for c in completions} == {version} == {engine.weights_version}
        assert ([[bits(c) for c in completions[i : i + 2]] for i in (0, 2, 4)] == before) == (current is policy)
        assert not backend_compilations
        for completion in completions:
            expected = trainer_log_probs(current, completion)
            np.testing.assert_allclose(completion.log_probs, expected, atol=1e-5, rtol=0)
        backend_compilations.clear()
    assert engine.stats.compilations == compiled


def test_requests_of_all_kinds_compile_nothing_new(engine, backend_compilations):
    everything(engine)
    backend_compilations.clear()
    compiled = engine.stats.compilations
    for options in (
        {"temperature": 0},
        {"top_p": 0.5, "n": 7},
        {"top_k": 3, "min_p": 0.1, "temperature": 0.3},
        {"stop_token_ids": list(range(16))},
        {"stop": ["the", "abc"], "max_new_tokens": 1},
        {"seed": 2**64 - 1},
    ):
        engine.generate([[1], list(range(43)), "some text"], SamplingParams(**options))
    engine.cancel(engine.submit([[1]], PARAMS))
    assert list(engine.completions()) == []
    assert engine.stats.compilations == compiled
    assert not backend_compilations


def test_weights_in_the_right_dtype_are_shared_not_copied(engine, policy):
    for mine, theirs in zip(jax.tree.leaves(engine._params), jax.tree.leaves(policy.params), strict=True):
        assert mine.unsafe_buffer_pointer() == theirs.unsafe_buffer_pointer()


def test_weights_stay_while_requests_are_in_flight(engine, other_policy):
    handle = engine.submit(PROMPTS, PARAMS)
    for action in (lambda: engine.update_weights(other_policy), engine.release_memory):
        with pytest.raises(UserError, match="waiting or running"):
            action()
    engine.cancel(handle)
    engine.update_weights(other_policy)
    assert engine.weights_version == 1


def test_weights_of_another_shape_or_dtype_are_refused(engine, policy):
    before = everything(engine)
    wide = Qwen2Config.from_hf({**RAW_CONFIG, "intermediate_size": 96}, source="test")
    with pytest.raises(UserError, match="shape"):
        engine.update_weights(StandInPolicy(wide, random_params(wide, 0)))
    with pytest.raises(UserError, match="bfloat16"):
        engine.update_weights(dataclasses.replace(policy, compute_dtype=jnp.bfloat16))
    assert engine.weights_version == 0
    assert everything(engine) == before


def test_memory_is_given_up_and_taken_up_again(engine, policy, other_policy, backend_compilations):
    before = everything(engine)
    caches = jax.tree.leaves(engine._caches)
    backend_compilations.clear()
    engine.release_memory()
    assert all(array.is_deleted() for array in caches)
    assert not policy.params["embed"]["table"].is_deleted(), "the policy's arrays are shared, not the engine's to free"
    for action in (
        lambda: engine.generate(PROMPTS, PARAMS),
        lambda: engine.submit(PROMPTS, PARAMS),
        engine.completions,
        lambda: engine.update_weights(policy),
        engine.release_memory,
    ):
        with pytest.raises(UserError, match="resume"):
            action()
    engine.resume(other_policy)
    assert everything(engine) != before
    with pytest.raises(UserError, match="resume follows release_memory"):
        engine.resume(policy)
    engine.release_memory()
    engine.resume(policy)
    assert everything(engine) == before
    assert engine.weights_version == 2
    assert not backend_compilations


def test_a_closed_engine_says_so(policy):
    with RolloutEngine(policy, max_slots=5, max_length=44, prefill_chunk=8, prefill_batch=3, decode_burst=4) as engine:
        engine.submit(PROMPTS, PARAMS)
        pending = engine.completions()
        next(pending)
        caches = jax.tree.leaves(engine._caches)
    assert all(array.is_deleted() for array in caches)
    assert list(pending) == []
    engine.close()
    for action in (
        lambda: engine.generate(PROMPTS, PARAMS),
        engine.completions,
        lambda: engine.update_weights(policy),
        engine.release_memory,
        lambda: engine.resume(policy),
    ):
        with pytest.raises(UserError, match="closed"):
            action()


def test_a_failure_in_the_middle_leaves_the_engine_usable(engine, policy):
    before = everything(engine)
    caches = jax.tree.leaves(engine._caches)
    decode = engine._tokenizer.decode

    class Broken(Exception):
        pass

    def fail(*_):
        raise Broken

    engine._tokenizer.decode = fail
    with pytest.raises(Broken):
        engine.generate(PROMPTS, PARAMS)
    engine._tokenizer.decode = decode
    assert all(array.is_deleted() for array in caches)
    assert list(engine.completions()) == []
    assert everything(engine) == before


def test_an_interrupted_generate_leaves_nothing_running(engine, monkeypatch):
    before = everything(engine)
    turn, turns = engine._turn, []

    def interrupt():
        turns.append(1)
        if len(turns) == 2:
            raise KeyboardInterrupt
        turn()

    monkeypatch.setattr(engine, "_turn", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, PARAMS)
    monkeypatch.undo()
    assert list(engine.completions()) == []
    assert everything(engine) == before


def test_bad_weights_leave_no_trace(engine, policy):
    """NaN in the cache must not reach later completions: 0 * NaN is NaN."""
    before = everything(engine)
    broken = dataclasses.replace(policy, params=jax.tree.map(lambda leaf: leaf * jnp.nan, policy.params))
    engine.update_weights(broken)
    [[completion]] = engine.generate([list(range(40))], SamplingParams(max_new_tokens=3, stop_token_ids=[]))
    assert np.isnan(completion.log_probs).all()
    assert max(completion.tokens) < 101
    engine.generate([list(range(40))] * 9, SamplingParams(max_new_tokens=4, stop_token_ids=[]))
    engine.update_weights(policy)
    assert everything(engine) == before


def test_float32_weights_computing_in_bfloat16_are_rounded_once(policy, trainer_log_probs):
    engine = RolloutEngine(
        dataclasses.replace(policy, compute_dtype=jnp.bfloat16), max_slots=4, max_length=32, prefill_chunk=8
    )
    assert engine._params["embed"]["table"].dtype == jnp.bfloat16
    assert engine._params["layers"]["attention"]["q"]["bias"].dtype == jnp.float32
    for [completion] in engine.generate(PROMPTS, SamplingParams(temperature=0, max_new_tokens=8)):
        # bfloat16 has 8 bits: against float32, logits of size 10 are off by some 10 * 2**-8 after a few layers.
        expected = trainer_log_probs(policy, completion)
        np.testing.assert_allclose(completion.log_probs, expected, atol=0.3)


def test_rounding_once_is_rounding_at_every_use(policy, config):
    tokens = np.arange(40, dtype=np.int32).reshape(2, 20)

    @jax.jit
    def logits(params):
        model = build(config, params, compute_dtype=jnp.bfloat16)
        return model.logits(model(tokens))

    assert needs_cast(policy.params, jnp.bfloat16)
    cast = cast_for_compute(policy.params, jnp.bfloat16)
    assert not needs_cast(cast, jnp.bfloat16)
    np.testing.assert_array_equal(logits(cast), logits(policy.params))
