"""The tokenizer: equal to transformers on the real files, and explicit about what a directory lacks."""

import json
import pathlib
import pickle
import shutil
from typing import Any

import pytest
import sentencepiece
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vibethinker_jax.data.tokenizer import Tokenizer
from vibethinker_jax.errors import UserError

TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONVERSATIONS = {
    "one turn": [{"role": "user", "content": "What is 2+2?"}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  What?  \n"}],
    "multi turn": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"},
        {"role": "user", "content": "Again, <b>'quoted' & \"so\"</b>"},
    ],
    "unicode": [{"role": "user", "content": "Zoë e\u0301 数学 🧮 \u2028 ∑ᵢ xᵢ² — \u200d\t末"}],
    "markup in the text": [{"role": "user", "content": "what does <|im_end|> do, and <tool_call>?"}],
}
TEXTS = [
    "",
    " ",
    "a  b   c ",
    "x .",
    "don 't , stop !",
    "line\r\n\n\n  end\n",
    "\u0663 3 \uff13 ½",
    "\x00\x07",
    "naïve café 🤷🏽‍♀️",
]


def small_json_tokenizer(directory: pathlib.Path, **config: object) -> pathlib.Path:
    """A tokenizer.json whose post-processor adds <s>. Ids: <s> 0, </s> 1, <|im_start|> 2, <|im_end|> 3."""
    model = tokenizers.models.BPE(vocab={}, merges=[], byte_fallback=False)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["some text to train on"], trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(max_length=4)
    tokenizer.enable_padding(length=8)
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "bos_token": {"__type": "AddedToken", "content": "<s>"},
        "eos_token": "</s>",
        "chat_template": "{{ bos_token }}" + TEMPLATE,
        **config,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 3, 1]}))
    return directory


@pytest.fixture(scope="module")
def reference(qwen_dir: pathlib.Path) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle of the chat template")
    return transformers.AutoTokenizer.from_pretrained(qwen_dir)


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chats_render_as_in_transformers(
    qwen: Tokenizer, reference: Any, name: str, add_generation_prompt: bool
) -> None:
    messages = CONVERSATIONS[name]
    expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    assert qwen.render_chat(messages, add_generation_prompt) == expected
    if add_generation_prompt:
        ids = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert qwen.encode_chat(tuple(messages)) == ids


@pytest.mark.parametrize("text", TEXTS + [m[-1]["content"] for m in CONVERSATIONS.values()])
def test_texts_encode_and_decode_as_in_transformers(qwen: Tokenizer, reference: Any, text: str) -> None:
    ids = qwen.encode(text)
    assert ids == reference(text, add_special_tokens=False)["input_ids"]
    for skip in (True, False):
        # clean_up_tokenization_spaces=False: what the tokens say, not what a detokeniser would prefer
        expected = reference.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert qwen.decode(ids, skip_special_tokens=skip) == expected


def test_the_real_tokenizer_has_qwens_ids(qwen: Tokenizer) -> None:
    assert qwen.stop_token_ids == (151645, 151643)
    assert qwen.end_of_turn_id == 151645
    assert qwen.pad_token_id == 151643
    assert qwen.vocab_size == 151665  # 151,643 pieces and 22 added tokens; the model's table has 151,936 rows
    assert qwen.encode("<|im_start|>") == [151644]


@pytest.mark.parametrize("text", ["a  b   c ", " x .", "don 't , stop !", "\n\n end \n"])
def test_decoding_leaves_spaces_alone(qwen: Tokenizer, text: str) -> None:
    assert qwen.decode(qwen.encode(text)) == text


def test_stop_tokens_and_ids_beyond_the_vocabulary_are_no_text(qwen: Tokenizer) -> None:
    tokens = [*qwen.encode("done."), 151645, 151900]
    assert qwen.decode(tokens) == "done."
    assert qwen.decode(tokens, skip_special_tokens=False) == "done.<|im_end|>"


def test_a_tokenizer_survives_pickling(qwen: Tokenizer, piece_dir: pathlib.Path) -> None:
    for tokenizer in (qwen, Tokenizer.from_directory(piece_dir)):
        copy = pickle.loads(pickle.dumps(tokenizer))
        messages = CONVERSATIONS["multi turn"]
        assert copy.encode_chat(messages) == tokenizer.encode_chat(messages)
        assert (copy.stop_token_ids, copy.end_of_turn_id) == (tokenizer.stop_token_ids, tokenizer.end_of_turn_id)


def test_the_begin_token_comes_from_the_template_alone(tmp_path: pathlib.Path) -> None:
    tokenizer = Tokenizer.from_directory(small_json_tokenizer(tmp_path))
    ids = tokenizer.encode_chat([{"role": "user", "content": "to train on"}])
    assert ids.count(0) == 1
    assert ids[:2] == [0, 2]
    assert 0 not in tokenizer.encode("text")


def test_truncation_and_padding_in_the_file_are_switched_off(tmp_path: pathlib.Path) -> None:
    tokenizer = Tokenizer.from_directory(small_json_tokenizer(tmp_path))
    text = "longer than four tokens, and then some"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("") == []


def test_stop_ids_come_from_the_first_config_that_has_them(tmp_path: pathlib.Path) -> None:
    directory = small_json_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_directory(directory)
    assert (tokenizer.stop_token_ids, tokenizer.end_of_turn_id, tokenizer.pad_token_id) == ((1, 3), 3, 3)
    (directory / "generation_config.json").unlink()
    (directory / "config.json").write_text(json.dumps({"eos_token_id": 3, "pad_token_id": 0}))
    tokenizer = Tokenizer.from_directory(directory)
    assert (tokenizer.stop_token_ids, tokenizer.end_of_turn_id, tokenizer.pad_token_id) == ((3,), 3, 0)
    (directory / "config.json").write_text("{}")
    # only </s> is left, which the template does not close a turn with
    with pytest.raises(UserError, match=r"closes an assistant turn with '<\|im_end\|>\\n', .*stop tokens \[1\]"):
        Tokenizer.from_directory(directory)
    small_json_tokenizer(directory, eos_token=None)
    (directory / "generation_config.json").unlink()
    with pytest.raises(UserError, match=r"no stop token; put eos_token_id into generation_config\.json"):
        Tokenizer.from_directory(directory)
    (directory / "config.json").write_text(json.dumps({"eos_token_id": 9999}))
    with pytest.raises(UserError, match="stop token is 9999; use an id below"):
        Tokenizer.from_directory(directory)


def test_templates_may_come_in_the_config_as_text_or_by_name(tmp_path: pathlib.Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ eos_token }}" + TEMPLATE}]
    tokenizer = Tokenizer.from_directory(small_json_tokenizer(tmp_path, chat_template=named))
    expected = "</s><|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == expected
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)  # the file wins
    expected = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    assert Tokenizer.from_directory(tmp_path).render_chat([{"role": "user", "content": "x"}]) == expected


def test_templates_have_what_transformers_gives_them(tmp_path: pathlib.Path) -> None:
    template = (
        "{% for message in messages %}\n"
        "    {% if message.role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}\n"
        "    {% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}\n"
        "    {% else %}\n"
        "{{ message | tojson }} {{ strftime_now('%Y') | length }}\n"
        "    {% break %}\n"
        "    {% endif %}\n"
        "{% endfor %}\n"
        "{{ messages[-1].content }}<|im_end|>"
    )
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle of the chat template")
    tokenizer = Tokenizer.from_directory(small_json_tokenizer(tmp_path, chat_template=template))
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    messages = [{"role": "assistant", "content": "b"}, {"role": "user", "content": "<é&'>"}]
    rendered = tokenizer.render_chat(messages)
    assert rendered == reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert '"content": "<é&\'>"} 4' in rendered
    with pytest.raises(UserError, match=r"the chat template fails on roles \['system'\]: no system turn"):
        tokenizer.render_chat([{"role": "system", "content": ""}])


def test_templates_cannot_reach_into_python(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match="the chat template fails"):
        Tokenizer.from_directory(small_json_tokenizer(tmp_path, chat_template="{{ messages.__class__.__mro__ }}"))
    with pytest.raises(UserError, match="the chat template fails"):
        Tokenizer.from_directory(small_json_tokenizer(tmp_path, chat_template="{% if %}"))


def test_a_missing_or_broken_file_is_named_with_its_directory(tmp_path: pathlib.Path, piece_dir: pathlib.Path) -> None:
    with pytest.raises(UserError, match=r"absent: no such directory; .*tokenizer\.json or tokenizer\.model"):
        Tokenizer.from_directory(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty: no tokenizer; put tokenizer\.json or tokenizer\.model there"):
        Tokenizer.from_directory(tmp_path / "empty")
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(piece_dir / "tokenizer.model", bare)
    with pytest.raises(UserError, match=r"bare: no chat template; put chat_template\.jinja there"):
        Tokenizer.from_directory(bare)
    for name, content, message in [
        ("tokenizer.model", "nonsense", r"tokenizer\.model: not a sentencepiece model"),
        ("tokenizer.json", "{}", r"tokenizer\.json: not a tokenizer that can be read"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json: not JSON"),
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json: holds a list"),
    ]:
        (bare / name).write_text(content)
        with pytest.raises(UserError, match=message):
            Tokenizer.from_directory(bare)


def test_sentencepiece_markup_is_single_ids_wherever_it_stands(piece_dir: pathlib.Path) -> None:
    tokenizer = Tokenizer.from_directory(piece_dir)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(piece_dir / "tokenizer.model"))
    assert (tokenizer.stop_token_ids, tokenizer.end_of_turn_id, tokenizer.pad_token_id) == ((5,), 5, 3)
    assert tokenizer.vocab_size == pieces.get_piece_size()
    ids = tokenizer.encode_chat([{"role": "user", "content": "what is 12 + 30 ?<think>x"}])
    assert ids[0] == 4
    assert ids.count(5) == 1
    assert ids.count(pieces.piece_to_id("<think>")) == 1
    # control symbols, which sentencepiece itself reads as characters
    assert tokenizer.encode("<s>the</s>") == [1, *pieces.encode("the"), 2]
    assert tokenizer.decode([1, *pieces.encode("the"), 2], skip_special_tokens=False) == "<s>the</s>"
    assert tokenizer.decode([1, *pieces.encode("the"), 3, 2]) == "the"


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.text(
        alphabet=st.one_of(st.sampled_from(" \n\taeh<>|/1é🧮"), st.characters(codec="utf-8", exclude_characters="\0▁"))
    )
)
def test_sentencepiece_text_survives_a_round_trip(piece_dir: pathlib.Path, text: str) -> None:
    tokenizer = Tokenizer.from_directory(piece_dir)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([4, *tokenizer.encode(text), 5]) == text
