"""What every training stage begins with: its work directory, mesh, model shape, tokenizer and initial weights."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import jax
from etils import epath
from ml_collections import ConfigDict

from vibethinker_jax.attention.attend import AttentionConfig
from vibethinker_jax.checkpoints.assets import Assets
from vibethinker_jax.checkpoints.store import model_directory, read_assets, save_model_directory
from vibethinker_jax.data.tokenizer import Tokenizer
from vibethinker_jax.errors import UserError
from vibethinker_jax.models.config import Qwen2Config
from vibethinker_jax.models.parameters import Params, count_parameters, named_parameters
from vibethinker_jax.models.policy import FLOAT_DTYPES, Policy, initialise, load
from vibethinker_jax.parallel.mesh import make_mesh
from vibethinker_jax.parallel.rules import Placement, placement_table
from vibethinker_jax.training.forward import PackedForward
from vibethinker_jax.training.optimizer import OptimizerConfig
from vibethinker_jax.training.workdir import open_workdir

INITIALISE = ("checkpoint", "random")


@dataclass(frozen=True)
class Start:
    """Attributes:
    workdir: the run's directory, with model/ written.
    placement: the mesh that everything is on.
    model: shape, with the context length that the stage trains.
    tokenizer: of the checkpoint.
    assets: files that travel with the weights.
    initial_params: loads or draws the float32 weights that a new run starts from.
    """

    workdir: epath.Path
    placement: Placement
    model: Qwen2Config
    tokenizer: Tokenizer
    assets: Assets
    initial_params: Callable[[], Params]

    def policy(self, params: Params, compute_dtype: str) -> Policy:
        """A policy around weights of this run."""
        return Policy(self.model, params, self.tokenizer, self.assets, self.placement, compute_dtype)


def prepare(config: ConfigDict, workdir: epath.PathLike) -> Start:
    """Opens the work directory and reads everything about the model but its weights.

    Raises:
        UserError: the configuration asks for what is not there; names the field.
    """
    if not config.model.checkpoint:
        raise UserError("config.model.checkpoint is empty; set --config.model.checkpoint=DIRECTORY")
    if not config.data.path:
        raise UserError("config.data.path is empty; set --config.data.path=FILE")
    if config.model.initialise not in INITIALISE:
        raise UserError(
            f"config.model.initialise is {config.model.initialise!r}; choose one of {', '.join(INITIALISE)}"
        )
    random = config.model.initialise == "random"
    source = epath.Path(config.model.checkpoint)
    directory = source if random else model_directory(source)
    model = Qwen2Config.from_file(directory / "config.json")
    if config.model.max_position_embeddings:
        model = dataclasses.replace(model, max_position_embeddings=config.model.max_position_embeddings)
    if config.model.compute_dtype not in FLOAT_DTYPES:
        raise UserError(
            f"config.model.compute_dtype is {config.model.compute_dtype!r}; choose one of {', '.join(FLOAT_DTYPES)}"
        )
    if config.sequence_length > model.max_position_embeddings:
        raise UserError(
            f"config.sequence_length is {config.sequence_length}, but the model declares "
            f"{model.max_position_embeddings} positions; lower it, or set config.model.max_position_embeddings, which "
            "the exported config.json will declare"
        )
    assets = Assets.read(directory) if random else read_assets(source)
    sizes = dict(config.mesh)
    count = sizes.pop("devices")
    if not 0 <= count <= jax.device_count() or (count and jax.process_count() > 1):
        raise UserError(
            f"config.mesh.devices is {count}; there are {jax.device_count()} devices of {jax.process_count()} "
            "processes. 0 takes all; a part of them can be chosen with one process only"
        )
    placement = Placement(make_mesh(**sizes, devices=jax.devices()[:count] if count else None))
    workdir = open_workdir(workdir, config)
    save_model_directory(model, assets, workdir)
    _write_placement(workdir, model, placement)

    def initial_params() -> Params:
        if random:
            return initialise(source, config.seed, placement.mesh).params
        return load(source, placement.mesh, param_dtype="float32").params

    return Start(workdir, placement, model, Tokenizer.from_directory(directory), assets, initial_params)


def _write_placement(workdir: epath.Path, model: Qwen2Config, placement: Placement) -> None:
    """Leaves a table of where every parameter lives, and says what one device holds of them."""
    if placement.mesh is None or jax.process_index() != 0:
        return
    specs = {name: (spec.axes, spec.shape) for name, spec in named_parameters(model).items()}
    (workdir / "placement.txt").write_text(placement_table(placement, specs) + "\n")
    sizes = " x ".join(f"{axis} {size}" for axis, size in placement.mesh.shape.items())
    print(f"mesh {sizes}: {count_parameters(model):,} parameters, placed as in {workdir / 'placement.txt'}")


def packed_forward(config: ConfigDict, model: Qwen2Config, placement: Placement) -> PackedForward:
    """How a stage's configuration runs the model."""
    attention = dict(config.attention)
    layout = attention.pop("layout")
    return PackedForward(
        model,
        placement,
        config.model.compute_dtype,
        config.remat,
        config.model.head_chunk,
        AttentionConfig(**attention),
        layout,
        config.model.mlp_chunks,
    )


def optimizer_config(config: ConfigDict) -> OptimizerConfig:
    """The optimizer section of a stage's configuration."""
    return OptimizerConfig(**config.optimizer)


def micro_batch_rows(config: ConfigDict, placement: Placement) -> int:
    """Rows of one forward and backward pass over all devices: as configured, or one per data shard."""
    return config.micro_batch_rows or placement.size("replica", "fsdp")
