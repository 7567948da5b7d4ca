"""What a record may hold: one check per field, one table of fields per verifier kind.

A check takes (value, where, field) and returns nothing or raises a `UserError` that starts with
`FILE:LINE: field is value`. Golds that no response could match are refused here, once, at load.
"""

import math
import string
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from vibethinker_jax.errors import UserError

DOMAINS = ("math", "code", "stem", "instruct", "chat")
ROLES = ("system", "user", "assistant")

Check = Callable[[Any, str, str], None]


def fail(where: str, field: str, value: Any, todo: str) -> NoReturn:
    """Raises the `UserError` for one field; long values are cut to keep the message readable."""
    shown = repr(value)
    raise UserError(f"{where}: {field} is {shown if len(shown) <= 120 else shown[:117] + '...'}; {todo}")


def check_fields(
    record: Any, where: str, field: str, required: Mapping[str, Check], optional: Mapping[str, Check]
) -> None:
    """Checks that `record` is an object with all `required` fields, no unknown ones, and sound values.

    `field` is the dotted path of the record inside its line, "" for the line itself.
    """
    prefix = f"{field}." if field else ""
    if not isinstance(record, Mapping):
        fail(where, field or "the record", record, "write a JSON object")
    for name in record:
        if name not in required and name not in optional:
            known = ", ".join([*required, *optional])
            raise UserError(f"{where}: {prefix}{name} is not a known field; remove it (known: {known})")
    for name in required:
        if name not in record:
            raise UserError(f"{where}: {prefix}{name} is missing; add it")
    for name, check in [*required.items(), *optional.items()]:
        if name in record:
            check(record[name], where, prefix + name)


def check_any_text(value: Any, where: str, field: str) -> None:
    """Text, possibly empty, that can be encoded as UTF-8 (a lone surrogate escape cannot be)."""
    if not isinstance(value, str):
        fail(where, field, value, "write it as text")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            fail(where, field, value[error.start : error.end], "remove the lone surrogate, it is no character")


def check_text(value: Any, where: str, field: str) -> None:
    """Text with at least one character that is not white space."""
    check_any_text(value, where, field)
    if not value.strip():
        fail(where, field, value, "write non-empty text")


def check_object(value: Any, where: str, field: str) -> None:
    if not isinstance(value, Mapping):
        fail(where, field, value, "write a JSON object")


def check_filled_object(value: Any, where: str, field: str) -> None:
    check_object(value, where, field)
    if not value:
        fail(where, field, value, "write an object with at least one field")


def check_flag(value: Any, where: str, field: str) -> None:
    if not isinstance(value, bool):
        fail(where, field, value, "write true or false")


def check_list(value: Any, where: str, field: str) -> None:
    if not isinstance(value, list):
        fail(where, field, value, "write a list")


def check_number(value: Any, where: str, field: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        fail(where, field, value, "write a finite number")


def check_positive(value: Any, where: str, field: str) -> None:
    check_number(value, where, field)
    if value <= 0:
        fail(where, field, value, "write a number above 0")


def check_anything(value: Any, where: str, field: str) -> None:
    """Any JSON value, null included."""


def list_of(check: Check) -> Check:
    """The check of a non-empty list whose items all pass `check`."""

    def check_items(value: Any, where: str, field: str) -> None:
        check_list(value, where, field)
        if not value:
            fail(where, field, value, "list at least one")
        for index, item in enumerate(value):
            check(item, where, f"{field}[{index}]")

    return check_items


def check_domain(value: Any, where: str, field: str) -> None:
    if value not in DOMAINS:
        fail(where, field, value, f"use one of {', '.join(DOMAINS)}")


def check_message(value: Any, where: str, field: str) -> None:
    check_fields(value, where, field, {"role": check_text, "content": check_any_text}, {})
    if value["role"] not in ROLES:
        fail(where, f"{field}.role", value["role"], f"use one of {', '.join(ROLES)}")


def check_prompt(value: Any, where: str, field: str) -> None:
    """Chat messages that end with a non-empty question of the user, so that the model speaks next."""
    list_of(check_message)(value, where, field)
    if value[-1]["role"] != "user":
        fail(where, f"{field}[-1].role", value[-1]["role"], "end the prompt with a user message")
    check_text(value[-1]["content"], where, f"{field}[-1].content")


def _check_math_answer(value: Any, where: str, field: str) -> None:
    """Non-empty LaTeX or plain text whose grouping braces balance (nothing can parse it otherwise)."""
    check_text(value, where, field)
    depth = 0
    for character in value.replace(r"\\", "").replace(r"\{", "").replace(r"\}", ""):
        depth += (character == "{") - (character == "}")
        if depth < 0:
            break
    if depth != 0:
        fail(where, field, value, "balance its braces, the answer cannot be parsed")


def _check_test(value: Any, where: str, field: str) -> None:
    """One test case: text in and text out, or the arguments of a call and the value it returns."""
    check_object(value, where, field)
    if "arguments" in value or "expected" in value:
        check_fields(value, where, field, {"arguments": check_list, "expected": check_anything}, {})
    else:
        check_fields(value, where, field, {"stdin": check_any_text, "stdout": check_any_text}, {})


def _check_code(verifier: Mapping[str, Any], where: str) -> None:
    calls = ["arguments" in test for test in verifier["tests"]]
    if any(calls) and not all(calls):
        index = calls.index(not calls[0])
        fail(where, f"verifier.tests[{index}]", verifier["tests"][index], "use one form of test in a problem")
    if any(calls) and "entry_point" not in verifier:
        raise UserError(f"{where}: verifier.entry_point is missing; name the function that the tests call")
    if not any(calls) and "entry_point" in verifier:
        fail(where, "verifier.entry_point", verifier["entry_point"], "remove it, stdin tests call no function")


def _check_choice(verifier: Mapping[str, Any], where: str) -> None:
    options, answer = verifier["options"], verifier["answer"]
    letters = string.ascii_uppercase[: len(options)]
    if not 2 <= len(options) <= 26:
        fail(where, "verifier.options", options, "list 2 to 26 options")
    if len({option.strip() for option in options}) < len(options):
        fail(where, "verifier.options", options, "make the options distinct")
    if answer not in tuple(letters):
        fail(where, "verifier.answer", answer, f"write the letter of an option, one of {', '.join(letters)}")


def one_of(*permitted: str) -> Check:
    """The check of a value that is one of a few texts."""

    def check_permitted(value: Any, where: str, field: str) -> None:
        if value not in permitted:
            fail(where, field, value, f"use one of {', '.join(permitted)}")

    return check_permitted


def _check_instructions(verifier: Mapping[str, Any], where: str) -> None:
    ids, kwargs = verifier["instruction_ids"], verifier["kwargs"]
    if len(ids) != len(kwargs):
        fail(where, "verifier.kwargs", kwargs, f"list one object for each of the {len(ids)} instruction_ids")
    from vibethinker_jax.data.instruction_kwargs import check_instructions  # it builds on the checks of this file

    check_instructions(ids, kwargs, where)


def _check_criterion(value: Any, where: str, field: str) -> None:
    check_fields(value, where, field, {"criterion": check_text, "points": check_number}, {})


def _check_rubric(verifier: Mapping[str, Any], where: str) -> None:
    if all(criterion["points"] <= 0 for criterion in verifier["criteria"]):
        fail(where, "verifier.criteria", verifier["criteria"], "give at least one criterion points above 0")


def _no_more(verifier: Mapping[str, Any], where: str) -> None:
    """The fields of this kind do not depend on each other."""


# kind -> (required fields, optional fields, the check of the fields together)
_VERIFIERS: dict[str, tuple[dict[str, Check], dict[str, Check], Callable[[Mapping[str, Any], str], None]]] = {
    "math": ({"answer": _check_math_answer}, {}, _no_more),
    "code": (
        {
            "tests": list_of(_check_test),
            "language": check_text,
            "time_limit_s": check_positive,
            "memory_mb": check_positive,
        },
        {"entry_point": check_text},
        _check_code,
    ),
    "choice": ({"options": list_of(check_text), "answer": check_text}, {}, _check_choice),
    "instructions": (
        {"instruction_ids": list_of(check_text), "kwargs": list_of(check_object)},
        {"scoring": one_of("strict", "loose"), "checkers": one_of("fixed", "official")},
        _check_instructions,
    ),
    "rubric": ({"criteria": list_of(_check_criterion)}, {}, _check_rubric),
    "procedural": ({"dataset": check_text, "entry": check_filled_object}, {}, _no_more),
}
VERIFIER_KINDS = tuple(_VERIFIERS)


def check_verifier(value: Any, where: str, field: str) -> None:
    """One verifier of any kind; every kind also takes `require_thinking`."""
    check_object(value, where, field)
    if "kind" not in value:
        raise UserError(f"{where}: {field}.kind is missing; add one of {', '.join(VERIFIER_KINDS)}")
    kind = value["kind"]
    if not isinstance(kind, str) or kind not in _VERIFIERS:
        fail(where, f"{field}.kind", kind, f"use one of {', '.join(VERIFIER_KINDS)}")
    required, optional, check_together = _VERIFIERS[kind]
    check_fields(value, where, field, {"kind": check_text, **required}, {"require_thinking": check_flag, **optional})
    check_together(value, where)
