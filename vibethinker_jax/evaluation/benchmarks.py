"""Benchmarks: a name, the protocol that its published figures were measured under, and those figures."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from vibethinker_jax.errors import UserError

R3 = "VibeThinker-3B report, arXiv 2606.16140"


@dataclass(frozen=True)
class Published:
    """A figure from a paper.

    Attributes:
        metric: as the source names it.
        value: a share in [0, 1].
        source: where it stands.
    """

    metric: str
    value: float
    source: str


@dataclass(frozen=True)
class Benchmark:
    """How a benchmark is run, and what was published under that protocol.

    Attributes:
        name: as the command line takes it, and (for a public file) as `data/sources.py` knows its format.
        description: one line.
        samples: per problem; the headline figure is avg@samples.
        problems: how many the full set has; None where it is the user's file.
        temperature, top_p, top_k: of the sampler; top_k -1 is no limit.
        window: tokens of prompt and response together; None: unstated. No benchmark limits the response further.
        public_format: whether the file may have the benchmark's own format, beside records of ours.
        published: figures measured under this protocol.
        caveat: what of the published protocol ours does not reproduce.
    """

    name: str
    description: str
    samples: int
    problems: int | None
    temperature: float = 1.0  # R3 section 3.1, as top_p, top_k and the absence of a length limit
    top_p: float = 0.95
    top_k: int = -1
    window: int | None = None
    public_format: bool = True
    published: tuple[Published, ...] = ()
    caveat: str | None = None


BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType(
    {
        benchmark.name: benchmark
        for benchmark in (
            Benchmark(
                name="aime25",
                description="AIME 2025, both papers: 30 problems with integer answers",
                samples=64,  # R3 section 3.1
                problems=30,
                window=65536,  # R3 section 3.1 sets no limit but the model's own; it is trained with this one
                published=(Published("Pass@1", 0.914, R3), Published("Pass@1 + CLR", 0.967, R3)),
                caveat="the report also lets a language model judge answers that math-verify rejects",
            ),
            Benchmark(
                name="gsm8k",
                description="GSM8K test set: 1,319 grade-school word problems",
                samples=1,  # chosen: with 1,319 problems the spread over problems dominates that over samples
                problems=1319,
            ),
            Benchmark(
                name="gpqa-diamond",
                description="GPQA-Diamond: 198 multiple-choice questions of graduate-level science",
                samples=16,  # R3 section 3.1
                problems=198,
                window=65536,
                published=(Published("Pass@1", 0.702, R3), Published("Pass@1 + CLR", 0.729, R3)),
                caveat="options stand in one seeded order per problem, the same for all its samples",
            ),
            Benchmark(
                name="ifeval",
                description="IFEval: 541 prompts with instructions that a program can check, strict scoring per prompt",
                samples=1,  # chosen: the report gives no number
                problems=541,
                window=65536,
                published=(Published("score", 0.934, R3),),
                caveat="the report does not say which of IFEval's four figures it gives",
            ),
            Benchmark(
                name="ifbench",
                description="IFBench: prompts with instructions unlike IFEval's, strict scoring per prompt",
                samples=1,  # chosen, as ifeval
                problems=None,
                window=65536,
                published=(Published("score", 0.745, R3),),
                caveat="29 of its instruction types are known; a file with others is refused by name",
            ),
            Benchmark(
                name="problems",
                description="any file of problems: JSONL, Parquet or CSV in a format that `data/sources.py` reads",
                samples=4,  # chosen
                problems=None,
                public_format=False,
            ),
        )
    }
)


def get_benchmark(name: str) -> Benchmark:
    """The benchmark of a name; UserError listing the names for an unknown one."""
    if name not in BENCHMARKS:
        raise UserError(f"--benchmark is {name!r}; use one of: {', '.join(sorted(BENCHMARKS))}")
    return BENCHMARKS[name]


def load_benchmark(name: str, path: str) -> list:
    """The problems of a benchmark's file, in its order.

    Args:
        name: one of `BENCHMARKS`.
        path: the data file, local or gs://. Data sets are not shipped with the package.
    """
    from vibethinker_jax.data.records import load_problems

    benchmark = get_benchmark(name)
    return load_problems(path, benchmark=name if benchmark.public_format else None)
