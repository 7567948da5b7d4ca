"""Chat templates: a checkpoint's Jinja template, rendered as transformers' `apply_chat_template` does.

Templates are untrusted code that comes with a checkpoint, so they run in Jinja's immutable sandbox.
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from vibethinker_jax.errors import UserError


def render(
    template: str,
    messages: Sequence[Mapping[str, str]],
    special_tokens: Mapping[str, str],
    add_generation_prompt: bool,
    source: str,
) -> str:
    """The text of a conversation.

    Args:
        template: Jinja source.
        messages: {"role", "content"} in order.
        special_tokens: names that the template may use, e.g. {"eos_token": "<|im_end|>"}.
        add_generation_prompt: end with what opens an assistant turn.
        source: what error messages start with: where the template comes from.

    Raises:
        UserError: the template does not parse, or refuses these messages.
    """
    try:
        return _compile(template).render(
            messages=[dict(message) for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **special_tokens,
        )
    except jinja2.TemplateError as error:
        roles = [message["role"] for message in messages]
        raise UserError(
            f"{source}: the chat template fails on roles {roles}: {error}; mend the template or the messages"
        ) from error


class _GenerationBlock(jinja2.ext.Extension):
    """Accepts {% generation %} ... {% endgeneration %}, which marks assistant text, and renders its inside."""

    tags = {"generation"}  # noqa: RUF012 - Jinja reads this class attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
