"""The table of checkers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vibethinker_jax.rewards.instruction_checkers.resources import Resource

Follows = Callable[[str, Mapping[str, Any], bool], bool]  # (response, arguments, official) -> whether it is followed


@dataclass(frozen=True)
class Checker:
    """How one instruction type is checked.

    Attributes:
        follows: the check. Its response is not blank: a blank one follows no instruction.
        needs: packages and data without which it cannot run.
        needs_official: what the official behaviour needs beyond that.
    """

    follows: Follows
    needs: tuple[Resource, ...] = ()
    needs_official: tuple[Resource, ...] = ()

    def missing(self, official: bool) -> str | None:
        """What is missing for the check, with the remedy; None when it can run."""
        needs = self.needs + (self.needs_official if official else ())
        return next((text for need in needs if (text := need.missing()) is not None), None)


CHECKERS: dict[str, Checker] = {}


def checker(
    identifier: str, *, needs: tuple[Resource, ...] = (), needs_official: tuple[Resource, ...] = ()
) -> Callable[[Follows], Follows]:
    """Decorator: makes a function the check of one instruction type."""

    def add(follows: Follows) -> Follows:
        CHECKERS[identifier] = Checker(follows, needs, needs_official)
        return follows

    return add
