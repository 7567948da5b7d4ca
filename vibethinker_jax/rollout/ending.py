"""When is a sample finished, and what is then handed out. No JAX."""

from collections.abc import Sequence

from vibethinker_jax.rollout.params import Completion
from vibethinker_jax.rollout.prompts import TextCodec
from vibethinker_jax.rollout.scheduler import SampleJob


def extend_sample(
    sample: SampleJob, tokens: Sequence[int], log_probs: Sequence[float], tokenizer: TextCodec, weights_version: int
) -> Completion | None:
    """Adds new tokens to a sample; the completion if that ends it.

    A stop string is looked for in the text; tokens after the one that completes it are cut off, whether or not the
    device went on to a stop token or the limit. Only the last of `tokens` can be a stop token.
    """
    sample.tokens.extend(tokens)
    sample.log_probs.extend(log_probs)
    prompt = sample.prompt
    match = prompt.stop_strings.find(sample.tokens, len(tokens)) if prompt.stop_strings and tokens else None
    if match:
        del sample.tokens[match.length :], sample.log_probs[match.length :]
        text, finish_reason, stop_reason = match.text, "stop", match.stop
    elif sample.tokens and sample.tokens[-1] in prompt.stop_ids:
        text, finish_reason, stop_reason = tokenizer.decode(sample.tokens[:-1]), "stop", sample.tokens[-1]
    elif len(sample.tokens) >= prompt.limit:
        text, finish_reason, stop_reason = tokenizer.decode(sample.tokens), "length", None
    else:
        return None
    return Completion(
        text=text,
        tokens=sample.tokens,
        log_probs=sample.log_probs,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        prompt_tokens=prompt.tokens,
        seed=prompt.params.seed,
        weights_version=weights_version,
    )
