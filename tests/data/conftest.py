"""Tokenizers for the data tests: the real Qwen one, and a small sentencepiece one made here."""

import io
import json
import pathlib

import pytest
import sentencepiece

from vibethinker_jax.data.tokenizer import Tokenizer

TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def qwen_dir(shared_dir: pathlib.Path) -> pathlib.Path:
    return shared_dir / "data" / "tokenizer" / "qwen2.5-coder"


@pytest.fixture(scope="session")
def qwen(qwen_dir: pathlib.Path) -> Tokenizer:
    return Tokenizer.from_directory(qwen_dir)


@pytest.fixture(scope="session")
def piece_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A directory with tokenizer.model: ids 0-3 are <unk> <s> </s> <pad>, then <|im_start|>, <|im_end|>."""
    directory = tmp_path_factory.mktemp("pieces")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["three plus four is seven", "what is 12 + 30 ?", "the answer is 42"] * 20),
        model_writer=model,
        model_type="bpe",
        vocab_size=330,
        byte_fallback=True,
        user_defined_symbols=["<|im_start|>", "<|im_end|>", "<think>", "</think>", "\n"],
        pad_id=3,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (directory / "tokenizer.model").write_bytes(model.getvalue())
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "pad_token": "<pad>", "additional_special_tokens": ["<|im_start|>"]})
    )
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory
