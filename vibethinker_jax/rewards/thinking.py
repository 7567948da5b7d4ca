"""The one rule for which part of a response may hold the answer."""

OPEN, CLOSE = "<think>", "</think>"


def answer_text(response: str, require_thinking: bool = False) -> str | None:
    """The part of a response in which an answer counts.

    - With `<think>` or `</think>` anywhere: the text after the last `</think>`.
    - Thinking that was opened and not closed (a truncated response, or one that starts to think again): None.
    - With neither tag: the whole response, or None if `require_thinking`.

    Args:
        response: the decoded response. A prompt may end in `<think>`, so a response may have only the closing tag.
        require_thinking: whether a response without thinking is wrong.

    Returns:
        The text, possibly empty; None if nothing in the response counts as an answer.
    """
    _, closed, after = response.rpartition(CLOSE)
    if OPEN in after:
        return None
    if not closed and require_thinking:
        return None
    return after
