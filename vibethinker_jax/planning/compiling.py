"""Compiling for chips that are not there, with the text of what the compiler made."""

import pathlib
import tempfile

import jax


def compile_with_text(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, str]:
    """The compiled program and its optimized, scheduled HLO.

    The text is what the compiler itself writes: `Compiled.as_text` cannot read back the asynchronous operations that
    programs for v5p and v6e contain (jax 0.10).

    Raises:
        jax.errors.JaxRuntimeError: the program does not compile, e.g. for lack of memory.
    """
    with tempfile.TemporaryDirectory(prefix="vibethinker-hlo-") as directory:
        compiled = lowered.compile(compiler_options={"xla_dump_to": directory, "xla_dump_hlo_as_text": True})
        files = sorted(pathlib.Path(directory).glob("*.after_optimizations.txt"), key=lambda path: path.stat().st_size)
        # Helpers of the compiler leave modules of their own; the program is the largest. The CPU compiler has another
        # name for the file, and no trouble with reading back.
        return compiled, files[-1].read_text() if files else compiled.as_text()
