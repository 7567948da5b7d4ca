"""A policy: weights, tokenizer and placement together, loaded from and saved to any checkpoint format."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from vibethinker_jax.checkpoints.assets import Assets
from vibethinker_jax.checkpoints.export import write_hf
from vibethinker_jax.checkpoints.store import load_params, model_directory, read_assets, save_policy
from vibethinker_jax.data.tokenizer import Tokenizer
from vibethinker_jax.errors import UserError
from vibethinker_jax.models.config import Qwen2Config
from vibethinker_jax.models.parameters import Params, init_params, parameter_shardings
from vibethinker_jax.models.qwen2 import Qwen2, build
from vibethinker_jax.objectives.cross_entropy import head_statistics
from vibethinker_jax.parallel.rules import Placement

FLOAT_DTYPES = ("float32", "bfloat16", "float16")


class Policy:
    """Weights that can be sampled from, scored with, trained and saved.

    Attributes:
        config: shape of the model.
        params: nested dict of arrays (models/parameters.py), placed by `placement`.
        placement: the mesh, or none.
        tokenizer: the checkpoint's own.
        assets: the tokenizer's files and configs that travel with the weights.
        compute_dtype: dtype of activations.
    """

    def __init__(
        self,
        config: Qwen2Config,
        params: Params,
        tokenizer: Tokenizer,
        assets: Assets,
        placement: Placement,
        compute_dtype: jax.typing.DTypeLike = jnp.float32,
    ) -> None:
        self.config = config
        self.params = params
        self.tokenizer = tokenizer
        self.assets = assets
        self.placement = placement
        self.compute_dtype = jnp.dtype(compute_dtype)

    @property
    def param_dtype(self) -> jnp.dtype:
        """The dtype of the weights."""
        return self.params["embed"]["table"].dtype

    @property
    def model(self) -> Qwen2:
        """The Flax module around the current parameters."""
        return build(self.config, self.params, self.placement, self.compute_dtype)

    def with_params(self, params: Params) -> "Policy":
        """The same policy around other weights (not copied)."""
        return Policy(self.config, params, self.tokenizer, self.assets, self.placement, self.compute_dtype)

    def logits(self, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq vocab"]:
        """float32 next-token logits at every position, causal, without padding."""
        tokens = self._check(tokens)
        return _logits(self.params, tokens, self.config, self.placement, self.compute_dtype)

    def log_probs(
        self, tokens: Int[Array, "batch seq"], lengths: Int[Array, " batch"], temperature: float = 1.0
    ) -> Float[Array, "batch seq"]:
        """float32 log p(token t | tokens before t) under logits / temperature.

        Args:
            tokens: rows padded on the right with any valid id.
            lengths: tokens per row that count.
            temperature: of the softmax, above 0.

        Returns:
            Zero at t = 0 and at t >= length.
        """
        tokens = self._check(tokens)
        lengths = jnp.asarray(lengths, jnp.int32)
        if lengths.shape != tokens.shape[:1]:
            raise UserError(f"lengths: shape {lengths.shape} does not go with tokens of shape {tokens.shape}")
        if temperature <= 0:
            raise UserError(f"temperature is {temperature}; log-probabilities need a positive one")
        return _log_probs(
            self.params, tokens, lengths, self.config, self.placement, self.compute_dtype, float(temperature)
        )

    def save(self, path: epath.PathLike, format: str) -> None:
        """Writes the policy as a Hugging Face directory ("hf") or in Orbax format ("orbax").

        Raises:
            UserError: unknown format, or `path` exists and is not empty.
        """
        if format == "hf":
            write_hf(self.params, self.config, self.assets, path)
        elif format == "orbax":
            save_policy(self.params, self.config, self.assets, path)
        else:
            raise UserError(f"format is {format!r}; choose 'hf' or 'orbax'")

    def _check(self, tokens: Any) -> jax.Array:
        host = np.asarray(tokens)
        if host.ndim != 2 or not np.issubdtype(host.dtype, np.integer):
            raise UserError(f"tokens: {host.dtype} array of shape {host.shape}; pass integers [batch, seq]")
        if host.size and (host.min() < 0 or host.max() >= self.config.vocab_size):
            raise UserError(
                f"tokens: ids span {host.min()} to {host.max()}; the vocabulary has 0 to {self.config.vocab_size - 1}"
            )
        return jnp.asarray(host, jnp.int32)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _logits(
    params: Params, tokens: jax.Array, config: Qwen2Config, placement: Placement, compute_dtype: jnp.dtype
) -> jax.Array:
    model = build(config, params, placement, compute_dtype)
    return model.logits(model(tokens))[..., : config.vocab_size]


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _log_probs(
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    config: Qwen2Config,
    placement: Placement,
    compute_dtype: jnp.dtype,
    temperature: float,
) -> jax.Array:
    model = build(config, params, placement, compute_dtype)
    inside = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
    hidden = model(tokens, segment_ids=inside.astype(jnp.int32))
    targets = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    head = head_statistics(
        hidden,
        model.head_table,
        targets,
        vocab_size=config.vocab_size,
        temperature=temperature,
        shards=placement.size("context"),
        placement=placement,
    )
    return jnp.where(inside, jnp.pad(head.log_probs[:, :-1], ((0, 0), (1, 0))), 0.0)


def load(
    path: epath.PathLike,
    mesh: Mesh | None = None,
    param_dtype: str = "float32",
    compute_dtype: str = "float32",
    step: int | None = None,
) -> Policy:
    """Loads a policy; the format is detected.

    Args:
        path: a Hugging Face directory, a converted Orbax checkpoint or a training work directory; local or gs://.
        mesh: devices to place the weights on; the default device when None.
        param_dtype: dtype of the weights in memory.
        compute_dtype: dtype of activations.
        step: which checkpoint of a training work directory; the newest by default.

    Raises:
        UserError: names the file and what is wrong with it.
    """
    _check_dtypes(param_dtype, compute_dtype)
    directory, placement = model_directory(path), Placement(mesh)
    config = Qwen2Config.from_file(directory / "config.json")
    params = load_params(path, parameter_shardings(config, placement), param_dtype, step)
    return Policy(config, params, Tokenizer.from_directory(directory), read_assets(path), placement, compute_dtype)


def initialise(
    path: epath.PathLike,
    seed: int,
    mesh: Mesh | None = None,
    compute_dtype: str = "float32",
) -> Policy:
    """A policy with random float32 weights; `path` holds config.json and the tokenizer files."""
    _check_dtypes("float32", compute_dtype)
    path, placement = epath.Path(path), Placement(mesh)
    config = Qwen2Config.from_file(path / "config.json")
    tokenizer = Tokenizer.from_directory(path)
    return Policy(config, init_params(config, seed, placement), tokenizer, Assets.read(path), placement, compute_dtype)


def _check_dtypes(param_dtype: str, compute_dtype: str) -> None:
    for name, dtype in (("param_dtype", param_dtype), ("compute_dtype", compute_dtype)):
        if dtype not in FLOAT_DTYPES:
            raise UserError(f"{name} is {dtype!r}; choose one of {', '.join(FLOAT_DTYPES)}")
