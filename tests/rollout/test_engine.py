"""What the engine returns: against dense forwards, and by the letter of SamplingParams."""

import numpy as np
import pytest

from tests.rollout.conftest import STOP_IDS, bits, log_softmax
from vibethinker_jax.errors import UserError
from vibethinker_jax.rollout.engine import RolloutEngine
from vibethinker_jax.rollout.params import RequestHandle, SamplingParams

PROMPTS = [[5], [7, 1, 3], list(range(20, 29)), list(range(8, 16)), list(range(40, 57))]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.4])
def test_log_probs_are_those_of_a_dense_forward(engine, policy, trainer_log_probs, temperature):
    params = SamplingParams(n=2, temperature=temperature, max_new_tokens=20, seed=3, top_p=0.9)
    completions = [c for samples in engine.generate(PROMPTS, params) for c in samples]
    assert sum(len(c.tokens) for c in completions) > 100
    for completion in completions:
        assert len(completion.log_probs) == len(completion.tokens)
        assert completion.log_probs == np.float32(completion.log_probs).tolist()
        expected = trainer_log_probs(policy, completion, temperature)
        np.testing.assert_allclose(completion.log_probs, expected, atol=1e-5, rtol=0)


def test_greedy_decoding_is_the_argmax_of_a_dense_forward(engine, policy, dense_logits, trainer_log_probs):
    params = SamplingParams(temperature=0, max_new_tokens=16, stop_token_ids=[])
    for prompt, [completion] in zip(PROMPTS, engine.generate(PROMPTS, params), strict=True):
        logits = dense_logits(policy, prompt + completion.tokens)
        assert completion.tokens == np.argmax(logits[len(prompt) - 1 : -1], axis=-1).tolist()
        np.testing.assert_allclose(completion.log_probs, trainer_log_probs(policy, completion), atol=1e-5, rtol=0)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 10, 16, 17, 25, 43])
def test_prompts_around_chunk_boundaries(engine, policy, trainer_log_probs, length):
    # Chunks of 8, without the last token: prompts of 9 and 17 fill whole chunks, those of 10 and 25 go beyond.
    prompt = np.random.default_rng(length).integers(0, 99, length).tolist()
    [[completion]] = engine.generate([prompt], SamplingParams(max_new_tokens=12, stop_token_ids=[], seed=length))
    assert len(completion.tokens) == min(12, 44 - length)
    np.testing.assert_allclose(completion.log_probs, trainer_log_probs(policy, completion), atol=1e-5, rtol=0)


def test_first_tokens_follow_the_models_distribution(engine, policy, dense_logits):
    draws, prompt = 600, [7, 1, 3]
    [samples] = engine.generate([prompt], SamplingParams(n=draws, max_new_tokens=1, seed=11))
    counts = np.bincount([c.tokens[0] for c in samples], minlength=101)
    expected = draws * np.exp(log_softmax(dense_logits(policy, prompt)[-1]))
    likely = expected > 5
    observed = np.array([*counts[likely], counts[~likely].sum()])
    expected = np.array([*expected[likely], expected[~likely].sum()])
    freedom = len(expected) - 1
    assert freedom >= 5
    assert ((observed - expected) ** 2 / expected).sum() < freedom + 5 * np.sqrt(2 * freedom)


def test_a_stop_token_ends_a_completion_and_is_its_last_token(engine):
    completions = [c for samples in engine.generate(PROMPTS, SamplingParams(n=20, seed=1)) for c in samples]
    stopped = [c for c in completions if c.finish_reason == "stop"]
    assert {c.stop_reason for c in stopped} == set(STOP_IDS), "both of the tokenizer's stop ids should occur"
    for completion in stopped:
        assert completion.tokens[-1] == completion.stop_reason
        assert not set(completion.tokens[:-1]) & set(STOP_IDS)
        assert completion.text == engine._tokenizer.decode(completion.tokens[:-1])
    for completion in completions:
        if completion.finish_reason == "length":
            assert completion.stop_reason is None
            assert len(completion.prompt_tokens) + len(completion.tokens) == 44


def test_own_stop_ids_replace_the_tokenizers(engine):
    free = SamplingParams(n=6, max_new_tokens=25, seed=2, stop_token_ids=[])
    [unstopped] = engine.generate([[7, 1, 3]], free)
    assert all(c.finish_reason == "length" and len(c.tokens) == 25 for c in unstopped)
    chosen = unstopped[0].tokens[6]
    [stopped] = engine.generate([[7, 1, 3]], SamplingParams(n=6, max_new_tokens=25, seed=2, stop_token_ids=[chosen]))
    for long, short in zip(unstopped, stopped, strict=True):
        end = long.tokens.index(chosen) + 1 if chosen in long.tokens else 25
        assert short.tokens == long.tokens[:end]
        assert short.log_probs == long.log_probs[:end]


def test_a_stop_string_cuts_the_text_and_keeps_the_tokens_that_spell_it(engine):
    free = SamplingParams(n=5, max_new_tokens=25, seed=8, stop_token_ids=[])
    [unstopped] = engine.generate([[7, 1, 3]], free)
    stop = unstopped[0].text[9:12]  # ends inside a burst of 4
    [stopped] = engine.generate([[7, 1, 3]], SamplingParams(**{**vars(free), "stop": [stop, "never this"]}))
    decode = engine._tokenizer.decode
    assert stopped[0].finish_reason == "stop"
    for long, short in zip(unstopped, stopped, strict=True):
        if stop not in long.text:
            assert bits(short) == bits(long)
            continue
        end = next(k for k in range(26) if stop in decode(long.tokens[:k]))
        assert (short.tokens, short.log_probs) == (long.tokens[:end], long.log_probs[:end])
        assert short.text == long.text[: long.text.index(stop)]
        assert (short.finish_reason, short.stop_reason) == ("stop", stop)


def test_samples_of_a_prompt_differ_and_seeds_decide_them(engine):
    params = SamplingParams(n=4, max_new_tokens=15, seed=5)
    first, again, twice = engine.generate(
        [PROMPTS[2]] * 3, [params, params, SamplingParams(n=4, max_new_tokens=15, seed=6)]
    )
    assert len({tuple(c.tokens) for c in first}) == 4
    assert [bits(c) for c in first] == [bits(c) for c in again]
    assert not {tuple(c.tokens) for c in first} & {tuple(c.tokens) for c in twice}
    assert [c.seed for c in twice] == [6] * 4
    large = SamplingParams(n=1, max_new_tokens=15, seed=2**32 + 5)
    [[completion]] = engine.generate([PROMPTS[2]], large)
    assert completion.tokens != first[0].tokens, "the upper half of the seed must matter"


def test_each_prompt_may_have_its_own_params(engine):
    params = [
        SamplingParams(n=1, max_new_tokens=1),
        SamplingParams(n=3, max_new_tokens=4, stop_token_ids=[]),
        SamplingParams(n=2, temperature=0, max_new_tokens=6, stop_token_ids=[]),
    ]
    results = engine.generate(PROMPTS[:3], params)
    assert [[len(c.tokens) for c in samples] for samples in results] == [[1], [4, 4, 4], [6, 6]]
    assert bits(results[2][0]) == bits(results[2][1])
    for samples, prompt in zip(results, PROMPTS, strict=False):
        assert all(c.prompt_tokens == prompt for c in samples)


def test_text_chat_and_tokens_are_all_prompts(engine):
    params = SamplingParams(temperature=0, max_new_tokens=3)
    chat = [{"role": "user", "content": "hi"}]
    [text], [messages], [tokens], [array] = engine.generate(["hi", chat, [72, 73], np.array([72, 73])], params)
    assert text.prompt_tokens == tokens.prompt_tokens == array.prompt_tokens == [72, 73]
    assert bits(text) == bits(tokens) == bits(array)
    assert messages.prompt_tokens == engine._tokenizer.encode("<user>hi<assistant>")


def test_no_prompts_give_no_completions(engine):
    assert engine.generate([], SamplingParams()) == []
    assert engine.generate([], []) == []


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([[1], [2] * 44], SamplingParams(), r"prompts\[1\] has 44 tokens; with max_length 44 .* at most 43"),
        ([[1], []], SamplingParams(), r"prompts\[1\] has no tokens"),
        ([[1, 101]], SamplingParams(), r"prompts\[0\] holds token id 101"),
        ([[1, -1]], SamplingParams(), r"prompts\[0\] holds token id -1"),
        ([[1.5]], SamplingParams(), r"prompts\[0\] is \[1.5\]"),
        ([{"role": "user", "content": "x"}], SamplingParams(), r"prompts\[0\]"),
        ([4], SamplingParams(), r"prompts\[0\] is 4"),
        ("one text", SamplingParams(), "list of prompts"),
        ([[1], [2]], [SamplingParams()], "params has 1 entries for 2 prompts"),
        ([[1]], [None], r"params\[0\] is None"),
        ([[1]], SamplingParams(stop_token_ids=[101]), r"stop_token_ids holds 101"),
        ([[1]], SamplingParams(stop_token_ids=list(range(17))), r"stop_token_ids has 17 ids; at most 16"),
    ],
)
def test_a_refused_request_says_why_and_leaves_the_engine_as_it_was(engine, prompts, params, message):
    before = engine.stats
    with pytest.raises(UserError, match=message):
        engine.generate(prompts, params)
    assert engine.stats == before
    [[completion]] = engine.generate([[3, 4]], SamplingParams(max_new_tokens=2, stop_token_ids=[]))
    assert len(completion.tokens) == 2


def test_completions_come_as_they_finish_and_say_what_they_belong_to(engine):
    first = engine.submit(PROMPTS[:2], SamplingParams(n=2, max_new_tokens=20, stop_token_ids=[], seed=1))
    second = engine.submit(PROMPTS[2:3], SamplingParams(n=1, max_new_tokens=2, stop_token_ids=[], seed=1))
    results = {}
    for handle, prompt_index, sample_index, completion in engine.completions():
        if not results:
            assert handle == second, "the short one ends first"
            third = engine.submit(PROMPTS[3:4], SamplingParams(max_new_tokens=3))
        results[handle, prompt_index, sample_index] = completion
    assert set(results) == {(first, i, j) for i in range(2) for j in range(2)} | {(second, 0, 0), (third, 0, 0)}
    again = engine.generate(PROMPTS[:2], SamplingParams(n=2, max_new_tokens=20, stop_token_ids=[], seed=1))
    assert [[bits(c) for c in samples] for samples in again] == [
        [bits(results[first, i, j]) for j in range(2)] for i in range(2)
    ]


def test_generate_leaves_completions_of_other_requests_for_their_iterator(engine):
    handle = engine.submit([[9, 9]], SamplingParams(n=3, max_new_tokens=2, stop_token_ids=[]))
    engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=30, stop_token_ids=[]))
    assert sorted((s.handle, s.sample_index) for s in engine.completions()) == [(handle, i) for i in range(3)]


def test_a_cancelled_request_hands_out_nothing_more_and_others_are_not_disturbed(engine):
    params = SamplingParams(n=4, max_new_tokens=12, stop_token_ids=[], seed=7)
    [undisturbed] = engine.generate([PROMPTS[4]], params)
    # Of five slots, two end in the first burst, three go on; the rest waits.
    short = engine.submit([[1]], SamplingParams(n=2, max_new_tokens=1))
    doomed = engine.submit(PROMPTS[:2], SamplingParams(n=4, max_new_tokens=40, stop_token_ids=[]))
    kept = engine.submit([PROMPTS[4]], params)
    completions = engine.completions()
    assert next(completions).handle == short
    engine.cancel(short)
    engine.cancel(doomed)
    rest = list(completions)
    assert {sample.handle for sample in rest} == {kept}
    assert [bits(s.completion) for s in sorted(rest, key=lambda s: s.sample_index)] == [bits(c) for c in undisturbed]
    engine.cancel(doomed)
    with pytest.raises(UserError, match="handle"):
        engine.cancel(RequestHandle(10**6))


def test_statistics_count_what_was_done(engine):
    before = engine.stats
    engine.generate([[1, 2, 3], [4, 5]], SamplingParams(n=3, max_new_tokens=7, stop_token_ids=[]))
    after = engine.stats
    assert after.prompt_tokens - before.prompt_tokens == 5
    assert after.generated_tokens - before.generated_tokens == 42
    assert after.seconds > before.seconds


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_slots": 0}, "max_slots is 0"),
        ({"max_length": 1}, "max_length is 1"),
        ({"max_length": 20.0}, "max_length is 20.0"),
        ({"page_size": -1}, "page_size is -1"),
        ({"decode_burst": 0}, "decode_burst is 0"),
        ({"prefill_batch": 0}, "prefill_batch is 0"),
        ({"cache_tokens": 100, "page_size": 64}, "use 128"),
        # 3 slots of 40 -> 48 tokens in chunks of 16: 144 -> 192 in pages of 64; 128 // 48 = 2 slots.
        (
            {"max_slots": 3, "max_length": 40, "prefill_chunk": 16, "cache_tokens": 128, "page_size": 64},
            "cache_tokens to at least 192, max_slots to at most 2",
        ),
    ],
)
def test_bad_settings_are_refused(policy, settings, message):
    with pytest.raises(UserError, match=message):
        RolloutEngine(policy, **{"max_slots": 2, "max_length": 32, **settings})


def test_a_length_beyond_the_declared_positions_warns(policy):
    with pytest.warns(UserWarning, match="600 exceeds the 512 positions"):
        RolloutEngine(policy, max_slots=1, max_length=600)
