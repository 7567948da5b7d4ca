"""Evaluation: benchmarks, sampling protocol, statistics, reports. Imports no JAX."""

from vibethinker_jax.evaluation.benchmarks import BENCHMARKS, Benchmark, get_benchmark, load_benchmark
from vibethinker_jax.evaluation.compare import Comparison, compare
from vibethinker_jax.evaluation.evaluate import evaluate, problem_seed
from vibethinker_jax.evaluation.report import Report, format_report

__all__ = [
    "BENCHMARKS",
    "Benchmark",
    "Comparison",
    "Report",
    "compare",
    "evaluate",
    "format_report",
    "get_benchmark",
    "load_benchmark",
    "problem_seed",
]
