"""Prompts in any accepted form to token ids. No JAX."""

import operator
from collections.abc import Mapping, Sequence
from typing import Protocol

from vibethinker_jax.errors import UserError

# Text as it stands, chat messages for the checkpoint's template, or token ids.
Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]


class TextCodec(Protocol):
    """What the engine needs of a tokenizer."""

    stop_token_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]: ...
    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]: ...
    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str: ...


def encode_prompts(
    prompts: Sequence[Prompt], tokenizer: TextCodec, vocab_size: int, max_length: int
) -> list[list[int]]:
    """Token ids of every prompt.

    Raises:
        UserError: a prompt is of no accepted form, empty, holds ids outside the vocabulary, or leaves no room for a
            new token; the message names its index.
    """
    if isinstance(prompts, str | Mapping):
        raise UserError(f"prompts is one {type(prompts).__name__}; give a list of prompts, e.g. [prompt]")
    encoded = []
    for index, prompt in enumerate(prompts):
        tokens = _encode(prompt, index, tokenizer)
        if not tokens:
            raise UserError(f"prompts[{index}] has no tokens; a completion needs at least one to follow")
        outside = next((token for token in tokens if not 0 <= token < vocab_size), None)
        if outside is not None:
            raise UserError(f"prompts[{index}] holds token id {outside}; the vocabulary has ids 0 to {vocab_size - 1}")
        if len(tokens) >= max_length:
            raise UserError(
                f"prompts[{index}] has {len(tokens)} tokens; with max_length {max_length} a prompt may have at most "
                f"{max_length - 1}, so that one new token fits; shorten it or raise max_length"
            )
        encoded.append(tokens)
    return encoded


def _encode(prompt: Prompt, index: int, tokenizer: TextCodec) -> list[int]:
    if isinstance(prompt, str):
        return list(tokenizer.encode(prompt))
    wrong = UserError(
        f"prompts[{index}] is {prompt!r:.80}; give text, a list of chat messages {{'role', 'content'}}, or token ids"
    )
    if isinstance(prompt, Mapping):
        raise wrong
    try:
        items = list(prompt)
    except TypeError:
        raise wrong from None
    if items and all(isinstance(item, Mapping) for item in items):
        return list(tokenizer.encode_chat(items))
    try:
        return [operator.index(item) for item in items]
    except TypeError:
        raise wrong from None
