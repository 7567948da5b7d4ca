"""What a verifier is, what it returns, and the table of verifier kinds.

A verifier looks at one response in three steps, cheapest first:

1. `check`   once per submission: is the problem's `verifier` entry usable at all? (UserError if not)
2. `decide`  pure string work in linear time, safe in any process: settles the easy cases, None for the others
3. `judge`   everything else; runs only in a killable worker process (`rewards/worker.py`)
"""

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from vibethinker_jax.errors import UserError


@dataclass(frozen=True)
class Verdict:
    """The outcome of verifying one response.

    Attributes:
        reward: training reward, 1.0 right and 0.0 wrong for binary verifiers; NaN when the machinery failed.
        correct: right or wrong; None when undefined (graded rewards) or when the machinery failed.
        answer: what was extracted from the response, None when nothing was.
        detail: one line for a human: why this verdict.
        error: None, or what broke in the machinery. Such a sample belongs in no numerator and no denominator.
    """

    reward: float
    correct: bool | None
    answer: str | None
    detail: str
    error: str | None = None

    @classmethod
    def binary(cls, correct: bool, answer: str | None, detail: str) -> Self:
        """A right or wrong verdict."""
        return cls(reward=float(correct), correct=correct, answer=answer, detail=detail)

    @classmethod
    def failed(cls, error: str) -> Self:
        """The machinery failed: no statement about the response."""
        return cls(reward=math.nan, correct=None, answer=None, detail="no verdict", error=error)

    def to_dict(self) -> dict[str, Any]:
        """Plain types for strict JSON, which has no NaN: a missing reward is None."""
        return asdict(self) | {"reward": None if math.isnan(self.reward) else self.reward}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`. Raises KeyError or TypeError for anything else."""
        reward = math.nan if record["reward"] is None else float(record["reward"])
        return cls(reward, record["correct"], record["answer"], record["detail"], record["error"])


class Verifier:
    """Base of all verifier kinds; the module docstring explains the order of the calls."""

    def check(self, spec: Mapping[str, Any], where: str) -> None:
        """UserError if `spec`, the problem's `verifier` entry, cannot give a verdict. `where` names the problem."""
        raise NotImplementedError

    def decide(self, spec: Mapping[str, Any], response: str) -> Verdict | None:
        """The verdict if plain string work settles it, else None. Never parses, evaluates or runs the response."""
        return None

    def warm_up(self) -> None:
        """Imports what `judge` needs. Called once per worker, outside the limits of any response."""

    def judge(self, spec: Mapping[str, Any], response: str) -> Verdict:
        """The verdict. May hang, exhaust memory or crash: the worker's limits deal with it."""
        raise NotImplementedError


# Built-in kinds are imported when first used, so that one kind's dependencies are no other's.
_MODULES = {
    "choice": "vibethinker_jax.rewards.choice",
    "instructions": "vibethinker_jax.rewards.instructions",
    "math": "vibethinker_jax.rewards.math",
}
_VERIFIERS: dict[str, Verifier] = {}


def register(kind: str) -> Callable[[type[Verifier]], type[Verifier]]:
    """Class decorator: makes a Verifier the one for `kind`. Its module must be importable by worker processes."""

    def add(cls: type[Verifier]) -> type[Verifier]:
        known = _VERIFIERS.get(kind)
        if known is not None and type(known).__module__ != cls.__module__:
            raise ValueError(f"verifier kind {kind!r} is already registered by {type(known).__module__}")
        _VERIFIERS[kind] = cls()
        return cls

    return add


def get_verifier(kind: Any, where: str) -> Verifier:
    """The verifier of a kind; UserError naming `where` for an unknown one."""
    if isinstance(kind, str) and kind not in _VERIFIERS and kind in _MODULES:
        importlib.import_module(_MODULES[kind])
    if not isinstance(kind, str) or kind not in _VERIFIERS:
        known = ", ".join(sorted(_MODULES.keys() | _VERIFIERS.keys()))
        raise UserError(f"{where}: verifier.kind is {kind!r}; use one of: {known}")
    return _VERIFIERS[kind]


def checked(problem: Any, response: Any) -> tuple[Verifier, dict[str, Any]]:
    """The verifier and the verifier entry of a problem, both checked.

    Args:
        problem: a `Problem`, or a record as a mapping with at least `verifier`.
        response: only its type is checked.

    Raises:
        UserError: the problem has no usable verifier, or the response is no string.
    """
    is_record = isinstance(problem, Mapping)
    identity = problem.get("id") if is_record else getattr(problem, "id", None)
    where = "problem" if identity is None else f"problem {identity}"
    spec = problem.get("verifier") if is_record else getattr(problem, "verifier", None)
    if not isinstance(spec, Mapping):
        raise UserError(f'{where}: verifier is {spec!r}; give a mapping such as {{"kind": "math", "answer": "72"}}')
    if not isinstance(response, str):
        raise UserError(f"{where}: response is a {type(response).__name__}; give the response text as a string")
    if not isinstance(spec.get("require_thinking", False), bool):
        raise UserError(f"{where}: verifier.require_thinking is {spec['require_thinking']!r}; use true or false")
    verifier = get_verifier(spec.get("kind"), where)
    verifier.check(spec, where)
    return verifier, dict(spec)


def refuse_unknown_keys(spec: Mapping[str, Any], known: set[str], where: str) -> None:
    """UserError naming the keys of a verifier entry that its kind does not read: most are typing errors."""
    unknown = sorted(map(str, spec.keys() - known - {"kind", "require_thinking"}))
    if unknown:
        raise UserError(
            f"{where}: verifier has unknown key {', '.join(unknown)}; kind {spec['kind']!r} reads "
            f"{', '.join(sorted(known))} and require_thinking"
        )
