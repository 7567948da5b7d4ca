"""The real 0.5B checkpoint: the model is the right model, sampled and scored alike, and survives conversion."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors import safe_open

import vibethinker_jax as vt
from vibethinker_jax.checkpoints.convert import hf_to_orbax, orbax_to_hf
from vibethinker_jax.data.chat import EncodedExample
from vibethinker_jax.data.loader import pack_rows
from vibethinker_jax.data.row_plan import plan_rows
from vibethinker_jax.parallel.rules import UNPLACED
from vibethinker_jax.training.forward import PackedForward
from vibethinker_jax.training.sft_step import sft_step

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("length", [1, 7, None])
def test_logits_equal_transformers(policy, reference, longest_prompt, length):
    torch = pytest.importorskip("torch")
    tokens = np.array([longest_prompt[:length]])
    assert length or tokens.shape[1] > 800
    ours = np.asarray(policy.logits(tokens))
    with torch.no_grad():
        theirs = reference(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(ours, theirs, atol=2e-4, rtol=0)
    np.testing.assert_array_equal(ours.argmax(-1), theirs.argmax(-1))


def test_logits_equal_float64_where_float32_references_differ(policy, checkpoint, prompts):
    """On unrelated prompts strung together transformers' own float32 logits are 3.6e-4 from its float64 ones."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokens = np.array([[token for prompt in prompts for token in prompt][:650]])
    exact = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64).eval()
    with torch.no_grad():
        exact = exact(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(np.asarray(policy.logits(tokens)), exact, atol=2e-4, rtol=0)


def test_greedy_decoding_gives_transformers_tokens(policy, reference, prompts):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    chosen = [prompts[0], prompts[-1]]
    # Fields left out are taken from the checkpoint, whose repetition penalty would not be greedy decoding.
    settings = transformers.GenerationConfig(
        max_new_tokens=48, do_sample=False, eos_token_id=None, pad_token_id=0, repetition_penalty=1.0
    )
    engine = vt.RolloutEngine(policy, max_slots=2, max_length=512)
    results = engine.generate(chosen, vt.SamplingParams(temperature=0.0, max_new_tokens=48, stop_token_ids=()))
    for tokens, [completion] in zip(chosen, results, strict=True):
        with torch.no_grad():
            theirs = reference.generate(torch.tensor([tokens]), generation_config=settings)[0, len(tokens) :]
        assert completion.tokens == theirs.tolist()


def test_a_completion_is_the_same_alone_and_in_a_batch(policy, prompts):
    engine = vt.RolloutEngine(policy, max_slots=4, max_length=384)
    params = vt.SamplingParams(max_new_tokens=16, seed=5)
    together = engine.generate(prompts[:4], params)
    [[alone]] = engine.generate([prompts[2]], params)
    assert alone.tokens == together[2][0].tokens
    assert alone.log_probs == together[2][0].log_probs


def test_sampler_and_trainer_agree_after_updates(policy, prompts):
    examples = [EncodedExample(np.array(tokens, np.int32), prompt_length=20) for tokens in prompts[:3]]
    plan = plan_rows([len(example.tokens) for example in examples], 512)
    batch = pack_rows(examples, plan, range(plan.num_rows), 512)
    step = sft_step(PackedForward(policy.config, UNPLACED, jnp.float32, "full", head_chunk=128), optax.sgd(1e-3))
    state = step.init(jax.tree.map(jnp.array, policy.params))
    for _ in range(3):
        state, metrics = step(state, [batch])
    assert np.isfinite(metrics.summary()["loss"])
    moved = policy.with_params(state.params)
    engine = vt.RolloutEngine(policy, max_slots=4, max_length=384)
    engine.update_weights(moved)
    params = vt.SamplingParams(n=2, temperature=0.9, max_new_tokens=48, seed=3)
    differences = []
    for completion in itertools.chain(*engine.generate(prompts[:2], params)):
        tokens = completion.prompt_tokens + completion.tokens
        scored = np.asarray(moved.log_probs([tokens], [len(tokens)], temperature=0.9))[0]
        differences.append(np.abs(scored[len(completion.prompt_tokens) :] - np.array(completion.log_probs)))
    differences = np.concatenate(differences)
    assert differences.mean() <= 5e-6
    assert differences.max() <= 1e-4


def test_conversion_there_and_back_keeps_every_byte(checkpoint, tmp_path):
    hf_to_orbax(checkpoint, tmp_path / "orbax")
    orbax_to_hf(tmp_path / "orbax", tmp_path / "back")
    before, after = tensors(checkpoint), tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    assert len(before) == 290
    for name, (file, key) in before.items():
        with safe_open(file, "np") as first, safe_open(after[name][0], "np") as second:
            one, two = first.get_tensor(key), second.get_tensor(key)
        assert one.dtype == two.dtype, name
        assert one.tobytes() == two.tobytes(), name
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (checkpoint / name).read_bytes() == (tmp_path / "back" / name).read_bytes()


def tensors(directory):
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "np") as handle:
            found |= {key: (file, key) for key in handle.keys()}  # noqa: SIM118 (not a dict)
    return found
