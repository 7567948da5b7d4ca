"""FLOPs by formula: attention kernels and model FLOPs, against numbers worked out by hand."""

import pathlib

import pytest

from tests.models.tiny import tiny_config
from vibethinker_jax.models.config import Qwen2Config
from vibethinker_jax.planning.flops import executed_flops, sampling_model_flops, training_model_flops
from vibethinker_jax.planning.hlo import Shape, parse
from vibethinker_jax.planning.kernels import active_pairs, attention_flops, attention_kernels

ARCHITECTURE = pathlib.Path(__file__).parents[2] / "configs" / "models" / "qwen2.5-coder-3b.json"


def test_one_device_computes_the_blocks_on_and_below_the_diagonal() -> None:
    assert active_pairs(8, 1, 2, 2) == 4 + 3 + 2 + 1
    # queries 0-3 and 4-7 against keys 0-1, 2-3, 4-5, 6-7: 2 and 4 blocks
    assert active_pairs(8, 1, 4, 2) == 2 + 4
    # queries 0-1, ... against keys 0-3 and 4-7: 1, 1, 2, 2 blocks
    assert active_pairs(8, 1, 2, 4) == 6


def test_zigzag_shares_causal_work_equally() -> None:
    # 16 tokens on 2 devices, chunks of 4: device 0 has chunks 0 and 3, device 1 has 1 and 2; blocks of 4 are chunks:
    # device 0 computes 1 + 4 blocks, device 1 computes 2 + 3. The whole triangle is 10.
    assert active_pairs(16, 2, 4, 4) == 5
    # Contiguous halves: the second device computes 3 + 4.
    assert active_pairs(16, 2, 4, 4, layout="contiguous") == 7


def test_blocks_that_span_two_chunks_cost_what_the_later_one_sees() -> None:
    # One query block of 8 on device 0 holds tokens 0-3 and 12-15, so it sees all four key blocks; device 1's holds 4-11
    # and sees key blocks 0-3, 4-7, 8-11. Keys lie in zigzag order: 0-3, 12-15, 4-7, 8-11.
    assert active_pairs(16, 2, 8, 4) == 4


def test_a_last_block_may_be_short() -> None:
    # 10 tokens in blocks of 4: queries 0-3, 4-7, 8-9 see 1, 2 and 3 blocks of keys
    assert active_pairs(10, 1, 4, 4) == 6


def test_products_of_a_block() -> None:
    # QK and PV: 2 x 2 x 8 x 16 x 64 FLOPs per pair and head
    assert attention_flops(5, 8, 16, 64, 3, products=2) == 4 * 8 * 16 * 64 * 5 * 3
    assert attention_flops(5, 8, 16, 64, 3, products=5) == 10 * 8 * 16 * 64 * 5 * 3


def test_a_call_costs_its_share_of_the_queries_and_keys() -> None:
    kernels = attention_kernels(length=16, shards=2, head_dim=64, blocks=(4, 4), layout="zigzag")
    whole = 2 * 3 * 5 * 4 * 4 * 4 * 64  # rows, heads, pairs (above), 4 bq bkv head_dim
    steps = Shape("s32", (8,))
    queries, chunk = Shape("bf16", (2, 3, 8, 64)), Shape("bf16", (2, 3, 4, 64))
    keys, shard, interval = Shape("bf16", (2, 1, 16, 64)), Shape("bf16", (2, 1, 8, 64)), Shape("s32", (2, 2, 8))
    assert kernels["attention_forward"]([steps, queries, keys, keys, interval]) == whole
    assert kernels["attention_forward"]([steps, queries, shard, shard, interval]) == whole / 2  # of a ring
    assert kernels["attention_backward"]([steps, queries, queries, keys, keys, interval]) == 2.5 * whole
    assert kernels["attention_backward"]([steps, chunk, chunk, keys, keys, interval]) == 1.25 * whole


def test_kernels_are_known_by_the_name_of_their_operation() -> None:
    text = """
HloModule kernels

ENTRY %main (q: bf16[1,2,8,4], k: bf16[1,1,16,4]) -> f32[8] {
  %q = bf16[1,2,8,4]{3,2,1,0} parameter(0)
  %k = bf16[1,1,16,4]{3,2,1,0} parameter(1)
  %a = f32[8]{0} custom-call(%q, %k), custom_call_target="tpu_custom_call", metadata={op_name="f/attention_forward"}
  ROOT %b = f32[8]{0} custom-call(%q, %k), custom_call_target="tpu_custom_call", metadata={op_name="f/other"}
}
"""
    assert executed_flops(parse(text), {"attention_forward": lambda operands: 7.0 * len(operands)}) == 14.0


def test_model_flops_of_the_3b_row_are_the_documented_ones() -> None:
    model = Qwen2Config.from_file(ARCHITECTURE)
    assert training_model_flops(model, 1, 65536) == pytest.approx(3.11e15, rel=2e-3)
    assert training_model_flops(model, 128, 65536) == 128 * training_model_flops(model, 1, 65536)


def test_model_flops_of_a_tiny_model() -> None:
    # tied table 97 x 48; per layer norms 2 x 48, q 48 x 48 + 48, k and v 48 x 16 + 16, out 48 x 48, MLP 3 x 48 x 80
    parameters = 97 * 48 + 3 * (96 + 48 * 48 + 48 + 2 * (48 * 16 + 16) + 48 * 48 + 3 * 48 * 80) + 48
    model = tiny_config()
    assert training_model_flops(model, 2, 10) == 2 * (6 * parameters * 10 + 6 * 3 * 6 * 8 * 100)
    assert sampling_model_flops(model, 7, 20) == 7 * (2 * parameters + 4 * 3 * 6 * 8 * 20)
