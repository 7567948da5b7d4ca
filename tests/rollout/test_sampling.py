import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params

from vibethinker_jax.errors import UserError
from vibethinker_jax.rollout.sampling import SamplingState, kept_tokens, sample_tokens, seed_key_data

sample = jax.jit(sample_tokens)
kept = jax.jit(kept_tokens)


def state(slots, seed=0, temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0, sample_index=None):
    """Settings per slot; scalars are spread over the slots."""

    def spread(value, dtype):
        return np.broadcast_to(np.asarray(value, dtype), slots).copy()

    return SamplingState(
        key=np.stack([seed_key_data(int(one)) for one in np.broadcast_to(np.asarray(seed, object), slots)]),
        sample_index=np.arange(slots, dtype=np.int32) if sample_index is None else spread(sample_index, np.int32),
        temperature=spread(temperature, np.float32),
        top_k=spread(top_k, np.int32),
        top_p=spread(top_p, np.float32),
        min_p=spread(min_p, np.float32),
    )


def kept_by_hand(logits, top_k, top_p, min_p):
    """The three rules one after the other, in float64, each on the renormalised survivors."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    probability = np.exp(np.asarray(logits, np.float64) - max(logits))
    kept = order if top_k == -1 else order[:top_k]
    if top_p < 1:
        total, mass, nucleus = sum(probability[token] for token in kept), 0.0, []
        for token in kept:
            if mass >= top_p * total:
                break
            nucleus.append(token)
            mass += probability[token]
        kept = nucleus
    return {token for token in kept if probability[token] >= min_p * probability[order[0]]}


@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1, 2**31, 2**32 - 1])
def test_the_key_of_a_seed_is_jaxs_own(seed):
    np.testing.assert_array_equal(seed_key_data(seed), jax.random.key_data(jax.random.key(seed)))


def test_large_seeds_use_all_their_bits():
    with jax.enable_x64(True):
        for seed in (2**32, 2**40 + 3, 2**63 - 1):
            np.testing.assert_array_equal(seed_key_data(seed), jax.random.key_data(jax.random.key(seed)))
    np.testing.assert_array_equal(seed_key_data(2**64 - 1), [2**32 - 1, 2**32 - 1])
    with pytest.raises(UserError, match="seed"):
        seed_key_data(2**64)


def test_a_token_is_the_gumbel_argmax_under_the_documented_key():
    logits = np.random.default_rng(0).normal(size=(3, 17)).astype(np.float32)
    tokens, _ = sample(logits, state(3, seed=[5, 6, 7], sample_index=[2, 0, 9], temperature=0.7), np.array([4, 0, 11]))
    for row, (seed, index, token) in enumerate([(5, 2, 4), (6, 0, 0), (7, 9, 11)]):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), index), token)
        noise = np.asarray(jax.random.gumbel(key, (17,)))
        assert tokens[row] == np.argmax(logits[row] / np.float32(0.7) + noise)


def test_greedy_takes_the_most_likely_token_and_the_lowest_id_among_equals():
    logits = np.array([[0.0, 3.0, 3.0, 1.0], [2.0, -1.0, 0.5, 2.0]], np.float32)
    tokens, log_probs = sample(logits, state(2, temperature=0, top_k=1), np.zeros(2, np.int32))
    np.testing.assert_array_equal(tokens, [1, 0])
    # 3 - log(e^0 + 2 e^3 + e^1) = 3 - log(43.88935) = -0.78167
    # 2 - log(2 e^2 + e^-1 + e^0.5) = 2 - log(16.79471) = -0.82106
    np.testing.assert_allclose(log_probs, [-0.78167, -0.82106], atol=1e-5)


def test_log_probs_are_of_the_untruncated_scaled_softmax():
    logits = np.random.default_rng(1).normal(size=(40, 33), scale=4).astype(np.float32)
    tokens, log_probs = sample(logits, state(40, temperature=0.6, top_k=3, top_p=0.8, min_p=0.2), np.arange(40))
    scaled = logits.astype(np.float64) / 0.6
    expected = scaled[np.arange(40), tokens] - np.log(np.exp(scaled).sum(-1))
    np.testing.assert_allclose(log_probs, expected, atol=2e-6, rtol=1e-6)
    assert log_probs.dtype == np.float32


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    top_k=st.sampled_from([-1, 1, 2, 7, 40]),
    top_p=st.sampled_from([0.05, 0.3, 0.77, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.4, 1.0]),
)
def test_truncation_keeps_what_the_rules_keep_one_after_the_other(data, top_k, top_p, min_p):
    # Logits in steps of 1/4 give ties; 23 tokens, the last two padding.
    steps = data.draw(st.lists(st.integers(-12, 12), min_size=21, max_size=21))
    logits = np.array([*(step / 4 for step in steps), -np.inf, -np.inf], np.float32)
    mask = np.asarray(kept(logits[None], state(1, top_k=top_k, top_p=top_p, min_p=min_p)))[0]
    found = set(np.flatnonzero(mask & np.isfinite(logits)))
    near = [kept_by_hand(logits[:21].tolist(), top_k, top_p * (1 + d), min_p * (1 - d)) for d in (-1e-5, 0, 1e-5)]
    assert found in near  # float32 may fall on either side of an exact boundary


def test_no_limit_keeps_tokens_too_unlikely_to_add_to_a_float32_sum():
    logits = np.array([[0.0, -30.0, -60.0, -np.inf]], np.float32)
    np.testing.assert_array_equal(kept(logits, state(1)), [[True] * 4])
    np.testing.assert_array_equal(kept(logits, state(1, top_k=3)), [[True, True, True, False]])


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 1.7}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.15}, {"top_k": 6, "top_p": 0.9, "min_p": 0.1}],
)
def test_frequencies_follow_the_truncated_distribution(options):
    draws = 20_000
    logits = np.random.default_rng(2).normal(size=11, scale=1.5).astype(np.float32)
    temperature = options.get("temperature", 1.0)
    survivors = kept_by_hand(
        (logits / temperature).tolist(), options.get("top_k", -1), options.get("top_p", 1.0), options.get("min_p", 0.0)
    )
    probability = np.where(np.isin(np.arange(11), list(survivors)), np.exp(logits.astype(np.float64) / temperature), 0)
    probability /= probability.sum()
    tokens, _ = sample(np.tile(logits, (draws, 1)), state(draws, seed=9, **options), np.full(draws, 3))
    counts = np.bincount(tokens, minlength=11)
    assert set(np.flatnonzero(counts)) <= survivors
    expected = draws * probability[probability > 0]
    chi_square = ((counts[probability > 0] - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


def test_successive_tokens_and_samples_are_independent():
    draws = 4_000
    logits = np.zeros((draws, 2), np.float32)
    by_sample, _ = sample(logits, state(draws), np.zeros(draws, np.int32))
    by_token, _ = sample(logits, state(draws, sample_index=0), np.arange(draws, dtype=np.int32))
    by_seed, _ = sample(logits, state(draws, seed=np.arange(draws), sample_index=0), np.zeros(draws, np.int32))
    for series in map(np.asarray, (by_sample, by_token, by_seed)):
        # Fair coins: mean 1/2 and no lag-one correlation, each within 5 standard deviations of 1 / sqrt(draws).
        assert abs(series.mean() - 0.5) < 5 * 0.5 / np.sqrt(draws)
        assert abs(np.corrcoef(series[1:], series[:-1])[0, 1]) < 5 / np.sqrt(draws)


def test_padding_of_the_vocabulary_is_never_drawn():
    logits = np.full((3000, 8), -np.inf, np.float32)
    logits[:, :3] = [-40.0, 0.0, 0.1]
    for options in ({}, {"temperature": 50.0}, {"top_p": 0.999, "temperature": 1000.0}, {"temperature": 0}):
        tokens, log_probs = sample(logits, state(3000, **options), np.zeros(3000, np.int32))
        assert np.max(tokens) < 3
        assert np.isfinite(log_probs).all()


def test_a_row_has_the_same_bits_whatever_the_others_ask_for():
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(6, 50), scale=3).astype(np.float32)
    index = np.full(6, 2, np.int32)
    plain = {"seed": 4, "sample_index": np.arange(6)}
    alone = sample(logits, state(6, **plain), index)
    with_truncation = sample(logits, state(6, top_p=[1, 1, 1, 0.5, 1, 1], top_k=[-1, -1, 3, -1, -1, 1], **plain), index)
    with_greedy = sample(logits, state(6, temperature=[1, 1, 0, 0, 0, 0], **plain), index)
    for other in (with_truncation, with_greedy):
        for mine, theirs in zip(alone, other, strict=True):
            assert np.asarray(mine)[:2].tobytes() == np.asarray(theirs)[:2].tobytes()
    greedy = sample(logits, state(6, temperature=0, **plain), index)
    for mine, theirs in zip(greedy, with_greedy, strict=True):
        assert np.asarray(mine)[2:].tobytes() == np.asarray(theirs)[2:].tobytes()


def test_truncation_and_noise_run_only_when_some_row_needs_them():
    def primitives(jaxpr, into_branches):
        for equation in jaxpr.eqns:
            yield equation.primitive.name
            if into_branches or equation.primitive.name != "cond":
                for inner in jaxprs_in_params(equation.params):
                    yield from primitives(inner, into_branches)

    jaxpr = jax.make_jaxpr(sample_tokens)(jnp.zeros((2, 9)), state(2), np.zeros(2, np.int32)).jaxpr
    everywhere, always = set(primitives(jaxpr, True)), set(primitives(jaxpr, False))
    assert {"random_bits", "bitcast_convert_type", "exp"} <= everywhere
    assert not {"random_bits", "bitcast_convert_type"} & always
    assert "exp" in always


def test_equal_logits_are_cut_by_id():
    logits = np.array([[1.0, 2.0, 2.0, 2.0, 0.0], [0.0, -0.0, 0.0, -0.0, -1.0]], np.float32)
    np.testing.assert_array_equal(
        kept(logits, state(2, top_k=[2, 3])),
        [[False, True, True, False, False], [True, True, True, False, False]],
    )
    # Five equal tokens: half of the mass is three of them.
    np.testing.assert_array_equal(kept(np.zeros((1, 5), np.float32), state(1, top_p=0.5)), [[1, 1, 1, 0, 0]])
    np.testing.assert_array_equal(kept(logits, state(2, top_k=99)), np.ones((2, 5)))
