"""The command line: `vibethinker VERB`. Verbs parse, call the library and print; nothing is computed here."""

import argparse
import contextlib
import json
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

from vibethinker_jax.errors import UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb; returns the exit code, 0 only on success. Bad input prints one line and gives 2."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    own, config_arguments = _split_off_config(arguments)
    parser = _parser()
    options = parser.parse_args(own)
    if config_arguments and options.verb not in ("train", "plan"):
        parser.error(f"{options.verb} takes no --config")
    options.config_arguments = config_arguments
    _set_environment()
    try:
        options.run(options)
    except UserError as error:
        print(f"vibethinker {options.verb}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"vibethinker {options.verb}: interrupted", file=sys.stderr)
        return 130
    return 0


def _set_environment() -> None:
    """Defaults that must be there before JAX and tqdm are imported; the user's own settings win.

    Compiled programs are kept between runs (JAX_COMPILATION_CACHE_DIR empty: keep none), and progress bars that go to
    a file get a line every ten seconds instead of ten a second. Fake CPU devices get a thread for each that may wait:
    on fewer, independent collectives wait for each other without end.
    """
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        os.environ.setdefault("NPROC", "32")
    cache = os.path.join(os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache")), "vibethinker_jax", "xla")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_MININTERVAL", "10")


def _convert_to_orbax(options: argparse.Namespace) -> None:
    from vibethinker_jax.checkpoints.convert import hf_to_orbax

    hf_to_orbax(options.source, options.destination, options.dtype)
    print(f"wrote {options.destination}")


def _convert_to_hf(options: argparse.Namespace) -> None:
    from vibethinker_jax.checkpoints.convert import orbax_to_hf

    orbax_to_hf(options.source, options.destination, options.step, options.dtype)
    print(f"wrote {options.destination}")


def _train(options: argparse.Namespace) -> None:
    from vibethinker_jax.configuration import read_config
    from vibethinker_jax.stages import run_stage

    workdir = run_stage(read_config(options.config_arguments), options.workdir)
    print(f"trained: {workdir} (checkpoints/, metrics.jsonl, tensorboard/)")


def _plan(options: argparse.Namespace) -> None:
    from vibethinker_jax.planning.command import run

    print(
        run(
            options.config_arguments,
            options.topology,
            as_json=options.json,
            search=options.search,
            use_cache=not options.no_cache,
        )
    )


def _sample(options: argparse.Namespace) -> None:
    from vibethinker_jax.data.records import load_problems
    from vibethinker_jax.rollout.files import sample_file, sample_prompt

    if (options.prompt is None) == (options.input is None):
        raise UserError("give either --prompt TEXT or --input FILE with --output FILE")
    if options.input is not None and options.output is None:
        raise UserError("--output is missing; name the JSONL file that --input's completions go to")
    params = _sampling(options, options.samples)
    if options.prompt is not None:
        prompts = [[{"role": "user", "content": options.prompt}]]
        with _engine(options, prompts, options.samples) as engine:
            for completion in sample_prompt(engine, options.prompt, params):
                print(json.dumps(completion, ensure_ascii=False) if options.json else completion["text"])
    else:
        problems = load_problems(options.input)
        with _engine(options, [problem.prompt for problem in problems], options.samples) as engine:
            count = sample_file(engine, problems, options.output, params, options.checkpoint)
        print(f"{options.output}: {count} completions")


def _eval(options: argparse.Namespace) -> None:
    from vibethinker_jax.evaluation.benchmarks import get_benchmark, load_benchmark
    from vibethinker_jax.evaluation.evaluate import evaluate
    from vibethinker_jax.rewards import VerifierPool

    benchmark = get_benchmark(options.benchmark)
    problems = load_benchmark(options.benchmark, options.data)
    if options.limit is not None:
        if options.limit < 1:
            raise UserError(f"--limit is {options.limit}; give at least 1")
        problems = problems[: options.limit]
    for name in ("temperature", "top_p", "top_k", "samples"):
        if getattr(options, name) is None:
            setattr(options, name, getattr(benchmark, name))
    output = options.output or os.path.join("runs", f"eval-{options.benchmark}")
    prompts = [problem.prompt for problem in problems]
    with _engine(options, prompts, options.samples) as engine, VerifierPool(workers=options.workers) as pool:
        report = evaluate(
            engine,
            problems,
            samples=options.samples,
            params=_sampling(options, 1),
            pool=pool,
            output=output,
            benchmark=options.benchmark,
            seed=options.seed,
            checkpoint=options.checkpoint,
        )
    print(json.dumps(report.to_dict()) if options.json else f"{report}\nsamples and report: {output}")


def _compare(options: argparse.Namespace) -> None:
    from vibethinker_jax.evaluation.compare import compare

    comparison = compare(options.first, options.second)
    print(json.dumps(comparison.to_dict()) if options.json else comparison)


def _status(options: argparse.Namespace) -> None:
    from vibethinker_jax.training.status import format_status, run_status

    status = run_status(options.workdir)
    print(json.dumps(status) if options.json else format_status(status, options.last))


def _arithmetic(options: argparse.Namespace) -> None:
    from vibethinker_jax.data.arithmetic import write_dataset

    print(write_dataset(options.output, seed=options.seed))


@contextlib.contextmanager
def _engine(options: argparse.Namespace, prompts: Sequence[Any], samples: int) -> Any:
    """The rollout engine over the checkpoint that the options name, no larger than these prompts can use."""
    import vibethinker_jax as vt

    mesh = vt.make_mesh(**_mesh_sizes(options.mesh)) if options.mesh else None
    policy = vt.load(options.checkpoint, mesh, options.dtype, options.dtype, options.step)
    length = options.max_length or policy.config.max_position_embeddings
    if options.max_new_tokens is not None:
        longest = max((len(policy.tokenizer.encode_chat(prompt)) for prompt in prompts), default=1)
        length = min(length, longest + options.max_new_tokens)
    slots = min(options.max_slots, max(1, len(prompts) * samples))
    engine = vt.RolloutEngine(policy, max_slots=slots, max_length=length)
    try:
        yield engine
    finally:
        engine.close()


def _mesh_sizes(text: str) -> dict[str, int]:
    """ "fsdp=4,tensor=2" -> {"fsdp": 4, "tensor": 2}."""
    try:
        sizes = {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
    except ValueError:
        sizes = {"": 0}
    if not sizes.keys() <= {"replica", "fsdp", "context", "tensor"}:
        raise UserError(f"--mesh is {text!r}; write sizes of replica, fsdp, context, tensor, e.g. fsdp=4,tensor=2")
    return sizes


def _sampling(options: argparse.Namespace, n: int) -> Any:
    from vibethinker_jax.rollout.params import SamplingParams

    return SamplingParams(
        n=n,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
    )


def _split_off_config(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separates `--config FILE` and `--config.a.b=v` from the verb's own options."""
    own, config, expects_value = [], [], False
    for argument in arguments:
        if expects_value or argument == "--config" or argument.startswith(("--config=", "--config.")):
            config.append(argument)
            expects_value = argument == "--config"
        else:
            own.append(argument)
    return own, config


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vibethinker", description="VibeThinker-3B's training recipe, evaluation and conversion in JAX."
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    convert = _verb(verbs, "convert", "convert between Hugging Face and Orbax format, exactly", None)
    directions = convert.add_subparsers(dest="direction", required=True, metavar="DIRECTION")
    for name, run, source in (
        ("hf-to-orbax", _convert_to_orbax, "Hugging Face directory"),
        ("orbax-to-hf", _convert_to_hf, "Orbax checkpoint or work directory of a training stage"),
    ):
        direction = _verb(directions, name, f"from a {source}", run, f"vibethinker convert {name} SOURCE DESTINATION")
        direction.add_argument("source", help=source)
        direction.add_argument("destination", help="directory to write; must not exist, or be empty")
        direction.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: unchanged")
        if run is _convert_to_hf:
            direction.add_argument("--step", type=int, help="of a training run; default: the newest")

    train = _verb(
        verbs,
        "train",
        "run one training stage, or continue it where it stopped",
        _train,
        "vibethinker train --config configs/sft_stage1.py --workdir runs/sft --config.data.path=traces.jsonl "
        "--config.model.checkpoint=Qwen2.5-Coder-3B",
    )
    train.add_argument("--workdir", required=True, help="directory of the run, local or gs://")
    train.add_argument_group("configuration", "--config FILE, and any field of it as --config.a.b=value")

    plan = _verb(
        verbs,
        "plan",
        "compile a stage's programs for TPUs that are not there: memory, FLOPs, communication, estimated time",
        _plan,
        "vibethinker plan --config configs/sft_stage1.py --topology v5e:4x4 --config.mesh.context=16",
    )
    plan.add_argument("--topology", required=True, help="CHIP:SHAPE, e.g. v5e:4x4, v5p:2x2x4, v6e:2x2")
    plan.add_argument("--json", action="store_true", help="print one JSON object")
    plan.add_argument("--search", action="store_true", help="try mesh shapes and remat policies; takes long")
    plan.add_argument("--no-cache", action="store_true", help="compile again what was planned before")
    plan.add_argument_group("configuration", "--config FILE, and any field of it as --config.a.b=value")

    sample = _verb(
        verbs, "sample", "sample completions", _sample, 'vibethinker sample --checkpoint C --prompt "1 + 1 = ?"'
    )
    sample.add_argument("--prompt", help="a user message")
    sample.add_argument("--input", help="file of problems (any format that eval reads)")
    sample.add_argument("--output", help="JSONL of completions; continued if it exists")
    sample.add_argument("--samples", type=int, default=1, help="completions per prompt (default 1)")
    sample.add_argument("--json", action="store_true", help="print whole completions as JSON")
    _add_engine_options(sample, temperature=1.0, top_p=0.95, top_k=-1)

    evaluate = _verb(
        verbs,
        "eval",
        "measure accuracy on a benchmark, or continue a measurement",
        _eval,
        "vibethinker eval --checkpoint C --benchmark aime25 --data aime25.parquet --output runs/aime25",
    )
    evaluate.add_argument(
        "--benchmark",
        default="problems",
        help="aime25, gpqa-diamond, gsm8k, ifbench, ifeval, or problems for any file (default)",
    )
    evaluate.add_argument("--data", required=True, help="file with the benchmark's problems")
    evaluate.add_argument("--samples", type=int, help="per problem; default: the benchmark's protocol")
    evaluate.add_argument("--limit", type=int, help="only the first problems")
    evaluate.add_argument("--workers", type=int, default=2, help="verifier processes (default 2)")
    evaluate.add_argument("--output", help="directory of samples and report (default runs/eval-BENCHMARK)")
    evaluate.add_argument("--json", action="store_true", help="print the report as JSON")
    _add_engine_options(evaluate)

    compare = _verb(verbs, "compare", "compare two evaluations, paired", _compare, "vibethinker compare runs/a runs/b")
    compare.add_argument("first", help="output directory of an evaluation")
    compare.add_argument("second", help="another, of the same problems")
    compare.add_argument("--json", action="store_true", help="print as JSON")

    status = _verb(verbs, "status", "show where a training run stands", _status, "vibethinker status runs/sft")
    status.add_argument("workdir", help="of the run")
    status.add_argument("--last", type=int, default=10, help="steps to show (default 10)")
    status.add_argument("--json", action="store_true", help="print everything as JSON")

    data = _verb(verbs, "data", "make data", None)
    kinds = data.add_subparsers(dest="kind", required=True, metavar="KIND")
    arithmetic = _verb(
        kinds,
        "arithmetic",
        "arithmetic with worked solutions, and a tiny model's files to train on it",
        _arithmetic,
        "vibethinker data arithmetic --output runs/demo/data",
    )
    arithmetic.add_argument("--output", required=True, help="directory to write")
    arithmetic.add_argument("--seed", type=int, default=0, help="of the problems (default 0)")
    return parser


def _verb(parsers: Any, name: str, summary: str, run: Any, example: str | None = None) -> argparse.ArgumentParser:
    parser = parsers.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=f"example: {example}" if example else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if run is not None:
        parser.set_defaults(run=run)
    return parser


def _add_engine_options(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Options of verbs that sample; without defaults the benchmark's protocol fills them in."""
    shown = types.MappingProxyType({name: f" (default {value})" for name, value in defaults.items()})
    protocol = " (default: the benchmark's protocol)"
    parser.add_argument("--checkpoint", required=True, help="Hugging Face, Orbax or training directory")
    parser.add_argument("--step", type=int, help="of a training directory; default: the newest")
    for name, kind in (("temperature", float), ("top_p", float), ("top_k", int)):
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=kind, default=defaults.get(name), help=shown.get(name, protocol)
        )
    parser.add_argument("--max-new-tokens", type=int, help="longest completion (default: up to --max-length)")
    parser.add_argument("--max-length", type=int, help="prompt and completion (default: the model's)")
    parser.add_argument("--max-slots", type=int, default=8, help="sequences decoded at once (default 8)")
    parser.add_argument("--seed", type=int, default=0, help="of sampling (default 0)")
    parser.add_argument("--dtype", default="float32", help="of weights and activations (default float32)")
    parser.add_argument("--mesh", help="e.g. fsdp=4,tensor=2 (default: one device)")


if __name__ == "__main__":
    sys.exit(main())
