"""One RL step's rollouts: sample every prompt, judge each response while the others still decode."""

from collections.abc import Sequence
from concurrent.futures import Future

import jax

from vibethinker_jax.data.records import Problem
from vibethinker_jax.parallel.multihost import from_first
from vibethinker_jax.rewards.base import Verdict
from vibethinker_jax.rewards.pool import VerifierPool
from vibethinker_jax.rollout.engine import RolloutEngine
from vibethinker_jax.rollout.params import Completion, SamplingParams
from vibethinker_jax.seeds import stable_seed
from vibethinker_jax.training.trajectories import Group, Sample


def collect_groups(
    engine: RolloutEngine,
    pool: VerifierPool,
    problems: Sequence[Problem],
    *,
    samples: int,
    temperature: float,
    max_new_tokens: int,
    seed: int,
    step: int,
) -> list[Group]:
    """Samples `samples` responses per problem from the engine's current weights and waits for all verdicts.

    Args:
        engine: holds the weights to sample from.
        pool: judges.
        problems: of this step, in order.
        samples: G.
        temperature: of sampling; nothing is truncated (top_p 1), so that the trainer's distribution is the sampler's.
        max_new_tokens: longest response.
        seed: of the run. A problem's samples depend on (seed, step, problem id) alone.
        step: number of the RL step.

    Returns:
        One group per problem, in order.
    """
    params = [
        SamplingParams(
            n=samples,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            seed=stable_seed(seed, step, problem.id),
        )
        for problem in problems
    ]
    handle = engine.submit([list(problem.prompt) for problem in problems], params)
    completions: dict[tuple[int, int], Completion] = {}
    verdicts: dict[tuple[int, int], Future[Verdict]] = {}
    try:
        for finished in engine.completions():
            key = finished.prompt_index, finished.sample_index
            completions[key] = finished.completion
            if jax.process_index() == 0:  # one process judges for all: verdicts depend on a host's clock and load
                verdicts[key] = pool.submit(problems[finished.prompt_index], finished.completion.text)
    except BaseException:
        engine.cancel(handle)
        raise
    keys = sorted(completions)
    judged = from_first(lambda: [verdicts[key].result().to_dict() for key in keys])
    decided = dict(zip(keys, map(Verdict.from_dict, judged), strict=True))
    return [
        Group(
            problem.id,
            tuple(completions[p, 0].prompt_tokens),
            tuple(_sample(completions[p, s], decided[p, s]) for s in range(samples)),
        )
        for p, problem in enumerate(problems)
    ]


def _sample(completion: Completion, verdict: Verdict) -> Sample:
    return Sample(
        tokens=tuple(completion.tokens),
        log_probs=tuple(completion.log_probs),
        text=completion.text,
        finish_reason=completion.finish_reason,
        reward=verdict.reward,
        correct=verdict.correct,
        error=verdict.error,
    )
