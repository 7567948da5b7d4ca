"""Traffic and estimated seconds of hand-written programs."""

import pytest

from vibethinker_jax.planning.chips import Chip
from vibethinker_jax.planning.collectives import collectives
from vibethinker_jax.planning.hlo import parse
from vibethinker_jax.planning.roofline import HBM, HOST, estimate, traffic

KIB = 1024
# `fused` reads a slice of %stack and writes a slice of %state in place; the rest are one line each.
TEXT = """
HloModule traffic

%fused (stack: f32[8,16,16], state: f32[8,16,16], at: s32[]) -> f32[8,16,16] {
  %stack = f32[8,16,16]{2,1,0} parameter(0)
  %state = f32[8,16,16]{2,1,0} parameter(1)
  %at = s32[] parameter(2)
  %zero = s32[] constant(0)
  %slice = f32[1,16,16]{2,1,0} dynamic-slice(%stack, %at, %zero, %zero), dynamic_slice_sizes={1,16,16}
  %negative = f32[1,16,16]{2,1,0} negate(%slice)
  ROOT %updated = f32[8,16,16]{2,1,0} dynamic-update-slice(%state, %negative, %at, %zero, %zero)
}

ENTRY %main (x: f32[8,16,16], y: f32[8,16,16], i: s32[]) -> f32[8,16,16] {
  %x = f32[8,16,16]{2,1,0} parameter(0)
  %y = f32[8,16,16]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  %buffer = f32[8,16,16]{2,1,0} custom-call(), custom_call_target="AllocateBuffer"
  %fusion = f32[8,16,16]{2,1,0} fusion(%x, %y, %i), kind=kLoop, calls=%fused
  %near = f32[8,16,16]{2,1,0:T(8,128)S(1)} copy(%x)
  %start = (f32[8,16,16]{2,1,0:S(5)}, f32[8,16,16]{2,1,0}, u32[]{:S(2)}) copy-start(%y)
  %done = f32[8,16,16]{2,1,0:S(5)} copy-done(%start)
  %part = ((f32[8,16,16]{2,1,0}), f32[1,16,16]{2,1,0:S(1)}, s32[]{:S(2)}) slice-start(%x), slice={[0:1], [0:16], [0:16]}
  %end = f32[1,16,16]{2,1,0:S(1)} slice-done(%part)
  ROOT %sum = f32[8,16,16]{2,1,0} add(%x, %y)
}
"""


@pytest.mark.parametrize(
    ("name", "hbm", "host"),
    [
        ("fusion", 1 + 1, 0),  # one slice in, one out (and the index, below a KiB)
        ("near", 8, 0),  # read from HBM, written on the chip
        ("start", 8, 8),  # from HBM to the host
        ("done", 0, 0),
        ("part", 1, 0),
        ("end", 0, 0),
        ("sum", 24, 0),
        ("buffer", 0, 0),
    ],
)
def test_an_instruction_moves_what_it_reads_and_writes(name: str, hbm: int, host: int) -> None:
    module = parse(TEXT)
    main = module.computations["main"]
    instruction = main.instructions[name]
    assert traffic(module, main, instruction, HBM) // KIB == hbm
    assert traffic(module, main, instruction, HOST) // KIB == host


CHIP = Chip(bf16_flops=1e3, hbm_bandwidth=1e3, host_bandwidth=1e3, link_bandwidth=10.0)


def test_seconds_add_up_over_instructions() -> None:
    seconds = estimate(parse(TEXT), [], {}, CHIP)
    moved = (2 + 8 + 8 + 1 + 24) * KIB + 4  # the index of the fusion
    assert seconds.hbm_bytes == moved
    assert seconds.hbm == pytest.approx(moved / 1e3)
    assert seconds.host == pytest.approx(8 * KIB / 1e3)
    assert seconds.total == pytest.approx(moved / 1e3)


@pytest.mark.parametrize(("start", "blocks"), [("", True), ("-start", False)])
def test_only_blocking_collectives_add_to_the_time_of_the_rest(start: str, blocks: bool) -> None:
    line = "%c = f32[8,16,16]{2,1,0} all-gather" + start + "(%y), replica_groups={{0,1}}, dimensions={0}\n"
    module = parse(TEXT.replace("  ROOT %sum", f"  {line}  ROOT %sum"))
    found = collectives(module, {"fsdp": 2})
    sending = 8 * KIB / 20  # half of the result of 16 KiB, over two links
    seconds = estimate(module, found, {}, CHIP)
    assert seconds.collectives == pytest.approx(sending)
    busy = seconds.hbm
    assert seconds.total == pytest.approx(busy + sending if blocks else max(busy, sending))
    assert sending > busy  # so that the two cases differ
