import dataclasses
import json

import pytest

from tests.models.tiny import tiny_config, tiny_raw
from vibethinker_jax.errors import UserError
from vibethinker_jax.models.config import Qwen2Config
from vibethinker_jax.models.parameters import count_parameters

QWEN_3B = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "rope_theta": 1e6,
    "max_position_embeddings": 32768,
}


def test_qwen_3b_has_its_published_number_of_parameters():
    # https://huggingface.co/Qwen/Qwen2.5-Coder-3B: 3.09B parameters; by hand:
    # embed 151936*2048 = 311164928; a layer: q 2048*2048+2048, k and v 2*(2048*256+256), out 2048*2048,
    # mlp 3*2048*11008, norms 2*2048 = 77076992; 36 of them; final norm 2048.
    assert count_parameters(tiny_config(**QWEN_3B)) == 311164928 + 36 * 77076992 + 2048 == 3085938688


def test_padding_of_the_vocabulary_is_not_counted_and_is_a_multiple_of_128():
    assert tiny_config(vocab_size=97).padded_vocab_size == 128
    assert tiny_config(vocab_size=128).padded_vocab_size == 128
    assert tiny_config(vocab_size=151936).padded_vocab_size == 151936
    assert count_parameters(tiny_config(vocab_size=98)) - count_parameters(tiny_config(vocab_size=97)) == 48
    untied = {"tie_word_embeddings": False}
    assert count_parameters(tiny_config(**untied)) - count_parameters(tiny_config()) == 97 * 48


def test_old_and_new_rope_fields_mean_the_same():
    new = tiny_raw(rope_parameters={"rope_theta": 10000.0, "rope_type": "default"}, dtype="float32")
    del new["rope_theta"], new["torch_dtype"]
    assert Qwen2Config.from_hf(new, "new") == tiny_config()
    assert Qwen2Config.from_hf(new, "new").to_hf() == new


@pytest.mark.parametrize(
    "neutral",
    [
        {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 2},
        {"use_mrope": False},
        {"layer_types": ["full_attention"] * 3},
        {"rope_scaling": None},
        {"rope_scaling": {"rope_type": "default"}},
        {"head_dim": 8},
    ],
)
def test_neutral_values_load(neutral, recwarn):
    assert tiny_config(**neutral) == tiny_config()
    assert not recwarn.list


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_sliding_window", True),
        ("use_mrope", True),
        ("layer_types", ["full_attention", "sliding_attention", "full_attention"]),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("rope_parameters", {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 500.0}),
        ("hidden_act", "gelu"),
        ("attention_dropout", 0.1),
        ("quantization_config", {"bits": 4}),
        ("model_type", "llama"),
        ("num_key_value_heads", 4),
        ("hidden_size", 47),
        ("vocab_size", 0),
        ("vocab_size", "97"),
        ("num_hidden_layers", None),
        ("rms_norm_eps", -1.0),
        ("rope_theta", 0),
        ("tie_word_embeddings", "yes"),
        ("head_dim", 7),
    ],
)
def test_what_would_change_the_computation_is_refused_by_name(field, value):
    with pytest.raises(UserError, match=field):
        tiny_config(**{field: value})


@pytest.mark.parametrize("field", ["vocab_size", "num_key_value_heads", "rope_theta", "tie_word_embeddings"])
def test_a_missing_field_is_named_and_never_guessed(field):
    raw = tiny_raw()
    del raw[field]
    with pytest.raises(UserError, match=f"somewhere.*{field} is missing"):
        Qwen2Config.from_hf(raw, "somewhere")


def test_an_unknown_field_warns_and_survives():
    with pytest.warns(UserWarning, match="frobnicate"):
        config = tiny_config(frobnicate=3)
    with pytest.warns(UserWarning, match="frobnicate"):
        assert config.to_hf() == tiny_raw(frobnicate=3)


def test_only_changed_fields_change_in_the_written_config():
    config = dataclasses.replace(tiny_config(), max_position_embeddings=65536)
    assert config.to_hf() == tiny_raw(max_position_embeddings=65536)
    new = tiny_raw(rope_parameters={"rope_theta": 10000.0, "rope_type": "default"})
    config = dataclasses.replace(Qwen2Config.from_hf(new, "new"), rope_theta=5e5)
    assert config.to_hf()["rope_parameters"] == {"rope_theta": 5e5, "rope_type": "default"}
    assert config.to_hf()["rope_theta"] == 5e5


def test_a_broken_file_is_named(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        Qwen2Config.from_file(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: is not valid JSON"):
        Qwen2Config.from_file(tmp_path / "config.json")
    (tmp_path / "config.json").write_text(json.dumps(tiny_raw()))
    assert Qwen2Config.from_file(tmp_path / "config.json") == tiny_config()
