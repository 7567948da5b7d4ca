"""FLOPs of matrix products: what a program executes, from its HLO, and what the model needs, from a formula.

Only products are counted (dots, convolutions, attention kernels), two operations per multiply-add, as usual for
model FLOPs; element-wise work is not.
"""

import re
from collections.abc import Mapping

import numpy as np

from vibethinker_jax.models.config import Qwen2Config
from vibethinker_jax.models.parameters import count_parameters
from vibethinker_jax.planning.hlo import Computation, Instruction, Module
from vibethinker_jax.planning.kernels import KernelFlops


def executed_flops(module: Module, kernels: Mapping[str, KernelFlops]) -> float:
    """FLOPs of one execution of the program on one chip, loops multiplied out.

    Args:
        module: the optimized program.
        kernels: FLOPs of one call, by a part of the name that a kernel was given (planning/kernels.py).
    """
    runs = module.multiplicities
    return sum(
        runs[computation.name] * instruction_flops(computation, instruction, kernels)
        for computation, instruction in module.instructions()
        if runs[computation.name]
    )


def instruction_flops(computation: Computation, instruction: Instruction, kernels: Mapping[str, KernelFlops]) -> float:
    """FLOPs of an instruction by itself, without those of computations that it calls."""
    if instruction.opcode == "dot":
        return dot_flops(computation, instruction)
    if instruction.opcode == "convolution":
        return convolution_flops(computation, instruction)
    if instruction.opcode == "custom-call" and "tpu_custom_call" in instruction.attributes:
        operands = [shape for name in instruction.operands for shape in computation.instructions[name].shapes]
        text = f"{instruction.op_name} {instruction.name}"
        return next((flops(operands) for name, flops in kernels.items() if name in text), 0.0)
    return 0.0


def unknown_kernels(module: Module, kernels: Mapping[str, KernelFlops]) -> list[str]:
    """Names of Pallas kernels in the program whose FLOPs are not given, and count zero."""
    found = {
        instruction.op_name or instruction.name
        for computation, instruction in module.instructions()
        if module.multiplicities[computation.name]
        and instruction.opcode == "custom-call"
        and "tpu_custom_call" in instruction.attributes
        and not instruction_flops(computation, instruction, kernels)
    }
    return sorted(found)


def dot_flops(computation: Computation, instruction: Instruction) -> float:
    """2 x result elements x contracted elements."""
    left = computation.operand(instruction, 0).shapes[0].dimensions
    contracted = _integers(instruction.attribute("lhs_contracting_dims") or "{}")
    return 2.0 * instruction.shapes[0].elements * float(np.prod([left[i] for i in contracted], initial=1))


def convolution_flops(computation: Computation, instruction: Instruction) -> float:
    """2 x batch x output features x input features x (output, window) position pairs that are not padding.

    The TPU compiler writes batched products as convolutions whose windows mostly hit padding or holes between
    dilated elements; those cost nothing.
    """
    left = computation.operand(instruction, 0).shapes[0].dimensions
    labels = instruction.attribute("dim_labels")
    assert labels is not None, instruction
    left_labels, _, out_labels = re.split(r"_|->", labels)
    out = instruction.shapes[0].dimensions
    groups = int(instruction.attribute("feature_group_count") or 1)
    batch_groups = int(instruction.attribute("batch_group_count") or 1)
    window = _window(instruction.attributes)
    pairs = 1
    spatial = sorted(label for label in left_labels if label.isdigit())
    for position, label in enumerate(spatial):
        pairs *= _valid_pairs(
            left[left_labels.index(label)],
            out[out_labels.index(label)],
            window["size"][position] if "size" in window else 1,
            window["stride"][position] if "stride" in window else 1,
            window["pad"][position] if "pad" in window else 0,
            window["lhs_dilate"][position] if "lhs_dilate" in window else 1,
            window["rhs_dilate"][position] if "rhs_dilate" in window else 1,
        )
    batch, features = left[left_labels.index("b")], left[left_labels.index("f")]
    out_features = out[out_labels.index("f")]
    return 2.0 * (batch // batch_groups) * (features // groups) * out_features * pairs


def _valid_pairs(length: int, out: int, size: int, stride: int, low: int, dilation: int, window_dilation: int) -> int:
    """Pairs of an output position and a window element that meet an element of the input."""
    at = np.arange(out)[:, None] * stride - low + np.arange(size)[None] * window_dilation
    return int(np.count_nonzero((at >= 0) & (at <= (length - 1) * dilation) & (at % dilation == 0)))


def _window(attributes: str) -> dict[str, list[int]]:
    """window={size=2x2 pad=0_0x1_1 ...} -> sizes per spatial dimension; of padding, the lower."""
    match = re.search(r"\bwindow=\{([^}]*)\}", attributes)
    fields = dict(part.split("=") for part in match.group(1).split()) if match else {}
    return {
        name: [int(part.split("_")[0]) for part in value.split("x")]
        for name, value in fields.items()
        if name in ("size", "stride", "pad", "lhs_dilate", "rhs_dilate")
    }


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.strip("{}").split(",") if part.strip()]


def training_model_flops(model: Qwen2Config, rows: int, length: int) -> float:
    """Forward and backward over rows of one causal document of `length` tokens, over all chips.

    6 N S + 6 layers heads head_dim S^2 per row: 3.11e15 for Qwen2.5-3B at 65,536. Recomputation is not in it.
    """
    attention = 6.0 * model.num_layers * model.num_heads * model.head_dim * length**2
    return rows * (6.0 * count_parameters(model) * length + attention)


def sampling_model_flops(model: Qwen2Config, tokens: int, context: int) -> float:
    """Forward only: 2 N per token, and attention of each over `context` keys, over all chips."""
    return tokens * (
        2.0 * count_parameters(model) + 4.0 * model.num_layers * model.num_heads * model.head_dim * context
    )
