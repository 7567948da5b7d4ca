"""The HLO reader on hand-written programs, whose numbers are worked out beside them."""

import pytest

from vibethinker_jax.planning.collectives import axes_of, bytes_by_axes, bytes_by_kind, collectives, replica_groups
from vibethinker_jax.planning.flops import executed_flops
from vibethinker_jax.planning.hlo import parse, parse_shapes

# A loop of 5 turns around a fusion with a dot [8, 16] x [16, 4], and one dot [8, 4] x [4, 4] after it. The layouts,
# comments, and conditions are those of the TPU compiler, which records no trip counts.
LOOP = """
HloModule example, is_scheduled=true, entry_computation_layout={(f32[8,16]{1,0})->f32[8,4]{1,0}}

%fused (left: bf16[8,16], right: bf16[16,4]) -> f32[8,4] {
  %left = bf16[8,16]{1,0:T(8,128)(2,1)} parameter(0)
  %right = bf16[16,4]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  ROOT %dot.1 = f32[8,4]{1,0:T(8,128)} dot(%left, %right), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (state: (s32[], bf16[8,16], bf16[16,4], /*index=3*/f32[8,4])) -> (s32[], bf16[8,16], bf16[16,4], f32[8,4]) {
  %state = (s32[]{:T(128)}, bf16[8,16]{1,0}, bf16[16,4]{1,0}, /*index=3*/f32[8,4]{1,0}) parameter(0)
  %count = s32[]{:T(128)} get-tuple-element(%state), index=0
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%count, %one), metadata={op_name="a (b) c, d"}
  %a = bf16[8,16]{1,0} get-tuple-element(%state), index=1
  %b = bf16[16,4]{1,0} get-tuple-element(%state), index=2
  %product = f32[8,4]{1,0} fusion(%a, %b), kind=kOutput, calls=%fused
  ROOT %out = (s32[]{:T(128)}, bf16[8,16]{1,0}, bf16[16,4]{1,0}, f32[8,4]{1,0}) tuple(%next, %a, %b, %product)
}

%condition (state.1: (s32[], bf16[8,16], bf16[16,4], f32[8,4])) -> pred[] {
  %limit = s32[]{:T(128)} constant(7)
  %state.1 = (s32[]{:T(128)}, bf16[8,16]{1,0}, bf16[16,4]{1,0}, f32[8,4]{1,0}) parameter(0)
  %count.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  ROOT %less = pred[]{:T(512)} compare(%count.1, %limit), direction=LT
}

ENTRY %main (x: bf16[8,16], y: bf16[16,4], z: f32[4,4]) -> f32[8,4] {
  %x = bf16[8,16]{1,0} parameter(0)
  %y = bf16[16,4]{1,0} parameter(1)
  %z = f32[4,4]{1,0} parameter(2)
  %start = s32[]{:T(128)} constant(2)
  %zero = f32[] constant(0)
  %empty = f32[8,4]{1,0} broadcast(%zero), dimensions={}
  %before = (s32[]{:T(128)}, bf16[8,16]{1,0}, bf16[16,4]{1,0}, f32[8,4]{1,0}) tuple(%start, %x, %y, %empty)
  %loop = (s32[], bf16[8,16]{1,0}, bf16[16,4]{1,0}, f32[8,4]{1,0}) while(%before), condition=%condition, body=%body
  %last = f32[8,4]{1,0} get-tuple-element(%loop), index=3
  ROOT %dot.2 = f32[8,4]{1,0} dot(%last, %z), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def test_a_loop_counts_from_its_start_to_the_limit_of_its_condition() -> None:
    module = parse(LOOP)
    assert module.multiplicities == {"fused": 5, "body": 5, "condition": 6, "main": 1}
    # 5 turns of 2 * 8 * 4 * 16 = 1024, then 2 * 8 * 4 * 4 = 256
    assert executed_flops(module, {}) == 5 * 1024 + 256
    assert module.unknown_loops == []


def test_a_loop_that_the_compiler_unrolled_by_two_takes_half_the_turns() -> None:
    unrolled = LOOP.replace("%one = s32[]{:T(128)} constant(1)", "%one = s32[]{:T(128)} constant(2)")
    # From 2 up to 7 in steps of 2: three turns.
    assert executed_flops(parse(unrolled), {}) == 3 * 1024 + 256


def test_a_recorded_trip_count_is_believed_before_the_condition() -> None:
    recorded = LOOP.replace("body=%body\n", 'body=%body, backend_config={"known_trip_count":{"n":"3"}}\n')
    assert executed_flops(parse(recorded), {}) == 3 * 1024 + 256


def test_a_loop_that_data_ends_counts_once_and_is_named() -> None:
    endless = LOOP.replace("constant(7)", "get-tuple-element(%state.1), index=0")
    module = parse(endless.replace("%limit = s32[]{:T(128)} get", "%limit = s32[]{:T(128)} get"))
    assert executed_flops(module, {}) == 1024 + 256
    assert module.unknown_loops == ["loop"]


def test_a_condition_of_several_parts_is_bounded_by_its_limit() -> None:
    several = LOOP.replace(
        "ROOT %less = pred[]{:T(512)} compare(%count.1, %limit), direction=LT",
        "%less = pred[] compare(%limit, %count.1), direction=GT\n"
        "  %other = pred[] compare(%count.1, %count.1), direction=EQ\n"
        "  ROOT %both = pred[] and(%less, %other)",
    )
    assert executed_flops(parse(several), {}) == 5 * 1024 + 256


def test_shapes_know_their_bytes_and_their_memory() -> None:
    shapes = parse_shapes("(bf16[1,64,512]{2,1,0:T(8,128)(2,1)S(1)}, pred[3]{0}, s4[5]{0}, f32[], u32[2]{0:S(5)})")
    assert [shape.bytes for shape in shapes] == [1 * 64 * 512 * 2, 3, 3, 4, 8]
    assert [shape.memory_space for shape in shapes] == [1, 0, 0, 0, 5]


# A product [3, 5] x [5, 7] at every pair of an output and a window position that meet a real element of `a`: as the TPU
# compiler writes batched products. One pair costs 2 * 3 * 5 * 7 = 210.
BATCHED = """
HloModule batched

ENTRY %main (a: f32[2,3,5], b: f32[2,5,7]) -> f32[2,3,7] {
  %a = f32[2,3,5]{2,1,0} parameter(0)
  %b = f32[2,5,7]{2,1,0} parameter(1)
  ROOT %c = f32[2,3,7]{2,1,0} convolution(%a, %b), WINDOW, dim_labels=0bf_0io->0bf
}
"""


@pytest.mark.parametrize(
    ("window", "flops"),
    [
        # one element of `a` in two holes: positions 0 and 2 of the dilated input meet windows 0 and 1 once each
        ("window={size=2 stride=1 pad=0_0 lhs_dilate=2}", 420),
        # size 2, pad 1_0: output 0 sees (padding, a0), output 1 sees (a0, a1): three real positions
        ("window={size=2 pad=1_0}", 630),
        ("window={size=1}", 420),
    ],
)
def test_windows_that_meet_padding_or_holes_cost_nothing(window: str, flops: int) -> None:
    # The first window has a base of length 3 (two elements, one hole) and two outputs: 0 sees (a0, hole), 1 (hole, a1).
    assert executed_flops(parse(BATCHED.replace("WINDOW", window)), {}) == flops


def module_with(line: str) -> str:
    return f"""
HloModule collective

%sum (p: f32[], q: f32[]) -> f32[] {{
  %p = f32[] parameter(0)
  %q = f32[] parameter(1)
  ROOT %s = f32[] add(%p, %q)
}}

ENTRY %main (x: f32[16,8]) -> f32[16,8] {{
  %x = f32[16,8]{{1,0}} parameter(0)
  {line}
  ROOT %y = f32[16,8]{{1,0}} negate(%x)
}}
"""


MESH = {"replica": 1, "fsdp": 2, "context": 4, "tensor": 1}  # partition 4 f + c
X = 16 * 8 * 4  # bytes of %x
LINES = {  # line -> (kind, axes, bytes by the convention)
    "%c = f32[64,8]{1,0} all-gather(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}": (
        "all-gather",
        "context",
        4 * X,
    ),
    "%c = f32[32,8]{1,0} all-gather(%x), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}": (
        "all-gather",
        "fsdp",
        2 * X,
    ),
    "%c = f32[16,8]{1,0} all-reduce(%x), replica_groups=mesh['a'=2,'b'=4] {'b'}, to_apply=%sum": (
        "all-reduce",
        "context",
        X,
    ),
    "%c = f32[16,8]{1,0} all-reduce(%x), replica_groups=mesh['a'=8] {'a':(1)2}, to_apply=%sum": (
        "all-reduce",
        "fsdp",
        X,
    ),
    "%c = f32[2,8]{1,0} reduce-scatter(%x), replica_groups={}, dimensions={0}, to_apply=%sum": (
        "reduce-scatter",
        "fsdp x context",
        X,
    ),
    "%c = f32[16,8]{1,0} all-to-all(%x), replica_groups=[2,4]<=[8], dimensions={0}": ("all-to-all", "context", X),
    "%c = f32[16,8]{1,0} collective-permute(%x), source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,4}}": (
        "collective-permute",
        "context",
        X,
    ),
}


@pytest.mark.parametrize("line", LINES)
def test_bytes_of_a_collective_go_to_its_kind_and_axes(line: str) -> None:
    kind, axes, size = LINES[line]
    found = collectives(parse(module_with(line)), MESH)
    assert {name: count for name, count in bytes_by_kind(found).items() if count} == {kind: size}
    assert bytes_by_axes(found) == {axes: {kind: size}}


def test_the_two_halves_of_an_asynchronous_collective_are_one() -> None:
    lines = (
        "%c = (f32[16,8]{1,0}, f32[64,8]{1,0}) all-gather-start(%x), replica_groups=[2,4]<=[8], dimensions={0}\n"
        "  %d = f32[64,8]{1,0} all-gather-done(%c)"
    )
    found = collectives(parse(module_with(lines)), MESH)
    assert bytes_by_kind(found)["all-gather"] == 4 * X
    assert [each.blocking for each in found] == [False]


def test_a_collective_cut_into_steps_of_other_fusions_is_one() -> None:
    step = (
        "%c{} = f32[64,8]{{1,0}} all-gather(%x), channel_id=9, replica_groups=[2,4]<=[8], dimensions={{0}}, "
        'frontend_attributes={{chain_id="4"}}, backend_config={{"async_collective_fusion_config":{{"flag_end":"-1"}}}}'
    )
    found = collectives(parse(module_with("\n  ".join(step.format(i) for i in range(3)))), MESH)
    assert bytes_by_kind(found)["all-gather"] == 4 * X


def test_an_all_reduce_of_which_each_chip_keeps_a_slice_is_a_reduce_scatter() -> None:
    text = """
HloModule scatter

%sum (p: f32[], q: f32[]) -> f32[] {
  %p = f32[] parameter(0)
  %q = f32[] parameter(1)
  ROOT %s = f32[] add(%p, %q)
}

%all-reduce-scatter.1 (input: f32[16,8]) -> f32[4,8] {
  %input = f32[16,8]{1,0} parameter(0)
  %all = f32[16,8]{1,0} all-reduce(%input), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%sum
  %zero = s32[] constant(0)
  ROOT %own = f32[4,8]{1,0} dynamic-slice(%all, %zero, %zero), dynamic_slice_sizes={4,8}
}

ENTRY %main (x: f32[16,8]) -> f32[4,8] {
  %x = f32[16,8]{1,0} parameter(0)
  ROOT %y = f32[4,8]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
}
"""
    found = collectives(parse(text), MESH)
    assert bytes_by_axes(found) == {"context": {"reduce-scatter": X}}
    assert found[0].wire_bytes == X * 3 / 4


def test_wire_bytes_follow_the_ring_algorithms() -> None:
    for opcode, expected in (("all-reduce", 2 * X * 3 / 4), ("all-to-all", X * 3 / 4)):
        line = f"%c = f32[16,8]{{1,0}} {opcode}(%x), replica_groups=[2,4]<=[8], to_apply=%sum"
        [found] = collectives(parse(module_with(line)), MESH)
        assert found.wire_bytes == expected


def test_groups_of_a_mesh_with_reordered_devices() -> None:
    # devices in the order 0 4 1 5 2 6 3 7 along ('a', 'b'): groups along 'b' (size 2) are (0, 4), (1, 5), ...
    text = "mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}"
    [instruction] = [
        i
        for _, i in parse(module_with(f"%c = f32[16,8]{{1,0}} all-reduce(%x), replica_groups={text}")).instructions()
        if i.opcode == "all-reduce"
    ]
    groups = replica_groups(instruction, 8)
    assert groups == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert axes_of(groups, MESH) == ("fsdp",)
