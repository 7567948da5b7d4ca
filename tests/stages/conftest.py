"""A stage's whole input, tiny: a model directory without weights, SFT traces and problems."""

import io
import json

import pytest
import sentencepiece

from tests.models.tiny import tiny_raw

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory):
    """config.json and a sentencepiece tokenizer of digits, signs and letters."""
    directory = tmp_path_factory.mktemp("stage") / "model"
    directory.mkdir()
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["0123456789 + - = ? user assistant answer \\boxed{12}"] * 10),
        model_writer=model,
        model_type="char",
        vocab_size=64,
        character_coverage=1.0,
        user_defined_symbols=["<|im_start|>", "<|im_end|>", "\n"],
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (directory / "tokenizer.model").write_bytes(model.getvalue())
    words = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()).get_piece_size()
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    raw = tiny_raw(vocab_size=words, hidden_size=24, num_hidden_layers=2, intermediate_size=32, num_attention_heads=2)
    (directory / "config.json").write_text(json.dumps(raw))
    return directory


@pytest.fixture(scope="session")
def problems_file(model_directory):
    """Seven questions whose answer is any digit that an untrained model happens to end with: 1."""
    path = model_directory.parent / "problems.jsonl"
    problems = [{**_problem(i), "verifier": {"kind": "math", "answer": "1"}} for i in range(7)]
    path.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    return path


@pytest.fixture(scope="session")
def traces_file(model_directory):
    """Nine worked sums of different lengths."""
    path = model_directory.parent / "traces.jsonl"
    lines = [
        {**_problem(i), "trace_id": f"t{i}", "response": f"{'0 + ' * (i % 3)}{i} + 1 = {i + 1} \\boxed{{{i + 1}}}"}
        for i in range(9)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def _problem(i):
    return {
        "id": f"sum-{i}",
        "domain": "math",
        "prompt": [{"role": "user", "content": f"{i} + 1 = ?"}],
        "verifier": {"kind": "math", "answer": str(i + 1)},
        "meta": {},
    }
