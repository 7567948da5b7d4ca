"""Multiple choice: options in an order that follows from a seed, so that no letter is a better guess than another.

Published files list the gold option first (GPQA's copy in the VibeThinker repository has gold A in all rows). The order
depends on the *set* of options, not on how a file lists them: rendering a rendered problem again is harmless.
"""

import dataclasses
import re
import string
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vibethinker_jax.errors import UserError
from vibethinker_jax.seeds import stable_seed

if TYPE_CHECKING:
    from vibethinker_jax.data.records import Problem

# "All of the above" means what it says only at the end of the list; "both A and B" only where A and B stay.
_LAST = re.compile(r"(?:all|any|both|either|neither|none) of (?:the )?(?:above|these|others?|options|choices)\b", re.I)
_NAMES_LETTERS = re.compile(
    r"(?i:both |either |neither |only |options? )*\(?[A-Z]\)?(?:(?:,| and| or| &| nor)+ \(?[A-Z]\)?)+(?: only)?\.?"
)
_LABELLED_LINES = re.compile(r"^\W{0,3}A\W{0,3}[.):].*\n(?:.*\n)*?\W{0,3}B\W{0,3}[.):]", re.MULTILINE)


def render(problem: "Problem", sample: int = 0, seed: int = 0) -> "Problem":
    """The problem as one sample of it is posed: options permuted, gold letter moved with them, prompt rewritten.

    The order follows from (seed, problem id, sample, texts of the options) by a hash: the same on every platform, in
    every Python, for every arrangement in the file. Options such as "none of the above" stay last; options that name
    letters ("both A and B") keep all in their place.

    Args:
        problem: any problem. One without options is returned unchanged, and so is an `Example`, whose response
            already names a letter. `load_problems` gives multiple-choice rows of public files as sample 0, seed 0.
        sample: index of the sample. Evaluation poses each of its samples in another order.
        seed: of the run.

    Raises:
        UserError: the prompt lists options, but not those of the verifier.
    """
    if problem.verifier.get("kind") != "choice" or hasattr(problem, "response"):
        return problem
    record = permute(problem.to_dict(), sample, seed, where=f"problem {problem.id}")
    prompt = tuple(dict(message) for message in record["prompt"])
    return dataclasses.replace(problem, prompt=prompt, verifier=record["verifier"])


def permute(record: Mapping[str, Any], sample: int, seed: int, where: str) -> dict[str, Any]:
    """`render` for a record with a sound `choice` verifier. `where` starts error messages."""
    verifier, question = record["verifier"], record["prompt"][-1]["content"]
    options = list(verifier["options"])
    gold = options[string.ascii_uppercase.index(verifier["answer"])]
    order = _order(options, record["id"], sample, seed)
    question = _replace_options(question, options, order, where)
    letter = string.ascii_uppercase[order.index(gold)]
    return {
        **record,
        "prompt": [*record["prompt"][:-1], {**record["prompt"][-1], "content": question}],
        "verifier": {**verifier, "options": order, "answer": letter},
    }


def _order(options: Sequence[str], identity: str, sample: int, seed: int) -> list[str]:
    if any(_NAMES_LETTERS.fullmatch(option.strip()) for option in options):
        return list(options)

    def place(option: str) -> tuple[bool, int, str]:
        return bool(_LAST.match(option.strip())), stable_seed("options", seed, identity, sample, option), option

    return sorted(options, key=place)


def _replace_options(question: str, options: Sequence[str], order: Sequence[str], where: str) -> str:
    """The question with the text behind each label exchanged; a question without options gets them appended."""
    slots = [
        rf"(?<!\w)[(\[*]*{letter}[)\].:*]+\s*({re.escape(option.strip())})"
        for letter, option in zip(string.ascii_uppercase, options, strict=False)
    ]
    found = list(re.finditer(r"\W*?\s".join(slots), question))
    if found:
        match = found[-1]  # a question may quote the options; the list stands last
        for index in reversed(range(len(options))):
            start, end = match.span(index + 1)
            question = question[:start] + order[index].strip() + question[end:]
        return question
    if _LABELLED_LINES.search(question):
        raise UserError(
            f"{where}: the prompt lists options that are not verifier.options, {list(options)!r}; "
            "write each on a line of its own as 'A. text', in the same words"
        )
    listed = "\n".join(f"{letter}. {option}" for letter, option in zip(string.ascii_uppercase, order, strict=False))
    return f"{question.rstrip()}\n\n{listed}"
