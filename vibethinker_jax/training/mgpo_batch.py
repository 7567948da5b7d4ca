"""From the groups of one RL step to the packed micro-batches of its updates. Host code, the same on every process."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vibethinker_jax.data.chat import EncodedExample
from vibethinker_jax.data.loader import PADDING_ROW, Batch, pack_rows
from vibethinker_jax.data.row_plan import plan_rows
from vibethinker_jax.errors import UserError
from vibethinker_jax.objectives.advantage import GroupAdvantages, NormaliseBy, group_advantages
from vibethinker_jax.objectives.long2short import long2short_advantages
from vibethinker_jax.training.trajectories import Group


@dataclass(frozen=True)
class AdvantageConfig:
    """How verdicts become advantages.

    Attributes:
        gamma: sharpness of MGPO's prompt weight; 0 is GRPO.
        mask_truncated: truncated responses count in the group as incorrect and are not trained on.
        long2short: lambda of the length shift; 0 is plain MGPO.
        normalise_by: what divides the rewards (objectives/advantage.py and long2short.py).
    """

    gamma: float
    mask_truncated: bool
    long2short: float
    normalise_by: NormaliseBy


@dataclass(frozen=True)
class PackingConfig:
    """Shape of the packed micro-batches.

    Attributes:
        sequence_length: tokens per row; at least the longest prompt with its response.
        micro_batch_rows: rows of one forward and backward pass, over all devices.
        max_segments: most responses per row.
        share: (index, count): which equal share of a micro-batch's rows this process holds (training/step.py).
    """

    sequence_length: int
    micro_batch_rows: int
    max_segments: int
    share: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        if self.micro_batch_rows < 1 or self.micro_batch_rows % self.share[1]:
            raise UserError(
                f"micro_batch_rows is {self.micro_batch_rows}; make it a positive multiple of the "
                f"{self.share[1]} shares that processes hold"
            )


def advantages_of(groups: Sequence[Group], config: AdvantageConfig) -> GroupAdvantages:
    """MGPO's advantages of all samples of a step, [groups, samples].

    Raises:
        UserError: groups of different sizes.
    """
    sizes = {len(group.samples) for group in groups}
    if len(sizes) != 1:
        raise UserError(f"rollouts: groups hold {sorted(sizes)} samples; every prompt needs the same number")
    samples = [group.samples for group in groups]
    rewards = np.array([[sample.reward for sample in row] for row in samples])
    correct = np.array(
        [[np.nan if sample.correct is None else float(sample.correct) for sample in row] for row in samples]
    )
    valid = np.array([[sample.has_verdict for sample in row] for row in samples])
    truncated = np.array([[sample.truncated for sample in row] for row in samples])
    if not config.long2short:
        return group_advantages(
            rewards,
            correct,
            valid,
            gamma=config.gamma,
            truncated=truncated,
            mask_truncated=config.mask_truncated,
            normalise_by=config.normalise_by,
        )
    return long2short_advantages(
        rewards,
        correct,
        valid,
        np.array([[len(sample.tokens) for sample in row] for row in samples]),
        gamma=config.gamma,
        lam=config.long2short,
        normalise_by=config.normalise_by,
        truncated=truncated,
        mask_truncated=config.mask_truncated,
    )


def micro_batches(
    groups: Sequence[Group],
    advantages: GroupAdvantages,
    config: PackingConfig,
    updates: int,
    *,
    only_with_signal: bool = False,
) -> list[list[Batch]]:
    """Packs the responses of a step, for each of its updates, into equally shaped micro-batches.

    Groups are dealt to the updates in turn. Responses without a verdict and those of dropped groups are left out;
    every other one is packed, so that the mismatch metrics see it, even where its advantage is zero. The last
    micro-batch of an update is filled with rows of padding.

    Args:
        groups: of one step.
        advantages: of `advantages_of(groups)`.
        config: shape of the micro-batches.
        updates: optimizer steps to split the groups over.
        only_with_signal: leave out groups whose advantages are all zero. With sequence_mean, loss and gradient are the
            same for less work, but the mismatch and policy metrics then see only the other groups.

    Returns:
        Per update, the micro-batches that training/mgpo_step.py takes: this process's rows.

    Raises:
        UserError: a response is longer than a row, or there are fewer groups than updates.
    """
    if updates > len(groups):
        raise UserError(f"updates_per_batch is {updates}, but a step has only {len(groups)} groups; lower it")
    packed = advantages.kept & (advantages.advantages.any(axis=1) | (not only_with_signal))
    return [
        _pack_update(
            [
                (groups[g], s, advantages.advantages[g, s], advantages.sample_weights[g, s])
                for g in range(update, len(groups), updates)
                for s in range(len(groups[g].samples))
                if packed[g] and groups[g].samples[s].has_verdict
            ],
            int(advantages.kept[update::updates].sum()),
            config,
        )
        for update in range(updates)
    ]


def padding_batch(config: PackingConfig) -> Batch:
    """A micro-batch without any response, of the shape that all have."""
    return _pack_update([], 0, config)[0]


def _pack_update(
    members: Sequence[tuple[Group, int, float, float]], num_groups: int, config: PackingConfig
) -> list[Batch]:
    examples = [_document(group, sample, advantage, weight) for group, sample, advantage, weight in members]
    lengths = [len(example.tokens) for example in examples]
    plan = plan_rows(np.array(lengths, np.int64), config.sequence_length, max_segments=config.max_segments)
    if len(plan.dropped):
        group, sample, *_ = members[int(plan.dropped[0])]
        raise UserError(
            f"rollouts: problem {group.problem_id} sample {sample} has {lengths[int(plan.dropped[0])]} tokens with its "
            f"prompt, but sequence_length is {config.sequence_length}; raise it"
        )
    index, count = config.share
    local = config.micro_batch_rows // count
    batches = []
    for start in range(0, max(plan.num_rows, 1), config.micro_batch_rows):
        first = start + index * local
        rows = [row if row < plan.num_rows else PADDING_ROW for row in range(first, first + local)]
        batch = pack_rows(examples or [_PADDING_DOCUMENT], plan, rows, config.sequence_length, config.max_segments)
        # The sum over micro-batches is exact when one of them carries it all.
        batch["num_groups"] = np.float32(num_groups if start == 0 else 0)
        batches.append(batch)
    return batches


def _document(group: Group, index: int, advantage: float, weight: float) -> EncodedExample:
    sample, prompt = group.samples[index], group.prompt_tokens
    log_probs = np.concatenate([np.zeros(len(prompt), np.float32), np.asarray(sample.log_probs, np.float32)])
    return EncodedExample(
        tokens=np.array([*prompt, *sample.tokens], np.int32),
        prompt_length=len(prompt),
        token_extras={"rollout_log_probs": log_probs},
        segment_extras={"advantages": float(advantage), "sequence_weights": float(weight)},
    )


# Names the extras of a batch in which no response is left.
_PADDING_DOCUMENT = EncodedExample(
    tokens=np.zeros(1, np.int32),
    prompt_length=1,
    token_extras={"rollout_log_probs": np.zeros(1, np.float32)},
    segment_extras={"advantages": 0.0, "sequence_weights": 0.0},
)
