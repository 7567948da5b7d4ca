"""Reinforcement learning with MGPO (VibeThinker-3B report, section 2.2), on-policy.

One step:
1. take the next prompts of the epoch's order;
2. sample G responses of each from the current weights, and judge them while others decode;
3. commit rollouts and verdicts to disk: a killed run uses them again;
4. group-relative advantages times the maximum-entropy weight of each prompt, with Long2Short's length shift if asked;
5. pack the responses and update: once (the report's on-policy setting), or several times against the
   log-probabilities of the weights that sampled.
"""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from etils import epath
from ml_collections import ConfigDict

from vibethinker_jax.data.loader import Batch
from vibethinker_jax.data.records import Problem, load_problems
from vibethinker_jax.errors import UserError
from vibethinker_jax.models.config import Qwen2Config
from vibethinker_jax.objectives.importance import RejectionFilters
from vibethinker_jax.objectives.max_entropy import max_entropy_weight
from vibethinker_jax.objectives.metrics import Metrics
from vibethinker_jax.parallel.multihost import from_first
from vibethinker_jax.parallel.rules import Placement
from vibethinker_jax.rewards.pool import VerifierPool
from vibethinker_jax.rollout.engine import RolloutEngine
from vibethinker_jax.stages.rollouts import collect_groups
from vibethinker_jax.stages.start import Start, micro_batch_rows, optimizer_config, packed_forward, prepare
from vibethinker_jax.training.loop import train_loop
from vibethinker_jax.training.mgpo_batch import (
    AdvantageConfig,
    PackingConfig,
    advantages_of,
    micro_batches,
    padding_batch,
)
from vibethinker_jax.training.mgpo_step import MgpoStep
from vibethinker_jax.training.optimizer import make_optimizer
from vibethinker_jax.training.step import TrainState, row_share
from vibethinker_jax.training.trajectories import Group, groups_from_json, groups_to_json, read_groups, write_groups
from vibethinker_jax.training.workdir import ROLLOUTS_DIRECTORY, digest, run_fingerprint


def run_mgpo(config: ConfigDict, workdir: epath.PathLike) -> epath.Path:
    """Trains, from scratch or from where an interrupted run stopped; returns the work directory.

    Raises:
        UserError: bad configuration or data; names the field or the line.
    """
    start = prepare(config, workdir)
    problems, longest_prompt = load_prompts(config, start)
    optimizer, schedule = make_optimizer(
        optimizer_config(config), start.model, config.steps * config.mgpo.updates_per_batch
    )
    step = make_step(config, start.model, start.placement, optimizer)
    advantage_config = AdvantageConfig(
        config.mgpo.gamma, config.mgpo.mask_truncated, config.mgpo.long2short, config.mgpo.normalise_by
    )
    packing = PackingConfig(
        config.sequence_length,
        micro_batch_rows(config, start.placement),
        config.max_segments,
        share=row_share(start.placement),
    )
    if config.mgpo.only_with_signal and config.mgpo.aggregation != "sequence_mean":
        raise UserError(
            f"config.mgpo.only_with_signal goes with aggregation 'sequence_mean' only (it is "
            f"{config.mgpo.aggregation!r}): token_mean counts the tokens that it would leave out"
        )
    if not 1 <= config.mgpo.updates_per_batch <= config.prompts_per_step:
        raise UserError(
            f"config.mgpo.updates_per_batch is {config.mgpo.updates_per_batch}; use 1 to prompts_per_step = "
            f"{config.prompts_per_step}"
        )
    max_entropy_weight(np.array([0.5]), config.mgpo.gamma)  # what is wrong shall not wait for the first rollouts
    step.check(padding_batch(packing))
    data = digest(json.dumps(problem.to_dict(), sort_keys=True) for problem in problems)
    engine: RolloutEngine | None = None

    def rollouts(state: TrainState, done: int) -> list[Group]:
        nonlocal engine
        path = start.workdir / ROLLOUTS_DIRECTORY / f"step_{done + 1:06d}.jsonl"
        fingerprint = run_fingerprint(config, done, data)
        stored = from_first(lambda: groups_to_json(read_groups(path, fingerprint) or []))
        if stored:
            return groups_from_json(stored)
        policy = start.policy(state.params, config.model.compute_dtype)
        if engine is None:
            length = longest_prompt + config.rollout.max_new_tokens
            engine = RolloutEngine(policy, max_slots=config.rollout.max_slots, max_length=length)
        else:
            engine.resume(policy)
        groups = collect_groups(
            engine,
            pool,
            prompts_of_step(problems, done, config.prompts_per_step, config.seed),
            samples=config.rollout.samples,
            temperature=config.rollout.temperature,
            max_new_tokens=config.rollout.max_new_tokens,
            seed=config.seed,
            step=done,
        )
        engine.release_memory()  # training and rollouts share the chips
        if jax.process_index() == 0:
            write_groups(path, fingerprint, groups)
        return groups

    def one_step(state: TrainState, done: int) -> tuple[TrainState, Mapping[str, Any]]:
        began = time.monotonic()
        groups = rollouts(state, done)
        sampled = time.monotonic()
        advantages = advantages_of(groups, advantage_config)
        if not advantages.num_kept:
            errors = {sample.error for group in groups for sample in group.samples}
            raise RuntimeError(
                f"step {done + 1}: no group has two verdicts; the verifier says {sorted(map(str, errors))}"
            )
        updates = micro_batches(
            groups, advantages, packing, config.mgpo.updates_per_batch, only_with_signal=config.mgpo.only_with_signal
        )
        if len(updates) > 1:  # later updates need the log-probabilities of the weights that sampled
            updates = [[with_old_log_probs(step, state, batch) for batch in batches] for batches in updates]
        metrics = Metrics()
        for batches in updates:
            state, new = step(state, batches)
            metrics = metrics.add(jax.device_get(new))
        return state, {
            **metrics.summary(),
            **advantages.metrics.summary(),
            **response_statistics(groups),
            "learning_rate": schedule(done * config.mgpo.updates_per_batch),
            "seconds_rollout": sampled - began,
            "seconds_update": time.monotonic() - sampled,
        }

    with VerifierPool(workers=config.verifier.workers, timeout_s=config.verifier.timeout_s) as pool:
        train_loop(
            workdir=start.workdir,
            step=step,
            initial_params=start.initial_params,
            begin=lambda done: None,
            one_step=one_step,
            position=lambda done: {"prompts": done * config.prompts_per_step, "data": data},
            total_steps=config.steps,
            save_every=config.loop.save_every,
            keep=config.loop.keep,
            shown=("reward", "groups/without_signal", "tokens", "mismatch/k3"),
            description="mgpo",
        )
    return start.workdir


def make_step(
    config: ConfigDict, model: Qwen2Config, placement: Placement, optimizer: optax.GradientTransformation
) -> MgpoStep:
    """The compiled update of a configuration."""
    return MgpoStep(
        packed_forward(config, model, placement),
        optimizer,
        temperature=config.rollout.temperature,
        clip_low=config.mgpo.clip_low,
        clip_high=config.mgpo.clip_high,
        tis_cap=config.mgpo.tis_cap or None,
        aggregation=config.mgpo.aggregation,
        filters=RejectionFilters(
            token_band=tuple(config.mgpo.token_band) or None,
            geometric_band=tuple(config.mgpo.geometric_band) or None,
            k3_limit=config.mgpo.k3_limit or None,
            veto=config.mgpo.veto or None,
        ),
        offload=config.optimizer.offload,
    )


def load_prompts(config: ConfigDict, start: Start) -> tuple[list[Problem], int]:
    """The problems whose prompt leaves room for the longest response, and the tokens of the longest such prompt."""
    problems = load_problems(config.data.path)
    if config.verifier.require_thinking:
        problems = [_requiring_thinking(problem) for problem in problems]
    room = config.sequence_length - config.rollout.max_new_tokens
    lengths = [len(start.tokenizer.encode_chat(problem.prompt)) for problem in problems]
    kept = [problem for problem, length in zip(problems, lengths, strict=True) if length <= room]
    if len(kept) < len(problems) and jax.process_index() == 0:
        print(f"{config.data.path}: left out {len(problems) - len(kept)} prompts of more than {room} tokens")
    if len(kept) < config.prompts_per_step:
        raise UserError(
            f"{config.data.path}: {len(kept)} problems have prompts of at most {room} tokens (sequence_length less "
            f"rollout.max_new_tokens), but config.prompts_per_step is {config.prompts_per_step}"
        )
    return kept, max(length for length in lengths if length <= room)


def _requiring_thinking(problem: Problem) -> Problem:
    verifier = {**problem.verifier, "require_thinking": True}
    return Problem(problem.id, problem.domain, problem.prompt, verifier, problem.meta)


def prompts_of_step(problems: Sequence[Problem], step: int, count: int, seed: int) -> list[Problem]:
    """The prompts of a step (0-based), each once.

    Every epoch goes through the problems in an order of its own; the few left over at its end wait for a later one,
    so that no step holds a problem twice. The order depends on the seed alone: a resumed run skips and repeats nothing.
    """
    epoch, place = divmod(step, len(problems) // count)
    order = np.random.default_rng([seed, epoch]).permutation(len(problems))
    return [problems[i] for i in order[place * count : (place + 1) * count]]


def with_old_log_probs(step: MgpoStep, state: TrainState, batch: Batch) -> Batch:
    """The batch with the log-probabilities of its targets under the weights that sampled them."""
    old = step.log_probs(state.params, batch)
    first = len(batch["tokens"]) * row_share(step.placement)[0]
    return {**batch, "old_log_probs": old[first : first + len(batch["tokens"])]}


def response_statistics(groups: Sequence[Group]) -> dict[str, float]:
    """Reward, length (tokens) and truncation of a step's responses; samples without verdict have no reward."""
    samples = [sample for group in groups for sample in group.samples]
    lengths = np.array([len(sample.tokens) for sample in samples])
    rewards = [sample.reward for sample in samples if sample.has_verdict]
    return {
        "reward": float(np.mean(rewards)) if rewards else float("nan"),
        "tokens": float(lengths.mean()),
        "tokens_p99": float(np.percentile(lengths, 99)),
        "truncated": float(np.mean([sample.truncated for sample in samples])),
    }
