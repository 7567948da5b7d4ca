"""A checkpoint's own tokenizer: its vocabulary, its chat template and the tokens that end a turn."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from etils import epath

from vibethinker_jax.data import chat_template, files
from vibethinker_jax.data.vocabulary import JsonVocabulary, PieceVocabulary, Vocabulary
from vibethinker_jax.errors import UserError

# text that no template treats specially, to find where a template puts the content of a turn
_PROBE = "vibethinkerprobe"


class Tokenizer:
    """Text to tokens and back, as the checkpoint's files say. Picklable.

    Attributes:
        vocab_size: largest id that the tokenizer can produce + 1; the model's `vocab_size` may be larger.
        stop_token_ids: ids that end a generation (Qwen has two).
        end_of_turn_id: the one of them that closes an assistant turn in the chat template.
        pad_token_id: filler. Nothing computes with it: masks come from lengths.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        template: str,
        special_tokens: Mapping[str, str],
        stop_token_ids: Sequence[int],
        pad_token_id: int | None,
        source: str,
    ):
        """Most callers want `from_directory`.

        Args:
            vocabulary: text to ids and back.
            template: Jinja source of the chat template.
            special_tokens: names that the template may use, e.g. {"eos_token": "<|im_end|>"}.
            stop_token_ids: at least one.
            pad_token_id: None takes the last stop token.
            source: what error messages start with.
        """
        self._vocabulary = vocabulary
        self._template = template
        self._special_tokens = dict(special_tokens)
        self._source = source
        self.vocab_size = vocabulary.size
        self.stop_token_ids = tuple(dict.fromkeys(stop_token_ids))
        self.pad_token_id = self.stop_token_ids[-1] if pad_token_id is None else pad_token_id
        for name, token in [*(("stop token", i) for i in self.stop_token_ids), ("pad token", self.pad_token_id)]:
            if not 0 <= token < self.vocab_size:
                raise UserError(
                    f"{source}: {name} is {token}; use an id below {self.vocab_size}, as the vocabulary has"
                )
        self.end_of_turn_id = self._find_end_of_turn()

    @classmethod
    def from_directory(cls, path: epath.PathLike) -> "Tokenizer":
        """Reads a Hugging Face directory, local or gs://.

        - Vocabulary: `tokenizer.json`, else `tokenizer.model` (sentencepiece).
        - Chat template: `chat_template.jinja`, else the field `chat_template` of `tokenizer_config.json`.
        - Stop tokens: `eos_token_id` of `generation_config.json`, else of `config.json`, else the `eos_token`
          of `tokenizer_config.json`, else the vocabulary's own end token (sentencepiece has one).
        - Pad token: `pad_token` of `tokenizer_config.json`, else `pad_token_id` of the two configs in that
          order, else the last stop token.

        Raises:
            UserError: a file is missing or says nothing usable; names the directory and what it needs.
        """
        directory = epath.Path(path)
        if not directory.is_dir():
            raise UserError(f"{directory}: no such directory; give one with tokenizer.json or tokenizer.model")
        config = _read_json(directory / "tokenizer_config.json")
        special_tokens = _special_tokens(config)
        vocabulary = _read_vocabulary(directory, [*special_tokens.values(), *_additional_special_tokens(config)])
        # generation_config.json first: it alone lists both of Qwen's stop tokens.
        configs = [_read_json(directory / name) for name in ("generation_config.json", "config.json")]
        return cls(
            vocabulary,
            _read_template(directory, config),
            special_tokens,
            _stop_token_ids(configs, special_tokens, vocabulary, directory),
            _pad_token_id(configs, special_tokens, vocabulary),
            str(directory),
        )

    def encode(self, text: str) -> list[int]:
        """The tokens of a text. No begin or end token is added; special tokens written in the text are single ids."""
        return self._vocabulary.encode(text)

    def decode(self, tokens: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens, white space untouched.

        Bytes that are no UTF-8 become U+FFFD. Ids at or above `vocab_size`, which a model with a padded
        vocabulary has, are no text and are left out. `skip_special_tokens` also leaves out stop tokens.
        """
        skipped = self.stop_token_ids if skip_special_tokens else ()
        return self._vocabulary.decode([int(t) for t in tokens if t not in skipped], skip_special_tokens)

    def render_chat(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation; by default it ends with what opens the assistant's turn.

        Raises:
            UserError: the template refuses the messages.
        """
        return chat_template.render(self._template, messages, self._special_tokens, add_generation_prompt, self._source)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The tokens of a conversation, ending with what opens the assistant's turn."""
        return self.encode(self.render_chat(messages))

    def _find_end_of_turn(self) -> int:
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
        after = self.render_chat(turns, add_generation_prompt=False).rpartition(_PROBE)[2]
        for token in self.encode(after):
            if token in self.stop_token_ids:
                return token
        raise UserError(
            f"{self._source}: the chat template closes an assistant turn with {after!r}, which holds none of the stop "
            f"tokens {list(self.stop_token_ids)}; add its closing token to eos_token_id in generation_config.json"
        )


def _token_text(value: Any) -> str | None:
    """A token in tokenizer_config.json is text, or an object with its text in `content`, or null."""
    return value.get("content") if isinstance(value, dict) else value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    names = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
    tokens = {name: _token_text(config.get(name)) for name in names}
    return {name: token for name, token in tokens.items() if token is not None}


def _additional_special_tokens(config: Mapping[str, Any]) -> list[str]:
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    tokens = map(_token_text, extra.values() if isinstance(extra, dict) else extra)
    return [token for token in tokens if token is not None]


def _read_vocabulary(directory: epath.Path, special_tokens: Iterable[str]) -> Vocabulary:
    json_file, model_file = directory / "tokenizer.json", directory / "tokenizer.model"
    if json_file.exists():
        return JsonVocabulary(json_file.read_text(encoding="utf-8"), str(json_file))
    if model_file.exists():
        return PieceVocabulary(model_file.read_bytes(), special_tokens, str(model_file))
    raise UserError(f"{directory}: no tokenizer; put tokenizer.json or tokenizer.model there")


def _read_template(directory: epath.Path, config: Mapping[str, Any]) -> str:
    file = directory / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if not isinstance(template, str):
        raise UserError(
            f"{directory}: no chat template; put chat_template.jinja there, or chat_template into tokenizer_config.json"
        )
    return template


def _stop_token_ids(
    configs: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    vocabulary: Vocabulary,
    directory: epath.Path,
) -> list[int]:
    for config in configs:
        stop = config.get("eos_token_id")
        if stop is not None and stop != []:
            return stop if isinstance(stop, list) else [stop]
    token = special_tokens.get("eos_token")
    stop = vocabulary.eos_id if token is None else vocabulary.token_to_id(token)
    if stop is None:
        raise UserError(
            f"{directory}: no stop token; put eos_token_id into generation_config.json or config.json, or an eos_token "
            "of the vocabulary into tokenizer_config.json"
        )
    return [stop]


def _pad_token_id(
    configs: Sequence[Mapping[str, Any]], special_tokens: Mapping[str, str], vocabulary: Vocabulary
) -> int | None:
    if "pad_token" in special_tokens:
        pad = vocabulary.token_to_id(special_tokens["pad_token"])
        if pad is not None:
            return pad
    for config in configs:
        if config.get("pad_token_id") is not None:
            return config["pad_token_id"]
    return None


def _read_json(file: epath.Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no such file."""
    if not file.exists():
        return {}
    content = files.parse_json(file.read_text(encoding="utf-8"), str(file))
    if not isinstance(content, dict):
        raise UserError(f"{file}: holds a {type(content).__name__}; write a JSON object")
    return content
