"""Rollouts with their verdicts: the unit of RL bookkeeping, stored before the update that uses them."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from etils import epath

from vibethinker_jax.errors import UserError


@dataclass(frozen=True)
class Sample:
    """One response.

    Attributes:
        tokens: response tokens, the stop token included.
        log_probs: the sampler's log-probability of each, at the sampling temperature.
        text: decoded response.
        finish_reason: "stop", or "length" when it was cut off.
        reward: the verifier's; NaN without a verdict.
        correct: the verifier's; None where correctness is undefined or there is no verdict.
        error: why there is no verdict, else None.
    """

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    text: str
    finish_reason: str
    reward: float
    correct: bool | None
    error: str | None

    @property
    def has_verdict(self) -> bool:
        """False when the machinery failed: the sample then counts nowhere."""
        return self.error is None

    @property
    def truncated(self) -> bool:
        """Whether the response was cut off."""
        return self.finish_reason == "length"


@dataclass(frozen=True)
class Group:
    """All samples of one prompt in one step.

    Attributes:
        problem_id: id of the problem; groups are keyed by it, never by the prompt's text.
        prompt_tokens: what the samples continue.
        samples: in sample order.
    """

    problem_id: str
    prompt_tokens: tuple[int, ...]
    samples: tuple[Sample, ...]


def write_groups(path: epath.Path, fingerprint: str, groups: Sequence[Group]) -> None:
    """Commits a step's groups as JSON lines: all of them or, when killed, none.

    Args:
        path: file to write.
        fingerprint: what the rollouts depend on; checked by `read_groups`.
        groups: in prompt order.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"fingerprint": fingerprint, "groups": len(groups)})]
    lines.extend(json.dumps(record, ensure_ascii=False) for record in groups_to_json(groups))
    aside = path.parent / f"{path.name}.tmp"
    aside.write_text("\n".join(lines) + "\n")
    aside.replace(path)


def read_groups(path: epath.Path, fingerprint: str) -> list[Group] | None:
    """The groups of a step that an interrupted run has committed; None if it has not.

    Raises:
        UserError: the file belongs to rollouts of other settings.
    """
    if not path.exists():
        return None
    # Not splitlines: it also splits at U+2028 and its like, which a response may hold.
    header, *records = path.read_text().removesuffix("\n").split("\n")
    head = json.loads(header)
    if head["fingerprint"] != fingerprint or head["groups"] != len(records):
        raise UserError(f"{path}: these rollouts come from other settings; remove the file or the workdir")
    return groups_from_json([json.loads(record) for record in records])


def groups_to_json(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Groups as JSON values; what is not finite becomes null."""
    records = [asdict(group) for group in groups]
    for record in records:
        for sample in record["samples"]:
            sample["reward"] = None if math.isnan(sample["reward"]) else sample["reward"]
            sample["log_probs"] = [value if math.isfinite(value) else None for value in sample["log_probs"]]
    return records


def groups_from_json(records: Sequence[dict[str, Any]]) -> list[Group]:
    """The inverse of `groups_to_json`; null becomes NaN."""
    return [_group(record) for record in records]


def _group(record: dict[str, Any]) -> Group:
    def sample(fields: dict[str, Any]) -> Sample:
        fields = dict(fields)
        fields["tokens"] = tuple(fields["tokens"])
        fields["log_probs"] = tuple(math.nan if value is None else value for value in fields["log_probs"])
        fields["reward"] = math.nan if fields["reward"] is None else fields["reward"]
        return Sample(**fields)

    samples = tuple(sample(fields) for fields in record["samples"])
    return Group(record["problem_id"], tuple(record["prompt_tokens"]), samples)
