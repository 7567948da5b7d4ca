import pytest

from vibethinker_jax.data.sources import BENCHMARKS as FORMATS
from vibethinker_jax.errors import UserError
from vibethinker_jax.evaluation import BENCHMARKS, get_benchmark, load_benchmark
from vibethinker_jax.rewards import verify


def test_aime25_is_the_published_protocol():
    aime = get_benchmark("aime25")
    assert (aime.samples, aime.temperature, aime.top_p, aime.top_k, aime.window) == (64, 1.0, 0.95, -1, 65536)
    assert {p.metric: p.value for p in aime.published} == {"Pass@1": 0.914, "Pass@1 + CLR": 0.967}


@pytest.mark.parametrize("name", sorted(BENCHMARKS))
def test_every_benchmark_is_consistent(name):
    benchmark = BENCHMARKS[name]
    assert benchmark.name == name
    assert benchmark.samples >= 1
    assert all(0 <= p.value <= 1 and p.source for p in benchmark.published)
    assert not benchmark.public_format or name in FORMATS


def test_an_unknown_benchmark_is_a_user_error():
    with pytest.raises(UserError, match="--benchmark is 'gsm8'; use one of: aime25, gpqa-diamond, gsm8k, ifbench, "):
        get_benchmark("gsm8")


@pytest.mark.parametrize(
    ("name", "file", "count"),
    [
        ("aime25", "math/aime25.parquet", 30),
        ("gpqa-diamond", "stem/gpqa_diamond.parquet", 198),
        ("gsm8k", "gsm8k/test_first500.jsonl", 500),
        ("problems", "math/aime25.parquet", 30),
    ],
)
def test_real_files_load_and_their_golds_verify(shared_dir, name, file, count):
    problems = load_benchmark(name, shared_dir / "data" / file)
    assert len(problems) == count
    for problem in problems:
        assert verify(problem, f"<think>?</think>\\boxed{{{problem.verifier['answer']}}}").correct
        assert not verify(problem, "<think>?</think>\\boxed{-123456}").correct


@pytest.mark.parametrize(
    ("name", "file", "count"),
    [("ifeval", "instruct/ifeval.jsonl", 541), ("ifbench", "instruct/ifbench_first150.jsonl", 150)],
)
def test_instruction_files_load_and_an_empty_response_follows_nothing(shared_dir, name, file, count):
    problems = load_benchmark(name, shared_dir / "data" / file)
    assert len(problems) == count
    assert not any(verify(problem, "").correct for problem in problems)
