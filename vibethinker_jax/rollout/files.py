"""Sampling from files: problems in, one JSON line per completion out, continued where an earlier run stopped."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from etils import epath
from tqdm import tqdm

from vibethinker_jax.data.records import Problem
from vibethinker_jax.errors import UserError
from vibethinker_jax.rollout.engine import RolloutEngine
from vibethinker_jax.rollout.params import Completion, SamplingParams
from vibethinker_jax.seeds import stable_seed


def sample_prompt(engine: RolloutEngine, prompt: str, params: SamplingParams) -> list[dict[str, Any]]:
    """Completions of one user message, rendered with the checkpoint's chat template."""
    [completions] = engine.generate([[{"role": "user", "content": prompt}]], params, progress=True)
    return [_line("prompt", i, _settings(params), completion) for i, completion in enumerate(completions)]


def sample_file(
    engine: RolloutEngine,
    problems: Sequence[Problem],
    destination: epath.PathLike,
    params: SamplingParams,
    checkpoint: str | None = None,
) -> int:
    """Samples every problem and appends the completions to `destination` as they finish.

    A problem's seed derives from (params.seed, problem id), so an interrupted call that is repeated passes over the
    problems that are done, and adds to the others what it would have drawn.

    Args:
        engine: to sample with.
        problems: with unique ids.
        destination: local JSONL file, one line per completion.
        params: sampling; `n` completions per problem.
        checkpoint: what the engine serves; a continued file must name the same.

    Returns:
        Number of completions in `destination`.

    Raises:
        UserError: `destination` holds completions of other settings or problems.
    """
    destination = epath.Path(destination)
    settings = {**_settings(params), "checkpoint": checkpoint}
    done = _read(destination, settings, {problem.id for problem in problems}, params.n)
    todo = [p for p in problems if any((p.id, i) not in done for i in range(params.n))]
    seeds = [stable_seed(params.seed, problem.id) for problem in todo]
    destination.parent.mkdir(parents=True, exist_ok=True)
    with (
        destination.open("a") as stream,
        tqdm(total=len(problems) * params.n, initial=len(done), desc="sample", unit=" completions") as bar,
    ):
        if todo:
            engine.submit([list(p.prompt) for p in todo], [replace(params, seed=seed) for seed in seeds])
        for finished in engine.completions() if todo else ():
            key = todo[finished.prompt_index].id, finished.sample_index
            if key not in done:
                line = _line(*key, settings, finished.completion)
                stream.write(json.dumps(line, ensure_ascii=False) + "\n")
                stream.flush()
                done.add(key)
                bar.update()
    return len(done)


def _line(problem_id: str, sample: int, settings: dict[str, Any], completion: Completion) -> dict[str, Any]:
    return {
        "id": problem_id,
        "sample": sample,
        "text": completion.text,
        "tokens": len(completion.tokens),
        "finish_reason": completion.finish_reason,
        "log_prob": sum(completion.log_probs),
        "settings": settings,
    }


def _settings(params: SamplingParams) -> dict[str, Any]:
    return json.loads(json.dumps({name: value for name, value in asdict(params).items() if name != "n"}))


def _read(path: epath.Path, settings: dict[str, Any], ids: set[str], n: int) -> set[tuple[str, int]]:
    """What is done already; a line torn by a kill is cut off the file."""
    if not path.exists():
        return set()
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    done = set()
    for number, line in enumerate(whole.splitlines(), start=1):
        record = json.loads(line)
        if record["settings"] != settings or record["id"] not in ids or record["sample"] >= n:
            raise UserError(f"{path}: line {number} comes from other settings or problems; use another --output")
        done.add((record["id"], record["sample"]))
    if len(whole) < len(content):
        path.write_bytes(whole)
    return done
