"""Shape of a Qwen2 decoder, read from and written back to a Hugging Face `config.json`."""

import dataclasses
import json
import warnings
from collections.abc import Mapping
from typing import Any

from etils import epath

from vibethinker_jax.errors import UserError

# Rows of the vocabulary tables are padded to a multiple of this, whatever the mesh, so that a checkpoint
# means the same on every mesh. 151,936, Qwen2's own size, already is a multiple.
VOCAB_MULTIPLE = 128

# Fields that change what is computed, and the values at which they change nothing.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_dropout": (0, 0.0, None),
    "hidden_act": ("silu",),
    "layer_scale": (None,),
    "logit_scale": (None, 1, 1.0),
    "mlp_bias": (False, None),
    "no_rope_layers": (None, [], ()),
    "partial_rotary_factor": (1, 1.0, None),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "qk_norm": (False, None),
    "use_mrope": (False, None),
    "use_qk_norm": (False, None),
    "use_sliding_window": (False, None),
}
# Fields that describe the files, the tokenizer or a runtime default, never the computation.
_INERT_FIELDS = frozenset(
    {
        "_name_or_path",
        "architectures",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "max_window_layers",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "sliding_window",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
_SHAPE_FIELDS = {  # config.json -> Qwen2Config
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "rms_norm_eps",
    "max_position_embeddings": "max_position_embeddings",
    "tie_word_embeddings": "tie_word_embeddings",
}
_ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters", "layer_types")
_REQUIRED_INTEGERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)


@dataclasses.dataclass(frozen=True)
class Qwen2Config:
    """Shape of a Qwen2 decoder. Equality and hash leave out `raw`.

    Attributes:
        vocab_size: rows of the embedding that mean something; tables hold `padded_vocab_size` rows.
        head_dim: width of one attention head; `hidden_size / num_heads` where `config.json` does not say.
        rope_theta: base of the rotary frequencies.
        max_position_embeddings: longest context that the checkpoint declares, in tokens.
        raw: `config.json` as it was read, so that it can be written back with nothing lost.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    raw: Mapping[str, Any] = dataclasses.field(compare=False, repr=False)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and head tables in memory and in our checkpoints."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @classmethod
    def from_file(cls, path: epath.PathLike) -> "Qwen2Config":
        """Reads a `config.json`. Raises UserError naming the file and the field."""
        path = epath.Path(path)
        if not path.exists():
            raise UserError(f"{path}: no such file; a checkpoint directory must hold the model's config.json")
        try:
            raw = json.loads(path.read_text())
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: is not valid JSON ({error}); copy config.json again from its source") from error
        return cls.from_hf(raw, source=str(path))

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], source: str) -> "Qwen2Config":
        """Reads the mapping of a `config.json`, in transformers' old form and in version 5's.

        Args:
            raw: the parsed file.
            source: what to call it in error messages.

        Raises:
            UserError: a field is missing or malformed, or asks for a computation that is not implemented.
        """
        if not isinstance(raw, Mapping):
            raise UserError(f"{source}: holds a {type(raw).__name__}; expected a JSON object")
        if raw.get("model_type") != "qwen2":
            raise UserError(f"{source}: model_type is {raw.get('model_type')!r}; only 'qwen2' is implemented")
        for field in _REQUIRED_INTEGERS:
            _require_positive_integer(raw, field, source)
        _refuse_unimplemented(raw, source)
        heads, kv_heads = raw["num_attention_heads"], raw["num_key_value_heads"]
        if heads % kv_heads:
            raise UserError(
                f"{source}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}; "
                "grouped-query attention needs whole groups"
            )
        head_dim = raw.get("head_dim")
        if head_dim is None:
            if raw["hidden_size"] % heads:
                raise UserError(
                    f"{source}: hidden_size {raw['hidden_size']} is not a multiple of num_attention_heads {heads}; "
                    "set head_dim"
                )
            head_dim = raw["hidden_size"] // heads
        if not isinstance(head_dim, int) or head_dim <= 0 or head_dim % 2:
            raise UserError(f"{source}: head_dim is {head_dim!r}; rotary embeddings need a positive even integer")
        return cls(
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_positive_float(raw, "rms_norm_eps", source),
            rope_theta=_rope_theta(raw, source),
            max_position_embeddings=raw["max_position_embeddings"],
            tie_word_embeddings=_boolean(raw, "tie_word_embeddings", source),
            raw=dict(raw),
        )

    def to_hf(self) -> dict[str, Any]:
        """`raw` with only those fields changed in which this configuration differs from it."""
        before = Qwen2Config.from_hf(self.raw, source="config.json")
        out = dict(self.raw)
        for hf_name, name in _SHAPE_FIELDS.items():
            if getattr(self, name) != getattr(before, name):
                out[hf_name] = getattr(self, name)
        if self.rope_theta != before.rope_theta:
            if "rope_parameters" in out:
                out["rope_parameters"] = {**out["rope_parameters"], "rope_theta": self.rope_theta}
            if "rope_theta" in out:
                out["rope_theta"] = self.rope_theta
        return out


def _require_positive_integer(raw: Mapping[str, Any], field: str, source: str) -> None:
    value = raw.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        state = "is missing" if field not in raw else f"is {value!r}"
        raise UserError(f"{source}: {field} {state}; a positive integer is needed")


def _positive_float(raw: Mapping[str, Any], field: str, source: str) -> float:
    value = raw.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        state = "is missing" if field not in raw else f"is {value!r}"
        raise UserError(f"{source}: {field} {state}; a positive number is needed")
    return float(value)


def _boolean(raw: Mapping[str, Any], field: str, source: str) -> bool:
    value = raw.get(field)
    if not isinstance(value, bool):
        state = "is missing" if field not in raw else f"is {value!r}"
        raise UserError(f"{source}: {field} {state}; true or false is needed")
    return value


def _refuse_unimplemented(raw: Mapping[str, Any], source: str) -> None:
    for field, neutral in _NEUTRAL_VALUES.items():
        if field in raw and raw[field] not in neutral:
            raise UserError(
                f"{source}: {field} is {raw[field]!r}, which changes the computation and is not implemented; "
                f"only {neutral[0]!r} loads"
            )
    layer_types = raw.get("layer_types")
    if layer_types is not None and any(kind != "full_attention" for kind in layer_types):
        raise UserError(f"{source}: layer_types is {layer_types!r}; only full_attention is implemented")
    known = {*_NEUTRAL_VALUES, *_INERT_FIELDS, *_SHAPE_FIELDS, *_ROPE_FIELDS}
    if unknown := sorted(set(raw) - known):
        warnings.warn(f"{source}: unknown fields {', '.join(unknown)} are kept but not interpreted", stacklevel=3)


def _rope_theta(raw: Mapping[str, Any], source: str) -> float:
    """The rotary base, from `rope_theta` (old) or `rope_parameters` (transformers 5); scaled variants are refused."""
    for field in ("rope_scaling", "rope_parameters"):
        scaling = raw.get(field)
        if scaling is None:
            continue
        if not isinstance(scaling, Mapping):
            raise UserError(f"{source}: {field} is {scaling!r}; expected an object or null")
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        changed = sorted(set(scaling) - {"rope_type", "type", "rope_theta", "partial_rotary_factor"})
        if kind != "default" or changed or scaling.get("partial_rotary_factor", 1.0) != 1.0:
            raise UserError(
                f"{source}: {field} is {dict(scaling)!r}; only rope_type 'default' is implemented "
                "(no YaRN, no linear or dynamic scaling)"
            )
    values = {
        name: float(holder["rope_theta"])
        for name, holder in (("rope_theta", raw), ("rope_parameters", raw.get("rope_parameters") or {}))
        if holder.get("rope_theta") is not None
    }
    if not values:
        raise UserError(f"{source}: rope_theta is missing, also from rope_parameters; a positive number is needed")
    if len(set(values.values())) > 1:
        raise UserError(f"{source}: rope_theta {values['rope_theta']} and rope_parameters.rope_theta disagree")
    theta = next(iter(values.values()))
    if theta <= 0:
        raise UserError(f"{source}: rope_theta is {theta}; a positive number is needed")
    return theta
