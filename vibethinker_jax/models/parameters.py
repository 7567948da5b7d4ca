"""The parameters of a Qwen2 decoder as data: name, shape, logical axes and initialisation of every array.

Parameters travel as a nested dict of arrays ("params"). Everything else about them derives from the one table
here: abstract trees for restoring and compiling, placement on a mesh, random initialisation, weight decay.
"""

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from vibethinker_jax.models.config import Qwen2Config
from vibethinker_jax.parallel.rules import Placement

Params = dict[str, Any]


@dataclass(frozen=True)
class ParameterSpec:
    """One array.

    Attributes:
        shape: its shape.
        axes: a logical axis name per dimension (parallel/rules.py maps them to mesh axes); None is never sharded.
        deviation: standard deviation of the normal initialisation; 0 with `mean` 1 for norms, 0 for biases.
        mean: what it is initialised around.
        decays: whether weight decay applies (matrices and tables; not norms and biases).
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    deviation: float = 0.0
    mean: float = 0.0
    decays: bool = False


def parameter_specs(config: Qwen2Config) -> dict[str, Any]:
    """The nested dict of ParameterSpec, with the layers of a kind stacked along a leading axis.

    Matrices start normal with deviation 1/sqrt(fan in), those that write into the residual stream divided by
    sqrt(2 * layers) as in GPT-2; tables with `initializer_range` of config.json.
    """
    hidden, mlp = config.hidden_size, config.intermediate_size
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    table_deviation = float(config.raw.get("initializer_range", 0.02))
    residual = 1 / math.sqrt(2 * config.num_layers)

    def stacked(shape: tuple[int, ...], axes: tuple[str | None, ...], **kwargs: Any) -> ParameterSpec:
        return ParameterSpec((config.num_layers, *shape), ("layers", *axes), **kwargs)

    def kernel(shape: tuple[int, ...], axes: tuple[str | None, ...], fan_in: int, scale: float = 1.0) -> ParameterSpec:
        return stacked(shape, axes, deviation=scale / math.sqrt(fan_in), decays=True)

    def projection(count: int, axis: str) -> dict[str, ParameterSpec]:
        return {
            "kernel": kernel((hidden, count, head_dim), ("embed", axis, None), hidden),
            "bias": stacked((count, head_dim), (axis, None)),
        }

    def table() -> dict[str, ParameterSpec]:
        shape = (config.padded_vocab_size, hidden)
        return {"table": ParameterSpec(shape, ("vocab", "table_embed"), deviation=table_deviation, decays=True)}

    specs: dict[str, Any] = {
        "embed": table(),
        "layers": {
            "input_norm": {"scale": stacked((hidden,), ("embed",), mean=1.0)},
            "attention": {
                "q": projection(heads, "heads"),
                "k": projection(kv_heads, "kv_heads"),
                "v": projection(kv_heads, "kv_heads"),
                "out": {
                    "kernel": kernel(
                        (heads, head_dim, hidden), ("heads", None, "embed"), heads * head_dim, scale=residual
                    )
                },
            },
            "post_attention_norm": {"scale": stacked((hidden,), ("embed",), mean=1.0)},
            "mlp": {
                "gate": {"kernel": kernel((hidden, mlp), ("embed", "mlp"), hidden)},
                "up": {"kernel": kernel((hidden, mlp), ("embed", "mlp"), hidden)},
                "down": {"kernel": kernel((mlp, hidden), ("mlp", "embed"), mlp, scale=residual)},
            },
        },
        "norm": {"scale": ParameterSpec((hidden,), ("embed",), mean=1.0)},
    }
    if not config.tie_word_embeddings:
        specs["lm_head"] = table()
    return specs


def map_specs(function: Callable[..., Any], specs: Mapping[str, Any], *rest: Any) -> dict[str, Any]:
    """Applies `function` to every ParameterSpec of a nested dict, and to what the other trees hold in its place."""
    return jax.tree.map(function, dict(specs), *rest, is_leaf=is_spec)


def named_parameters(config: Qwen2Config) -> dict[str, ParameterSpec]:
    """Every parameter by its path, e.g. "layers/attention/q/kernel"."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(parameter_specs(config), is_leaf=is_spec)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): spec for path, spec in leaves}


def is_spec(node: Any) -> bool:
    """Whether a node of a tree of ParameterSpec is a leaf."""
    return isinstance(node, ParameterSpec)


def abstract_params(config: Qwen2Config, dtype: jax.typing.DTypeLike = jnp.float32) -> Params:
    """The parameter tree as jax.ShapeDtypeStruct."""
    return map_specs(lambda spec: jax.ShapeDtypeStruct(spec.shape, dtype), parameter_specs(config))


def parameter_shardings(config: Qwen2Config, placement: Placement) -> Params:
    """The parameter tree as shardings on the placement's mesh (ZeRO-3 over fsdp x context, then tensor)."""
    return map_specs(lambda spec: placement.sharding(spec.axes, spec.shape), parameter_specs(config))


def count_parameters(config: Qwen2Config) -> int:
    """Parameters without the padding of the vocabulary: 3,085,938,688 for Qwen2.5-3B's shape."""
    padding = (config.padded_vocab_size - config.vocab_size) * config.hidden_size
    tables = 1 if config.tie_word_embeddings else 2
    total = sum(math.prod(spec.shape) for spec in named_parameters(config).values())
    return total - tables * padding


def init_params(config: Qwen2Config, seed: int, placement: Placement | None = None) -> Params:
    """Random float32 parameters; the same seed gives the same bits on every mesh.

    Padding rows of the vocabulary tables are zero.
    """
    placement = placement or Placement(None)

    def initialise() -> Params:
        def array(path: tuple[Any, ...], spec: ParameterSpec) -> jax.Array:
            if not spec.deviation:
                return jnp.full(spec.shape, spec.mean, jnp.float32)
            # Keys come from the name, so adding a parameter never changes the others.
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode()))
            value = spec.deviation * jax.random.normal(key, spec.shape, jnp.float32)
            if spec.axes[0] == "vocab":
                value = jnp.where(jnp.arange(spec.shape[0])[:, None] < config.vocab_size, value, 0.0)
            return value

        return jax.tree_util.tree_map_with_path(array, parameter_specs(config), is_leaf=is_spec)

    return jax.jit(initialise, out_shardings=parameter_shardings(config, placement))()
