"""From a configuration to the programs that its stage runs: the functions of `train` and of the engine, lowered.

Every program says what else lies in the chip's memory while it runs.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from vibethinker_jax.errors import UserError
from vibethinker_jax.models.config import Qwen2Config
from vibethinker_jax.models.parameters import abstract_params, parameter_shardings
from vibethinker_jax.parallel.mesh import make_mesh
from vibethinker_jax.parallel.rules import Placement
from vibethinker_jax.planning.flops import sampling_model_flops, training_model_flops
from vibethinker_jax.planning.kernels import KernelFlops, training_kernels
from vibethinker_jax.planning.topology import Topology, names_with, out_of_memory
from vibethinker_jax.rollout.cache import plan_shape
from vibethinker_jax.rollout.compiled import EngineFunctions
from vibethinker_jax.stages.reasoning_rl import make_step
from vibethinker_jax.stages.start import micro_batch_rows, optimizer_config, packed_forward
from vibethinker_jax.training.abstract import mgpo_batch, sft_batch
from vibethinker_jax.training.optimizer import make_optimizer
from vibethinker_jax.training.sft_step import sft_step
from vibethinker_jax.training.step import TrainStep

# Of the schedule, which no shape depends on.
TOTAL_STEPS = 1000


@dataclass(frozen=True)
class Program:
    """One compiled function of a step.

    Attributes:
        lower: gives it.
        runs: how often a step runs it.
        beside: bytes per chip that are in HBM while it runs and are none of its arguments, by what they are.
    """

    lower: Callable[[], jax.stages.Lowered]
    runs: int = 1
    beside: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """What the plan has a row for.

    Attributes:
        programs: by name.
        tokens: that one execution of the step handles, over all chips.
        model_flops: that the model needs for them, over all chips.
        holds: bytes per chip of what outlives a program, by what it is.
        kernels: FLOPs of attention kernels in the programs.
        micro_batches: in which a training step takes its rows; 1 for sampling.
    """

    programs: Mapping[str, Program]
    tokens: int
    model_flops: float
    holds: Mapping[str, int]
    kernels: Mapping[str, KernelFlops] = field(default_factory=dict)
    micro_batches: int = 1


@dataclass(frozen=True)
class AbstractPolicy:
    """What the engine reads of a policy (rollout/weights.py), without weights."""

    config: Qwen2Config
    params: Any
    placement: Placement
    compute_dtype: Any
    tokenizer: Any = None


def read_model(config: ConfigDict, config_file: str) -> Qwen2Config:
    """The model's shape: of the checkpoint if the configuration names one, else of its `model.architecture` file.

    Raises:
        UserError: neither can be read.
    """
    if config.model.checkpoint:
        from vibethinker_jax.checkpoints.store import model_directory

        return _with_context(Qwen2Config.from_file(model_directory(config.model.checkpoint) / "config.json"), config)
    architecture = config.model.get("architecture", "")
    if not architecture:
        raise UserError("set config.model.checkpoint or config.model.architecture: the plan needs the model's shape")
    path = os.path.join(os.path.dirname(os.path.abspath(config_file)), architecture)
    return _with_context(Qwen2Config.from_file(path), config)


def _with_context(model: Qwen2Config, config: ConfigDict) -> Qwen2Config:
    """The model with the context length that the stage trains, as stages/start.py gives it."""
    length = config.model.max_position_embeddings
    return dataclasses.replace(model, max_position_embeddings=length) if length else model


def place(config: ConfigDict, topology: Topology) -> Placement:
    """The configuration's mesh on the topology's chips.

    Raises:
        UserError: they do not fit each other.
    """
    sizes = dict(config.mesh)
    count = sizes.pop("devices") or len(topology.devices)
    try:
        return Placement(make_mesh(**sizes, devices=topology.devices[:count]))
    except UserError as error:
        fixed = math.prod(size for size in sizes.values() if size > 0)
        usable = names_with(fixed, multiples=-1 in sizes.values())
        hint = f"; topologies for this mesh: {', '.join(usable)}" if usable else ""
        raise UserError(f"--topology {topology.name} has {len(topology.devices)} chips: {error}{hint}") from error


def steps_of(config: ConfigDict, model: Qwen2Config, placement: Placement) -> dict[str, Callable[[], Step]]:
    """The steps that the configuration's stage runs, by name.

    Raises:
        UserError: there is no such stage.
    """
    if config.stage == "sft":
        return {"sft": lambda: _sft(config, model, placement)}
    if config.stage == "mgpo":
        return {
            "mgpo": lambda: _mgpo(config, model, placement),
            "prefill": lambda: _sampling(config, model, placement, "prefill"),
            "decode": lambda: _sampling(config, model, placement, "decode"),
        }
    raise UserError(f"config.stage is {config.stage!r}; plan knows sft and mgpo")


def _sft(config: ConfigDict, model: Qwen2Config, placement: Placement) -> Step:
    rows = micro_batch_rows(config, placement)
    if config.global_batch_rows % rows:
        raise UserError(
            f"config.global_batch_rows is {config.global_batch_rows}; make it a multiple of micro_batch_rows {rows}"
        )
    optimizer, _ = make_optimizer(optimizer_config(config), model, TOTAL_STEPS)
    forward = packed_forward(config, model, placement)
    step = sft_step(forward, optimizer, offload=config.optimizer.offload)
    batch = sft_batch(rows, config.sequence_length)
    return _training(step, config, batch, rows, config.global_batch_rows // rows, accumulates=False)


def _mgpo(config: ConfigDict, model: Qwen2Config, placement: Placement) -> Step:
    """One micro-batch of an update: how many there are depends on the lengths of the responses."""
    rows = micro_batch_rows(config, placement)
    optimizer, _ = make_optimizer(optimizer_config(config), model, TOTAL_STEPS)
    step = make_step(config, model, placement, optimizer)
    batch = mgpo_batch(rows, config.sequence_length, config.max_segments)
    return _training(step, config, batch, rows, 1, accumulates=True)


def _training(
    step: TrainStep,
    config: ConfigDict,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    rows: int,
    micro_batches: int,
    *,
    accumulates: bool,
) -> Step:
    model = step.model
    parameters, moments = trainer_bytes(step)
    holds = {"parameters": parameters, "moments": moments}
    if accumulates or micro_batches > 1:
        # The first micro-batch costs as much as the others, and less memory: no need to compile it too.
        holds["accumulator"] = parameters
        programs = {
            "add": Program(lambda: step.lower_accumulated(batch)["add"], micro_batches, {"moments": moments}),
            "update": Program(lambda: step.lower_accumulated(batch)["update"]),
        }
    elif step.offload:
        holds["accumulator"] = parameters
        programs = {
            "first": Program(lambda: step.lower_accumulated(batch)["first"]),
            "update": Program(lambda: step.lower_accumulated(batch)["update"]),
        }
    else:
        programs = {"whole": Program(lambda: step.lower(batch))}
    length = config.sequence_length
    itemsize = jnp.dtype(config.model.compute_dtype).itemsize
    return Step(
        programs,
        tokens=micro_batches * rows * length,
        model_flops=training_model_flops(model, micro_batches * rows, length),
        holds=holds,
        kernels=training_kernels(step.forward, rows, length, itemsize),
        micro_batches=micro_batches,
    )


def _sampling(config: ConfigDict, model: Qwen2Config, placement: Placement, name: str) -> Step:
    """Prefill of one chunk, or one burst of decoding, where contexts are as long as they get.

    The trainer's parameters and moments stay where they are during rollouts.
    """
    optimizer, _ = make_optimizer(optimizer_config(config), model, TOTAL_STEPS)
    parameters, moments = trainer_bytes(make_step(config, model, placement, optimizer))
    policy = AbstractPolicy(model, placed_params(model, placement), placement, config.model.compute_dtype)
    shape = plan_shape(config.rollout.max_slots, config.sequence_length, model)
    functions = EngineFunctions(policy, shape)
    weights, slots, prompts = (
        device_bytes(tree) for tree in (functions.params, functions.slot_cache, functions.prompt_cache)
    )
    shared = jnp.dtype(config.model.compute_dtype) == jnp.float32  # then the engine uses the trainer's own
    trainer = {"parameters": 0 if shared else parameters, "moments": moments}
    if name == "prefill":
        program = Program(functions.lower_prefill, 1, {**trainer, "slot cache": slots})
        tokens = shape.prefill_batch * shape.prefill_chunk
    else:
        program = Program(functions.lower_decode, 1, {**trainer, "prompt cache": prompts})
        tokens = shape.slots * shape.decode_burst
    return Step(
        {name: program},
        tokens=tokens,
        model_flops=sampling_model_flops(model, tokens, config.sequence_length),
        holds={**trainer, "engine weights": weights, "slot cache": slots, "prompt cache": prompts},
    )


def placed_params(model: Qwen2Config, placement: Placement) -> Any:
    """float32 parameters as shapes with their places."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        abstract_params(model),
        parameter_shardings(model, placement),
    )


def trainer_bytes(step: TrainStep) -> tuple[int, int]:
    """HBM per chip of the float32 parameters and of the optimizer state."""
    params = abstract_params(step.model)
    state = params, jax.eval_shape(step.optimizer.init, params)
    placed = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        state,
        tuple(step.state_shardings),
    )
    return device_bytes(placed[0]), device_bytes(placed[1])


def device_bytes(tree: Any) -> int:
    """HBM per chip of abstract arrays with shardings, as they lie there: tiles are padded. Host memory is left out."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.sharding.memory_kind in (None, "device")]
    # A program that does nothing with them has them as arguments all the same.
    nothing = jax.jit(lambda arrays: (), keep_unused=True).lower(leaves)
    try:
        return nothing.compile().memory_analysis().argument_size_in_bytes
    except jax.errors.JaxRuntimeError as error:
        if out_of_memory(str(error)) is None:
            raise
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
