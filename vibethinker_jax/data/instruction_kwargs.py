"""The instruction types that a record may name, and the arguments of each: IFEval's 25, and those of IFBench we check.

`rewards/instruction_checkers` has a checker for every type of this table.
"""

import re
from collections.abc import Sequence
from typing import Any

from vibethinker_jax.data import schema
from vibethinker_jax.data.schema import Check
from vibethinker_jax.errors import UserError

RELATIONS = ("at least", "less than")


def _check_count(value: Any, where: str, field: str) -> None:
    """A whole number from 0; files also write 4.0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 0:
        schema.fail(where, field, value, "write a whole number from 0")


def _check_position(value: Any, where: str, field: str) -> None:
    _check_count(value, where, field)
    if value < 1:
        schema.fail(where, field, value, "positions count from 1")


def _check_percentage(value: Any, where: str, field: str) -> None:
    schema.check_number(value, where, field)
    if not 0 <= value <= 100:
        schema.fail(where, field, value, "write a number from 0 to 100")


def _check_relation(value: Any, where: str, field: str) -> None:
    if value not in RELATIONS:
        schema.fail(where, field, value, f"use one of {', '.join(map(repr, RELATIONS))}")


def _check_character(value: Any, where: str, field: str) -> None:
    schema.check_text(value, where, field)
    if len(value) != 1:
        schema.fail(where, field, value, "write one character")


def _check_language(value: Any, where: str, field: str) -> None:
    if not isinstance(value, str) or not re.fullmatch(r"[a-z]{2}(-[a-z]{2})?", value):
        schema.fail(where, field, value, "write a language code such as 'de' or 'zh-cn'")


_texts = schema.list_of(schema.check_text)

INSTRUCTION_KWARGS: dict[str, dict[str, Check]] = {
    # IFEval, google-research/instruction_following_eval
    "change_case:capital_word_frequency": {"capital_frequency": _check_count, "capital_relation": _check_relation},
    "change_case:english_capital": {},
    "change_case:english_lowercase": {},
    "combination:repeat_prompt": {"prompt_to_repeat": schema.check_text},
    "combination:two_responses": {},
    "detectable_content:number_placeholders": {"num_placeholders": _check_count},
    "detectable_content:postscript": {"postscript_marker": schema.check_text},
    "detectable_format:constrained_response": {},
    "detectable_format:json_format": {},
    "detectable_format:multiple_sections": {"num_sections": _check_count, "section_spliter": schema.check_text},
    "detectable_format:number_bullet_lists": {"num_bullets": _check_count},
    "detectable_format:number_highlighted_sections": {"num_highlights": _check_count},
    "detectable_format:title": {},
    "keywords:existence": {"keywords": _texts},
    "keywords:forbidden_words": {"forbidden_words": _texts},
    "keywords:frequency": {"keyword": schema.check_text, "frequency": _check_count, "relation": _check_relation},
    "keywords:letter_frequency": {
        "letter": _check_character,
        "let_frequency": _check_count,
        "let_relation": _check_relation,
    },
    "language:response_language": {"language": _check_language},
    "length_constraints:nth_paragraph_first_word": {
        "num_paragraphs": _check_position,
        "nth_paragraph": _check_position,
        "first_word": schema.check_text,
    },
    "length_constraints:number_paragraphs": {"num_paragraphs": _check_position},
    "length_constraints:number_sentences": {"num_sentences": _check_count, "relation": _check_relation},
    "length_constraints:number_words": {"num_words": _check_count, "relation": _check_relation},
    "punctuation:no_comma": {},
    "startend:end_checker": {"end_phrase": schema.check_text},
    "startend:quotation": {},
    # IFBench, allenai/IFBench
    "count:conjunctions": {"small_n": _check_count},
    "count:keywords_multiple": {f"keyword{index}": schema.check_text for index in range(1, 6)},
    "count:numbers": {"N": _check_count},
    "count:person_names": {"N": _check_count},
    "count:pronouns": {"N": _check_count},
    "count:punctuation": {},
    "count:unique_word_count": {"N": _check_count},
    "count:word_count_range": {"min_words": _check_count, "max_words": _check_count},
    "count:words_japanese": {"N": _check_position},
    "format:emoji": {},
    "format:line_indent": {},
    "format:list": {"sep": schema.check_text},
    "format:newline": {},
    "format:no_bullets_bullets": {},
    "format:options": {"options": schema.check_text},
    "format:parentheses": {},
    "format:quote_unquote": {},
    "format:quotes": {},
    "format:sub-bullets": {},
    "format:thesis": {},
    "ratio:overlap": {"reference_text": schema.check_text, "percentage": _check_percentage},
    "ratio:sentence_words": {},
    "ratio:stop_words": {"percentage": _check_percentage},
    "repeat:repeat_change": {"prompt_to_repeat": schema.check_text},
    "repeat:repeat_simple": {},
    "sentence:keyword": {"word": schema.check_text, "N": _check_position},
    "words:keywords_specific_position": {"keyword": schema.check_text, "n": _check_position, "m": _check_position},
    "words:no_consecutive": {},
    "words:words_position": {"keyword": schema.check_text},
}


def check_instructions(ids: Sequence[Any], kwargs: Sequence[Any], where: str, field: str = "verifier.") -> None:
    """Checks that all instruction types are known, and that each has its arguments and no others.

    Args:
        ids: instruction types.
        kwargs: for each type an object with its arguments; null arguments are not allowed.
        where: what error messages start with.
        field: the prefix of the fields' names in them.

    Raises:
        UserError: naming the type or the argument.
    """
    for index, (identifier, arguments) in enumerate(zip(ids, kwargs, strict=True)):
        if not isinstance(identifier, str) or identifier not in INSTRUCTION_KWARGS:
            raise UserError(
                f"{where}: {field}instruction_ids[{index}] is {identifier!r}, no known instruction type; "
                f"use one of {', '.join(INSTRUCTION_KWARGS)}"
            )
        named = f"{field}kwargs[{index}] (of {identifier})"
        schema.check_fields(arguments, where, named, INSTRUCTION_KWARGS[identifier], {})
        if identifier == "count:word_count_range" and arguments["min_words"] > arguments["max_words"]:
            schema.fail(where, named, dict(arguments), "write min_words of at most max_words")
