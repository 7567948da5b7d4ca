"""One SFT trace as tokens: the rendered prompt, the response, the end of the turn."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, Int
from tqdm import tqdm

from vibethinker_jax.data.records import Example
from vibethinker_jax.data.tokenizer import Tokenizer
from vibethinker_jax.errors import UserError


@dataclass(frozen=True, eq=False)
class EncodedExample:
    """A document to pack. What is trained follows from lengths alone, whatever ids the tokens have.

    Attributes:
        tokens: int32[n], prompt then response, the end-of-turn token last.
        prompt_length: tokens[:prompt_length] are given, the others are trained.
        token_extras: name -> float32[n]: a value for each token, e.g. its rollout log-probability.
        segment_extras: name -> one value for the document, e.g. its advantage.
    """

    tokens: Int[np.ndarray, "n"]
    prompt_length: int
    token_extras: Mapping[str, Float[np.ndarray, "n"]] = field(default_factory=dict)
    segment_extras: Mapping[str, float] = field(default_factory=dict)


def encode_example(
    tokenizer: Tokenizer, prompt: Sequence[Mapping[str, str]], response: str, where: str = "the example"
) -> EncodedExample:
    """Tokenises one trace the way the rollout engine will see it.

    The prompt is rendered with the generation prompt and the response is tokenised on its own, so that the
    boundary falls where sampling starts; one end-of-turn token is appended, and it is trained.

    Args:
        tokenizer: of the checkpoint that is trained.
        prompt: chat messages.
        response: the assistant's text, without an end-of-turn token.
        where: what error messages start with.

    Raises:
        UserError: the response holds a stop token, after which nothing of it could ever be sampled.
    """
    prompt_tokens = tokenizer.encode_chat(prompt)
    response_tokens = tokenizer.encode(response)
    stops = sorted(set(response_tokens).intersection(tokenizer.stop_token_ids))
    if stops:
        text = tokenizer.decode(stops[:1], skip_special_tokens=False)
        raise UserError(f"{where}: response contains the stop token {text!r} ({stops[0]}); remove it from the text")
    tokens = np.array([*prompt_tokens, *response_tokens, tokenizer.end_of_turn_id], dtype=np.int32)
    return EncodedExample(tokens, prompt_length=len(prompt_tokens))


def encode_examples(tokenizer: Tokenizer, examples: Iterable[Example]) -> list[EncodedExample]:
    """`encode_example` of every record, with a progress bar; errors name the example's id and trace_id."""
    return [
        encode_example(tokenizer, example.prompt, example.response, where=f"example {example.id}/{example.trace_id}")
        for example in tqdm(examples, desc="tokenising", unit=" examples", delay=5)
    ]
