"""The demo's task: sums of a few small numbers, worked out step by step, and a tiny model's files to learn them with.

A problem is a chain such as 23+4-9=?, whose partial results stay between 0 and 99. Its worked solution writes one
step per line and then the boxed result:

    <think>23+4=27
    27-9=18</think>\\boxed{18}

Problems are split by a hash of the question, so that no seed and no size can put one on both sides.
"""

import hashlib
import io
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sentencepiece
from etils import epath
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as JsonTokenizer

from vibethinker_jax.errors import UserError
from vibethinker_jax.run_files import write_json

MOST_TERMS = 5
LARGEST_FIRST = 50
LARGEST_TERM = 9
LARGEST_RESULT = 99
HELD_OUT_BYTE = 32  # one question in eight is held out for evaluation

SFT_TRACES = 8000
RL_PROBLEMS = 2000
HELD_OUT_PROBLEMS = 400

_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_SYMBOLS = (*_SPECIAL_TOKENS, "<think>", "</think>", "\n", "system", "user", "assistant", "\\boxed{", "}")
_CHARACTERS = "0123456789+-=?"
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Chain:
    """A sum: a first number and signed terms, e.g. Chain(23, (4, -9)) for 23+4-9."""

    first: int
    terms: tuple[int, ...]

    @property
    def results(self) -> list[int]:
        """Partial results, the first number included; the last one is the answer."""
        return list(itertools.accumulate(self.terms, initial=self.first))

    @property
    def question(self) -> str:
        """23+4-9=?"""
        return f"{self.first}{''.join(f'{term:+d}' for term in self.terms)}=?"

    @property
    def solution(self) -> str:
        """The worked solution, ending in the boxed result."""
        results = self.results
        steps = (f"{a}{term:+d}={b}" for a, term, b in zip(results, self.terms, results[1:], strict=False))
        return f"<think>{chr(10).join(steps)}</think>\\boxed{{{results[-1]}}}"

    @property
    def held_out(self) -> bool:
        """Whether the question belongs to evaluation; a hash of its text decides."""
        return hashlib.sha256(self.question.encode()).digest()[0] < HELD_OUT_BYTE

    def problem(self) -> dict[str, Any]:
        """The record of data/records.py. The answer counts only after the thinking."""
        return {
            "id": self.question.removesuffix("=?"),
            "domain": "math",
            "prompt": [{"role": "user", "content": self.question}],
            "verifier": {"kind": "math", "answer": str(self.results[-1]), "require_thinking": True},
            "meta": {"terms": len(self.terms)},
        }

    def trace(self) -> dict[str, Any]:
        """The SFT record: the problem with its worked solution."""
        return {**self.problem(), "trace_id": "worked", "response": self.solution}


def generate(count: int, seed: int, held_out: bool) -> list[Chain]:
    """`count` distinct chains of one side of the split; the same for the same arguments on every machine."""
    generator = random.Random(f"arithmetic {seed} {held_out}")
    chains: dict[Chain, None] = {}
    while len(chains) < count:
        chain = _draw(generator)
        if chain.held_out == held_out:
            chains[chain] = None
    return list(chains)


def _draw(generator: random.Random) -> Chain:
    total = first = generator.randint(1, LARGEST_FIRST)
    terms: list[int] = []
    for _ in range(generator.randint(1, MOST_TERMS - 1)):
        term = 0
        while not term or not 0 <= total + term <= LARGEST_RESULT:
            term = generator.randint(-LARGEST_TERM, LARGEST_TERM)
        terms.append(term)
        total += term
    return Chain(first, tuple(terms))


def write_dataset(directory: epath.PathLike, seed: int) -> str:
    """Writes all that the demo starts from, or leaves it alone if it is there for the same seed.

    sft.jsonl (traces), rl.jsonl (problems, none of them in sft.jsonl), heldout.jsonl (problems of the other side of
    the split, the same for every seed) and model/ (config.json of a tiny Qwen2 and its tokenizer, no weights).

    Returns:
        A line that says what there is.

    Raises:
        UserError: the directory holds data of another seed.
    """
    directory = epath.Path(directory)
    done = directory / "dataset.json"
    summary = {"seed": seed, "sft": SFT_TRACES, "rl": RL_PROBLEMS, "heldout": HELD_OUT_PROBLEMS}
    if done.exists() and json.loads(done.read_text()) != summary:
        raise UserError(f"{done}: describes other data ({done.read_text().strip()}); choose another --output")
    if not done.exists():
        chains = generate(SFT_TRACES + RL_PROBLEMS, seed, held_out=False)
        (directory / "model").mkdir(parents=True, exist_ok=True)
        _write_lines(directory / "sft.jsonl", [chain.trace() for chain in chains[:SFT_TRACES]])
        _write_lines(directory / "rl.jsonl", [chain.problem() for chain in chains[SFT_TRACES:]])
        _write_lines(directory / "heldout.jsonl", [c.problem() for c in generate(HELD_OUT_PROBLEMS, 0, held_out=True)])
        write_model_directory(directory / "model")
        write_json(done, summary)  # last: it says that everything else is there
    return f"{directory}: {SFT_TRACES} traces, {RL_PROBLEMS} RL problems, {HELD_OUT_PROBLEMS} held-out problems, model/"


def write_model_directory(directory: epath.Path) -> None:
    """config.json of a Qwen2 with 0.97 million parameters, and its tokenizer in both formats."""
    pieces = _sentencepiece_model()
    vocabulary = sentencepiece.SentencePieceProcessor(model_proto=pieces)
    ids = {vocabulary.id_to_piece(i): i for i in range(vocabulary.get_piece_size())}
    end_of_turn, pad = ids["<|im_end|>"], ids["<|endoftext|>"]
    (directory / "tokenizer.model").write_bytes(pieces)
    (directory / "tokenizer.json").write_text(_json_tokenizer(ids).to_str(pretty=True))
    (directory / "chat_template.jinja").write_text(_CHAT_TEMPLATE)
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "additional_special_tokens": list(_SPECIAL_TOKENS),
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": "<unk>",
        },
    )
    write_json(directory / "generation_config.json", {"eos_token_id": [end_of_turn, pad], "pad_token_id": pad})
    write_json(
        directory / "config.json",
        {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "vocab_size": len(ids),
            "hidden_size": 160,
            "intermediate_size": 512,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 100.0,  # short documents: Qwen's 1e6 would leave most frequencies unused
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
            "initializer_range": 0.05,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "eos_token_id": end_of_turn,
            "pad_token_id": pad,
            "torch_dtype": "float32",
        },
    )


def _sentencepiece_model() -> bytes:
    """A vocabulary of single characters and the symbols above."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([_CHARACTERS]),
        model_writer=model,
        model_type="char",
        vocab_size=128,
        hard_vocab_limit=False,
        character_coverage=1.0,
        user_defined_symbols=list(_SYMBOLS),
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        bos_id=-1,
        eos_id=-1,
        minloglevel=2,
    )
    return model.getvalue()


def _json_tokenizer(ids: dict[str, int]) -> JsonTokenizer:
    """The same vocabulary as a tokenizer.json, which transformers reads: characters, and symbols found first."""
    tokenizer = JsonTokenizer(models.BPE(vocab=ids, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in _SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in _SYMBOLS if token not in _SPECIAL_TOKENS])
    return tokenizer


def _write_lines(path: epath.Path, records: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
