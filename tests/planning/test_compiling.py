"""Text and program of one compilation."""

import jax
import jax.numpy as jnp

from vibethinker_jax.planning.compiling import compile_with_text
from vibethinker_jax.planning.flops import executed_flops
from vibethinker_jax.planning.hlo import parse


def test_the_text_is_that_of_the_program_that_was_compiled():
    x = jnp.arange(12.0).reshape(3, 4)
    compiled, text = compile_with_text(jax.jit(lambda a: a @ a.T).lower(x))
    assert executed_flops(parse(text), {}) == 2 * 3 * 4 * 3
    assert compiled(x).tolist() == (x @ x.T).tolist()
