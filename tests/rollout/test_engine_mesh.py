"""The engine on a mesh of eight CPU devices, parameters and cache sharded."""

import dataclasses

import jax
import pytest
from jax.sharding import PartitionSpec

from tests.rollout.conftest import bits
from vibethinker_jax.models.parameters import parameter_shardings
from vibethinker_jax.parallel.mesh import make_mesh
from vibethinker_jax.parallel.rules import Placement
from vibethinker_jax.rollout.engine import RolloutEngine
from vibethinker_jax.rollout.params import SamplingParams

PROMPTS = [[5], [7, 1, 3], list(range(20, 29)), list(range(40, 57))]
GREEDY = SamplingParams(temperature=0, max_new_tokens=12, stop_token_ids=[])


def on_mesh(policy, **axes):
    placement = Placement(make_mesh(**axes))
    params = jax.device_put(policy.params, parameter_shardings(policy.config, placement))
    return dataclasses.replace(policy, params=params, placement=placement)


@pytest.fixture(scope="module")
def sharded(policy):
    return on_mesh(policy, fsdp=2, context=2, tensor=2)


@pytest.fixture(scope="module")
def engine(sharded):
    return RolloutEngine(sharded, max_slots=8, max_length=44, prefill_chunk=8, prefill_batch=3, decode_burst=4)


def test_greedy_tokens_are_those_of_one_device(engine, shared_engine):
    expected = shared_engine.generate(PROMPTS, GREEDY)
    for [mine], [theirs] in zip(engine.generate(PROMPTS, GREEDY), expected, strict=True):
        assert mine.tokens == theirs.tokens
        assert mine.log_probs == pytest.approx(theirs.log_probs, abs=1e-5)


def test_slots_and_kv_heads_are_sharded(engine):
    engine.generate(PROMPTS[:1], GREEDY)
    slots, prompts = engine._caches
    assert slots.k.sharding.spec == PartitionSpec(None, ("replica", "fsdp", "context"), None, "tensor", None)
    assert slots.k.addressable_shards[0].data.shape == (3, 2, 48, 1, 8)
    # Three prompts do not divide by two devices.
    assert prompts.v.sharding.spec == PartitionSpec(None, None, None, "tensor", None)


def test_a_completion_is_the_same_alone_and_in_company(engine):
    params = [SamplingParams(n=3, seed=i, top_p=1 - i / 10) for i in range(4)]
    together = engine.generate(PROMPTS, params)
    for i in (3, 1, 0, 2):
        [alone] = engine.generate([PROMPTS[i]], [params[i]])
        assert [bits(c) for c in alone] == [bits(c) for c in together[i]]


def test_slots_that_do_not_divide_are_replicated_and_new_weights_are_placed(
    sharded, policy, other_policy, shared_engine
):
    engine = RolloutEngine(sharded, max_slots=5, max_length=44, prefill_chunk=8, prefill_batch=3, decode_burst=4)
    before = engine.generate(PROMPTS, GREEDY)
    compiled = engine.stats.compilations
    engine.update_weights(other_policy)  # on one device: the engine spreads it
    assert engine._params["embed"]["table"].sharding == sharded.params["embed"]["table"].sharding
    assert engine.generate(PROMPTS, GREEDY) != before
    engine.update_weights(sharded)
    after = engine.generate(PROMPTS, GREEDY)
    assert [[bits(c) for c in samples] for samples in after] == [[bits(c) for c in samples] for samples in before]
    assert engine.stats.compilations == compiled
    expected = shared_engine.generate(PROMPTS, GREEDY)
    assert [[c.tokens for c in samples] for samples in after] == [[c.tokens for c in samples] for samples in expected]
