"""Packed batches of random responses, the loss on them, and GRPO written down a second time as its oracle."""

import math
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
import pytest

from vibethinker_jax.objectives import group_advantages, mgpo_loss

torch = pytest.importorskip("torch", reason="the oracle; it is in the test extra on Python 3.11")


@partial(jax.jit, static_argnames=("clip_low", "clip_high", "tis_cap", "aggregation", "filters"))
def loss_and_grad(log_probs, *rest, **options):
    """(MgpoLoss, d loss_sum / d log_probs)."""

    def loss(log_probs):
        output = mgpo_loss(log_probs, *rest, **options)
        return output.loss_sum, output

    (_, output), grad = jax.value_and_grad(loss, has_aux=True)(log_probs)
    return output, grad


@dataclass
class Packed:
    """A packed batch of responses, four float rows and the rest of what the loss takes."""

    log_probs: np.ndarray
    old: np.ndarray
    rollout: np.ndarray
    response: np.ndarray
    ids: np.ndarray
    advantages: np.ndarray
    weights: np.ndarray

    def arguments(self) -> tuple[np.ndarray, ...]:
        return tuple(vars(self).values())

    def rows(self, which: slice) -> "Packed":
        return Packed(*(x[which] for x in self.arguments()))


def packed_groups(seed=0, groups=3, samples=4, gamma=0.0, rewards=None):
    """(packed rows with rubbish outside the responses, the same as a list of groups of unpacked samples)."""
    rng = np.random.default_rng(seed)
    if rewards is None:
        rewards = (rng.random((groups, samples)) < 0.5).astype(float)
        rewards[0, :2] = 0, 1
    result = group_advantages(rewards, rewards == 1, np.ones(rewards.shape, bool), gamma=gamma)
    columns, rows, segments = 40, 4, 4
    packed = Packed(
        *rng.normal(size=(3, rows, columns)).astype(np.float32),
        np.zeros((rows, columns), np.float32),
        np.zeros((rows, columns), np.int32),
        *np.zeros((2, rows, segments), np.float32),
    )
    used, count, unpacked = [0] * rows, [0] * rows, []
    for group in range(groups):
        unpacked.append([])
        for sample in range(samples):
            row = (group * samples + sample) % rows
            start = used[row] + int(rng.integers(1, 4))  # a prompt of one to three tokens
            length = int(rng.integers(1, 9))
            span = slice(start, start + length)
            old = -rng.random(length)
            packed.log_probs[row, span] = old + 0.3 * rng.normal(size=length)
            packed.old[row, span] = old
            packed.rollout[row, span] = old + 0.5 * rng.normal(size=length)
            packed.response[row, span] = 1
            packed.ids[row, used[row] : start + length] = count[row] + 1
            packed.advantages[row, count[row]] = result.advantages[group, sample]
            packed.weights[row, count[row]] = result.sample_weights[group, sample]
            unpacked[-1].append((row, span, rewards[group, sample]))
            used[row], count[row] = start + length, count[row] + 1
    return packed, unpacked


def textbook_grpo(packed, unpacked, *, clip=0.2, cap=2.0, token_mean=False):
    """GRPO as its formula reads, response by response in float64: (mean loss, gradient on the packed rows)."""
    theta = torch.tensor(packed.log_probs, dtype=torch.float64, requires_grad=True)
    old, rollout = (torch.tensor(x, dtype=torch.float64) for x in (packed.old, packed.rollout))
    objective, tokens = 0.0, 0
    for group in unpacked:
        rewards = torch.tensor([reward for *_, reward in group], dtype=torch.float64)
        deviation = rewards.std(correction=0)
        for row, span, reward in group:
            advantage = (reward - rewards.mean()) / (deviation + 1e-6)
            total = 0.0
            for t in range(span.start, span.stop):
                rho = torch.exp(theta[row, t] - old[row, t])
                ratio = min(math.exp(old[row, t] - rollout[row, t]), cap)
                total += ratio * torch.min(rho * advantage, torch.clamp(rho, 1 - clip, 1 + clip) * advantage)
            length = span.stop - span.start
            objective += total if token_mean else total / length / len(group)
            tokens += length
    loss = -objective / (tokens if token_mean else len(unpacked))
    loss.backward()
    return loss.item(), theta.grad.numpy()
