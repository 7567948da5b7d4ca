"""Sampling from files: one line per completion, continued and never mixed."""

import json

import pytest

from vibethinker_jax.data.records import Problem
from vibethinker_jax.errors import UserError
from vibethinker_jax.rollout.files import sample_file, sample_prompt
from vibethinker_jax.rollout.params import SamplingParams

PROBLEMS = [
    Problem(name, "math", ({"role": "user", "content": name},), {"kind": "math", "answer": "1"}) for name in "abc"
]
PARAMS = SamplingParams(n=2, max_new_tokens=4, seed=3)


def lines(path):
    return sorted(path.read_text().splitlines())


def test_an_interrupted_file_is_continued_to_the_same_lines(shared_engine, tmp_path):
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    assert sample_file(shared_engine, PROBLEMS, whole, PARAMS) == 6
    written = whole.read_bytes()
    assert {(r["id"], r["sample"]) for r in map(json.loads, lines(whole))} == {(i, s) for i in "abc" for s in (0, 1)}
    for cut in (0, 10, len(written) // 2, len(written) - 3, len(written)):
        parts.write_bytes(written[:cut])
        assert sample_file(shared_engine, PROBLEMS, parts, PARAMS) == 6
        assert lines(parts) == lines(whole)


def test_completions_of_other_settings_are_refused_by_line(shared_engine, tmp_path):
    path = tmp_path / "out.jsonl"
    sample_file(shared_engine, PROBLEMS, path, PARAMS)
    for problems, params in (
        (PROBLEMS, SamplingParams(n=2, max_new_tokens=4, seed=4)),
        (PROBLEMS[:1], PARAMS),
        (PROBLEMS, SamplingParams(n=1, max_new_tokens=4, seed=3)),
    ):
        with pytest.raises(UserError, match=r"out\.jsonl: line \d comes from other settings or problems"):
            sample_file(shared_engine, problems, path, params)


def test_a_prompt_gives_n_completions(shared_engine):
    completions = sample_prompt(shared_engine, "a", PARAMS)
    assert [c["sample"] for c in completions] == [0, 1]
    assert all(1 <= c["tokens"] <= 4 for c in completions)
