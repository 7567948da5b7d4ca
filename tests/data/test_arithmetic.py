"""The demo's data: right answers, a split that cannot leak, and a model directory that everything loads."""

import json

import pytest

from vibethinker_jax.data import arithmetic
from vibethinker_jax.data.arithmetic import Chain, generate, write_dataset
from vibethinker_jax.data.chat import encode_example
from vibethinker_jax.data.records import load_examples, load_problems
from vibethinker_jax.data.tokenizer import Tokenizer
from vibethinker_jax.errors import UserError
from vibethinker_jax.models.config import Qwen2Config
from vibethinker_jax.models.parameters import count_parameters
from vibethinker_jax.rewards import verify


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    directory = tmp_path_factory.mktemp("arithmetic")
    with pytest.MonkeyPatch.context() as patch:
        for name, count in (("SFT_TRACES", 300), ("RL_PROBLEMS", 80), ("HELD_OUT_PROBLEMS", 60)):
            patch.setattr(arithmetic, name, count)
        write_dataset(directory, seed=3)
        before = {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}
        write_dataset(directory, seed=3)
        assert before == {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}
        with pytest.raises(UserError, match=r'(?s)dataset\.json: describes other data .*"seed": 3'):
            write_dataset(directory, seed=4)
    return directory


def test_a_chain_by_hand():
    chain = Chain(23, (4, -9))
    assert chain.question == "23+4-9=?"
    assert chain.results == [23, 27, 18]
    assert chain.solution == "<think>23+4=27\n27-9=18</think>\\boxed{18}"
    assert chain.problem()["verifier"] == {"kind": "math", "answer": "18", "require_thinking": True}


def test_every_solution_is_verified_and_every_other_answer_is_not(dataset):
    for example in load_examples(dataset / "sft.jsonl"):
        assert verify(example, example.response).correct
        wrong = str(int(example.verifier["answer"]) + 1)
        assert not verify(example, example.response.rsplit("{", 1)[0] + f"{{{wrong}}}").correct
        assert not verify(example, f"\\boxed{{{example.verifier['answer']}}}").correct, "thinking is required"


def test_the_sides_never_meet_whatever_the_seed():
    train = {chain.question for seed in range(3) for chain in generate(2000, seed, held_out=False)}
    held_out = {chain.question for seed in range(3) for chain in generate(300, seed, held_out=True)}
    assert not train & held_out
    assert generate(50, 1, held_out=False) == generate(50, 1, held_out=False)
    assert generate(50, 1, held_out=False) != generate(50, 2, held_out=False)


def test_numbers_stay_in_range_and_lengths_vary():
    chains = generate(3000, 0, held_out=False)
    assert len({chain.question for chain in chains}) == 3000
    assert all(0 <= result <= 99 for chain in chains for result in chain.results)
    assert {len(chain.terms) for chain in chains} == {1, 2, 3, 4}
    assert all(term for chain in chains for term in chain.terms)


def test_rl_problems_are_not_sft_problems_and_held_out_ones_are_neither(dataset):
    rl, held_out = ({p.id for p in load_problems(dataset / f"{name}.jsonl")} for name in ("rl", "heldout"))
    sft = {example.id for example in load_examples(dataset / "sft.jsonl")}
    assert (len(sft), len(rl), len(held_out)) == (300, 80, 60)
    assert not sft & rl
    assert not (sft | rl) & held_out


def test_the_model_has_a_million_parameters_and_a_vocabulary_without_unknowns(dataset):
    assert 900_000 < count_parameters(Qwen2Config.from_file(dataset / "model" / "config.json")) < 1_100_000
    tokenizer = Tokenizer.from_directory(dataset / "model")
    example = load_examples(dataset / "sft.jsonl")[0]
    encoded = encode_example(tokenizer, example.prompt, example.response)
    text = tokenizer.decode(encoded.tokens.tolist(), skip_special_tokens=False)
    assert text == f"<|im_start|>user\n{example.prompt[0]['content']}<|im_end|>\n<|im_start|>assistant\n" + (
        example.response + "<|im_end|>"
    )
    # one token per character, but for the symbols
    assert len(tokenizer.encode("<think>23+4=27\n27-9=18</think>\\boxed{18}")) == 1 + 7 + 1 + 7 + 1 + 1 + 2 + 1
    assert tokenizer.stop_token_ids == (3, 1)


def test_both_tokenizer_files_and_transformers_agree(dataset, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is in the test extra")
    for name in ("tokenizer.model", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (tmp_path / name).write_bytes((dataset / "model" / name).read_bytes())
    pieces, both = Tokenizer.from_directory(tmp_path), Tokenizer.from_directory(dataset / "model")
    auto = transformers.AutoTokenizer.from_pretrained(dataset / "model")
    for line in (dataset / "sft.jsonl").read_text().splitlines()[:50]:
        record = json.loads(line)
        rendered = both.render_chat(record["prompt"]) + record["response"]
        assert pieces.encode(rendered) == both.encode(rendered) == auto(rendered)["input_ids"]
        assert auto.decode(both.encode(rendered)) == rendered
    assert pieces.stop_token_ids == both.stop_token_ids
