"""Encoding of one trace: where the prompt ends, and what closes the response."""

import copy
import pathlib

import numpy as np
import pytest

from vibethinker_jax.data.chat import encode_example, encode_examples
from vibethinker_jax.data.loader import pack_rows
from vibethinker_jax.data.records import Example, load_problems
from vibethinker_jax.data.row_plan import plan_rows
from vibethinker_jax.data.tokenizer import Tokenizer
from vibethinker_jax.errors import UserError

PROMPT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]


def test_an_example_is_the_rendered_prompt_the_response_and_the_end_of_the_turn(qwen: Tokenizer) -> None:
    response = " <think>\none and one\n</think>\n\nIt is \\boxed{2}."
    encoded = encode_example(qwen, PROMPT, response)
    assert encoded.tokens.dtype == np.int32
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    assert qwen.decode(encoded.tokens[: encoded.prompt_length], skip_special_tokens=False) == text
    assert qwen.decode(encoded.tokens[encoded.prompt_length :], skip_special_tokens=False) == response + "<|im_end|>"
    assert encoded.tokens[-1] == 151645


def test_the_response_is_tokenised_as_a_continuation_of_the_prompt(qwen: Tokenizer) -> None:
    # Tokenised in one piece, the prompt's last "\n" and the response's first would be one token, "\n\n".
    encoded = encode_example(qwen, PROMPT, "\nYes")
    assert encoded.tokens.tolist() == [*qwen.encode_chat(PROMPT), *qwen.encode("\nYes"), 151645]
    whole = qwen.encode(qwen.render_chat(PROMPT) + "\nYes<|im_end|>")
    assert encoded.tokens.tolist() != whole


def test_the_end_of_the_turn_is_trained_even_where_it_is_the_pad_token(qwen: Tokenizer) -> None:
    qwen_with_shared_id = copy.copy(qwen)
    qwen_with_shared_id.pad_token_id = qwen.end_of_turn_id
    encoded = encode_example(qwen_with_shared_id, PROMPT, "two")
    (response_token,) = qwen.encode("two")
    n, p = len(encoded.tokens), encoded.prompt_length
    assert n == p + 2
    batch = pack_rows([encoded], plan_rows([n], n + 3), [0], n + 3)
    trained = np.flatnonzero(batch["loss_weights"][0])
    # predicted from p - 1 and p: the response's one token and the end of the turn; nothing else
    assert trained.tolist() == [p - 1, p]
    assert batch["targets"][0, trained].tolist() == [response_token, qwen_with_shared_id.pad_token_id]
    # the prompt has closed turns of its own, which are not trained
    assert (batch["targets"][0, : p - 1] == qwen.end_of_turn_id).sum() == 2


@pytest.mark.parametrize(("response", "name"), [("a<|im_end|>", "<|im_end|>"), ("<|endoftext|>b", "<|endoftext|>")])
def test_a_stop_token_inside_a_response_is_refused(qwen: Tokenizer, response: str, name: str) -> None:
    example = Example("q", "math", tuple(PROMPT), {}, trace_id="t", response=response)
    with pytest.raises(UserError) as error:
        encode_examples(qwen, [example])
    assert f"example q/t: response contains the stop token '{name}'" in str(error.value)


def test_real_problems_encode_to_text_that_decodes_back(qwen: Tokenizer, shared_dir: pathlib.Path) -> None:
    problems = load_problems(shared_dir / "data" / "gsm8k" / "test_first500.jsonl")[:50]
    examples = [
        Example(p.id, p.domain, p.prompt, p.verifier, trace_id="gold", response=p.meta["solution"]) for p in problems
    ]
    for example, encoded in zip(examples, encode_examples(qwen, examples), strict=True):
        assert qwen.decode(encoded.tokens[encoded.prompt_length :]) == example.response
        assert qwen.decode(encoded.tokens, False).count("<|im_start|>") == 3  # Qwen's own system turn, user, assistant
