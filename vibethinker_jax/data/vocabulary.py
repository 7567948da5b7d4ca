"""The two kinds of vocabulary file behind `Tokenizer`: text to ids and back, nothing added, nothing cleaned."""

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Protocol

import sentencepiece
import tokenizers

from vibethinker_jax.errors import UserError


class Vocabulary(Protocol):
    """Text to ids and back. Adds no begin or end token; special tokens written in the text become their ids."""

    size: int  # largest id + 1
    eos_id: int | None  # the end token, where the file itself names one

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str: ...

    def token_to_id(self, token: str) -> int | None: ...


class JsonVocabulary:
    """`tokenizer.json`, the format of Hugging Face tokenizers."""

    def __init__(self, text: str, source: str):
        """`text`: the file's content. `source`: what error messages start with."""
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing more specific
            raise UserError(f"{source}: not a tokenizer that can be read: {error}; fetch the file again") from error
        # Files written while training may carry both; either would change lengths silently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self.eos_id = None

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)

    def token_to_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)


class PieceVocabulary:
    """`tokenizer.model`, a sentencepiece model.

    User-defined symbols are single ids wherever they occur in the text, by sentencepiece itself. Control
    symbols (`<s>`, ...) are not: sentencepiece reads them as plain characters, so they are cut out first.
    White space survives a round trip only if the model was trained with the identity normaliser and without a
    dummy prefix.
    """

    def __init__(self, model: bytes, special_tokens: Iterable[str], source: str):
        """`model`: the file's content. `special_tokens`: what `skip_special_tokens` leaves out, beside controls."""
        try:
            self._pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise UserError(f"{source}: not a sentencepiece model: {error}; fetch the file again") from error
        self.size = self._pieces.get_piece_size()
        self.eos_id = self._pieces.eos_id() if self._pieces.eos_id() >= 0 else None
        controls = [i for i in range(self.size) if self._pieces.is_control(i)]
        self._controls = {self._pieces.id_to_piece(i): i for i in controls}
        self._specials = {i for i in map(self.token_to_id, special_tokens) if i is not None}.union(controls)

    def encode(self, text: str) -> list[int]:
        if not self._controls:
            return self._pieces.encode(text)
        tokens = []
        for part in re.split("(" + "|".join(map(re.escape, self._controls)) + ")", text):
            if part in self._controls:
                tokens.append(self._controls[part])
            elif part:
                tokens += self._pieces.encode(part)
        return tokens

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        if skip_special_tokens:
            return self._pieces.decode([t for t in tokens if t < self.size and t not in self._specials])
        controls = set(self._controls.values())
        text = []
        for is_control, run in itertools.groupby((t for t in tokens if t < self.size), key=controls.__contains__):
            ids = list(run)
            text += map(self._pieces.id_to_piece, ids) if is_control else [self._pieces.decode(ids)]
        return "".join(text)

    def token_to_id(self, token: str) -> int | None:
        found = self._pieces.piece_to_id(token)  # the id of "unknown" where there is no such piece
        return found if self._pieces.id_to_piece(found) == token else None
