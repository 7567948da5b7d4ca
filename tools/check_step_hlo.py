"""What the TPU compiler made of a training step: checked on its optimized program. Needs libtpu, but no TPU.

python tools/check_step_hlo.py --config configs/sft_stage1.py --config.global_batch_rows=1 --topology v5e:4x4
python tools/check_step_hlo.py --self-test

Compiles the step as `vibethinker plan` does and prints a line per check, "ok" or "FAILED", and what it saw:

    scores        no array with a score for every query of a device and every key of its rows
    logits        no array with a quarter or more of a device's share of tokens x vocabulary
    forward-once  one forward kernel per layer (and hop), none where gradients are computed
    kv-heads      K/V stay as many heads as they are: in kernels, in gathered rows, in passing shards
    kv-gradients  dK/dV of whole rows are summed by reduce-scatters, those of a ring travel with their shards
    all-reduce    no all-reduce of more than 1 MiB
    table         neither the embedding table nor its gradient is gathered
    kept-rows     no K/V of whole rows are kept for every layer
    ring-overlap  every transfer of a ring's hop begins before and ends after a kernel in the schedule

`--variant NAME` compiles a step that is made bad on purpose, and must fail. `--self-test [NAME ...]` does so with small
steps, of gather, ring and all variants; it succeeds if the good ones pass and each bad one fails where it should.
`--text FILE` keeps the program.
"""

import argparse
import contextlib
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tools")]

from step_hlo_checks import Facts, Finding, judge, report  # noqa: E402
from step_hlo_variants import VARIANTS, Variant  # noqa: E402

from vibethinker_jax.errors import UserError  # noqa: E402
from vibethinker_jax.planning.topology import (  # noqa: E402
    open_topology,
    out_of_memory,
    require_libtpu,
    set_environment,
)

SELF_TESTS = ("gather", "ring", *VARIANTS)
SELF_TEST_TOPOLOGY = "v5e:2x2"
# Sizes that no two kinds of dimension share: 3 layers, 2,432 = 128 x 19 words per device, 1,024 tokens of 4,096.
SMALL_MODEL = {"num_hidden_layers": 3, "hidden_size": 512, "intermediate_size": 768, "vocab_size": 9728}
SMALL_ARGUMENTS = (
    f"--config={REPOSITORY / 'configs' / 'sft_stage1.py'}",
    "--config.global_batch_rows=1",
    "--config.sequence_length=4096",
    "--config.model.head_chunk=256",
    "--config.attention.block_q=256",  # most of the time would go into compiling kernels of large blocks
    "--config.attention.block_kv=256",
)


def compile_step(config: Any, model: Any, topology: Any, patch: Callable[[], Any]) -> tuple[str, Facts]:
    """(text of the optimized training step, what to expect of it)."""
    from vibethinker_jax.planning.programs import place, steps_of

    placement = place(config, topology)
    with patch():
        programs = steps_of(config, model, placement)[config.stage]().programs
        lowered = programs["whole" if "whole" in programs else "add"].lower()
    return lowered.compile().as_text(), facts_of(config, model, placement)


def facts_of(config: Any, model: Any, placement: Any) -> Facts:
    from vibethinker_jax.attention.cost import choose_strategy
    from vibethinker_jax.stages.start import micro_batch_rows

    shards, tensor = placement.size("context"), placement.size("tensor")
    batch, vocabulary_shards = placement.size("replica", "fsdp"), shards * tensor
    rows = max(1, micro_batch_rows(config, placement) // batch)
    kv_heads = model.num_kv_heads // tensor if model.num_kv_heads % tensor == 0 else 1
    strategy = config.attention.strategy
    if strategy == "auto":
        itemsize = 4 if config.model.compute_dtype == "float32" else 2
        strategy = choose_strategy(rows, config.sequence_length, kv_heads, model.head_dim, itemsize)
    inner = model.intermediate_size // tensor
    part = model.padded_vocab_size // vocabulary_shards
    widths = {
        model.hidden_size,
        model.num_heads * model.head_dim,
        model.head_dim,
        inner,
        inner // config.model.mlp_chunks,
    }
    return Facts(
        length=config.sequence_length,
        shards=shards,
        rows=rows,
        layers=model.num_layers,
        kv_heads=kv_heads,
        heads=model.num_heads // tensor,
        head_dim=model.head_dim,
        vocabulary=model.padded_vocab_size,
        vocabulary_shards=vocabulary_shards,
        columns=model.hidden_size // placement.size("fsdp"),
        widths=frozenset(widths | {part, model.padded_vocab_size}),
        strategy=strategy,
    )


def check(
    arguments: Sequence[str], topology_name: str, variant: Variant | None, text_file: str, small: bool
) -> list[str]:
    """Compiles and reports; names of the failed checks."""
    import jax

    from vibethinker_jax.configuration import read_config
    from vibethinker_jax.models.config import Qwen2Config
    from vibethinker_jax.planning.programs import read_model

    config = read_config(arguments)
    for field, value in variant.overrides.items() if variant else ():
        config.update_from_flattened_dict(
            {field: min(value, config.sequence_length) if value == sys.maxsize else value}
        )
    config_files = [a.partition("=")[2].partition(":")[0] for a in arguments if a.startswith("--config=")]
    model = read_model(config, config_files[-1])
    if small:
        model = Qwen2Config.from_hf({**model.raw, "head_dim": model.head_dim, **SMALL_MODEL}, source="small model")
    jax.clear_caches()  # what was traced before is not what the variant patches
    began = time.perf_counter()
    try:
        text, facts = compile_step(
            config, model, open_topology(topology_name), variant.patch if variant else contextlib.nullcontext
        )
    except jax.errors.JaxRuntimeError as error:
        if out_of_memory(str(error)) is None:
            raise
        return report({"compile": Finding([str(error).splitlines()[0]], "")})
    if text_file:
        pathlib.Path(text_file).write_text(text)
    print(f"compiled in {time.perf_counter() - began:.0f} s: {facts}")
    return report(judge(text, facts))


def self_test(names: Sequence[str]) -> list[str]:
    """Names of the steps that were not judged as they should be."""
    wrong = []
    for name in names:
        variant = VARIANTS.get(name)
        strategy = () if variant else (f"--config.attention.strategy={name}",)
        print(f"\n{name}: must {'fail ' + ', '.join(variant.fails) if variant else 'pass'}")
        failed = check((*SMALL_ARGUMENTS, *strategy), SELF_TEST_TOPOLOGY, variant, "", small=True)
        if not set(variant.fails) <= set(failed) if variant else failed:
            wrong.append(name)
    print(f"\nself-test: {'FAILED: ' + ', '.join(wrong) if wrong else f'ok, {len(names)} steps'}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v5e:4x4", help="CHIP:SHAPE (default v5e:4x4)")
    parser.add_argument("--variant", choices=VARIANTS, help="make the step bad first")
    parser.add_argument(
        "--self-test", nargs="*", choices=SELF_TESTS, metavar="NAME", help="judge small steps: gather, ring, variants"
    )
    parser.add_argument("--text", default="", metavar="FILE", help="write the optimized program here")
    options, arguments = parser.parse_known_args()
    arguments = join_config(arguments)
    set_environment()
    try:
        require_libtpu()
        if options.self_test is not None:
            return 1 if self_test(options.self_test or SELF_TESTS) else 0
        variant = VARIANTS[options.variant] if options.variant else None
        return 1 if check(arguments, options.topology, variant, options.text, small=False) else 0
    except UserError as error:
        print(f"check_step_hlo: {error}", file=sys.stderr)
        return 2


def join_config(arguments: Sequence[str]) -> list[str]:
    """`--config FILE` as `--config=FILE`."""
    joined = list(arguments)
    while "--config" in joined[:-1]:
        place = joined.index("--config")
        joined[place : place + 2] = [f"--config={joined[place + 1]}"]
    return joined


if __name__ == "__main__":
    sys.exit(main())
