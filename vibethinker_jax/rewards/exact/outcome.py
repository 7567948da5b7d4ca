"""Three-valued answers: True, False, and None for what is still open."""

from collections.abc import Iterable

Outcome = bool | None


def any_of(outcomes: Iterable[Outcome]) -> Outcome:
    """True if one is, else None if one is open, else False."""
    result: Outcome = False
    for outcome in outcomes:
        if outcome:
            return True
        result = None if outcome is None else result
    return result


def all_of(outcomes: Iterable[Outcome]) -> Outcome:
    """False if one is, else None if one is open, else True."""
    result: Outcome = True
    for outcome in outcomes:
        if outcome is False:
            return False
        result = None if outcome is None else result
    return result
