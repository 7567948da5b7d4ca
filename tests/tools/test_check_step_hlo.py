"""The checks on hand-written programs: a good one of each strategy, and one change for each thing that may go wrong."""

import re
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

TOOL = REPOSITORY / "tools" / "check_step_hlo.py"

# One row of 256 tokens over 4 devices, 6 query and 2 KV heads of 8, 3 layers, hidden size 10, 4 x 38 words. K of a
# whole row is [256, 2 * 8], scores of a device are [64, 256], logits of the row [256, 38].
GATHER = """
HloModule step, is_scheduled=true

%sum (p: f32[], q: f32[]) -> f32[] {
  %p = f32[] parameter(0)
  %q = f32[] parameter(1)
  ROOT %s = f32[] add(%p, %q)
}

%all-reduce-scatter.1 (whole: f32[10,30000]) -> f32[10,7500] {
  %whole = f32[10,30000] parameter(0)
  %all = f32[10,30000] all-reduce(%whole), ALL, to_apply=%sum
  %zero = s32[] constant(0)
  ROOT %own = f32[10,7500] dynamic-slice(%all, %zero, %zero), dynamic_slice_sizes={10,7500}
}

%forward (in: STATE) -> STATE {
  %in = STATE parameter(0)
  %i = s32[] get-tuple-element(%in), index=0
  %q1 = bf16[1,6,64,8] get-tuple-element(%in), index=1
  %k1 = bf16[64,16] get-tuple-element(%in), index=2
  %steps1 = s32[4] get-tuple-element(%in), index=3
  %row1 = bf16[256,16] all-gather(%k1), ALL, dimensions={0}, JVP(all_gather)
  %kv1 = bf16[1,2,256,8] bitcast(%row1)
  %attention_forward.1 = RESULTS custom-call(%steps1, %q1, %kv1, %kv1), JVP(attention_forward/pallas_call)
  ROOT %out1 = STATE tuple(%i, %q1, %k1, %steps1)
}

%backward (in: STATE) -> STATE {
  %in2 = STATE parameter(0)
  %i2 = s32[] get-tuple-element(%in2), index=0
  %q2 = bf16[1,6,64,8] get-tuple-element(%in2), index=1
  %k2 = bf16[64,16] get-tuple-element(%in2), index=2
  %steps2 = s32[4] get-tuple-element(%in2), index=3
  %row2 = bf16[256,16] all-gather(%k2), ALL, dimensions={0}, BACK(all_gather)
  %kv2 = bf16[1,2,256,8] bitcast(%row2)
  %attention_backward.1 = GRADIENTS custom-call(%steps2, %q2, %q2, %kv2, %kv2), BACK(attention_backward/pallas_call)
  %dk = f32[1,2,256,8] get-tuple-element(%attention_backward.1), index=1
  %dv = f32[1,2,256,8] get-tuple-element(%attention_backward.1), index=2
  %dk_rows = f32[256,16] bitcast(%dk)
  %dv_rows = f32[256,16] bitcast(%dv)
  %scatter.1 = (f32[64,16], f32[64,16]) reduce-scatter(%dk_rows, %dv_rows), ALL, dimensions={0}, to_apply=%sum
  ROOT %out2 = STATE tuple(%i2, %q2, %k2, %steps2)
}

%condition (in: STATE) -> pred[] {
  %in3 = STATE parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main (start: STATE, table: f32[38,10], big: f32[10,30000]) -> f32[] {
  %start = STATE parameter(0)
  %table = f32[38,10] parameter(1)
  %big = f32[10,30000] parameter(2)
  %first = STATE while(%start), condition=%condition, body=%forward, THRICE
  %logits = f32[16,38] broadcast(%table), dimensions={}
  %second = STATE while(%first), condition=%condition, body=%backward, THRICE
  %gradient = f32[10,7500] fusion(%big), kind=kCustom, calls=%all-reduce-scatter.1
  %kept = bf16[3,1,64,10] broadcast(%table), dimensions={}
  %zero.1 = f32[] constant(0)
  ROOT %norm = f32[] all-reduce(%zero.1), ALL, to_apply=%sum
}
"""
ABBREVIATIONS = {
    r"STATE": "(s32[], bf16[1,6,64,8], bf16[64,16], s32[4])",
    r"RESULTS": "(f32[1,6,64,8], f32[1,6,1,64])",
    r"GRADIENTS": "(f32[1,2,3,8,64], f32[1,2,256,8], f32[1,2,256,8])",
    r"ALL": "replica_groups={{0,1,2,3}}",
    r"THRICE": 'backend_config={"known_trip_count":{"n":"3"}}',
    r"JVP\((\S+)\)": r'metadata={op_name="jit(whole)/jvp()/while/body/shard_map/\1"}',
    r"BACK\((\S+)\)": r'metadata={op_name="jit(whole)/transpose(jvp())/while/body/shard_map/\1"}',
}
for short, long in ABBREVIATIONS.items():
    GATHER = re.sub(short, long, GATHER)


def permute(name: str, shape: str, operand: str, path: str) -> tuple[str, str]:
    pairs = "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}"
    return (
        f"%{name} = ({shape}, {shape}, u32[], u32[]) collective-permute-start(%{operand}), {pairs}, "
        f'metadata={{op_name="{path}/ppermute"}}',
        f'%{name}.d = {shape} collective-permute-done(%{name}), metadata={{op_name="{path}/ppermute"}}',
    )


def ring() -> str:
    """A layer's loop of three turns around a ring's of four, forward and then backward."""
    state = "(s32[], bf16[1,6,64,8], bf16[1,2,64,8], f32[1,2,64,8], s32[4])"

    def hop(name: str, phase: str, kernel: str, results: str, more: tuple[str, ...]) -> str:
        path = f"jit(whole)/{phase}/while/body/shard_map/while/body"
        shapes = {"k": "bf16[1,2,64,8]", "v": "bf16[1,2,64,8]", "dk": "f32[1,2,64,8]", "dv": "f32[1,2,64,8]"}
        pairs = [permute(f"{name}.{x}", shapes[x], f"{x[0]}.{name}", path) for x in ("k", "v", *more)]
        queries = ", ".join([f"%q.{name}"] * (2 if more else 1))
        lines = [
            f"%in.{name} = {state} parameter(0)",
            f"%i.{name} = s32[] get-tuple-element(%in.{name}), index=0",
            f"%q.{name} = bf16[1,6,64,8] get-tuple-element(%in.{name}), index=1",
            f"%k.{name} = bf16[1,2,64,8] get-tuple-element(%in.{name}), index=2",
            f"%v.{name} = bf16[1,2,64,8] get-tuple-element(%in.{name}), index=2",
            f"%d.{name} = f32[1,2,64,8] get-tuple-element(%in.{name}), index=3",
            f"%steps.{name} = s32[4] get-tuple-element(%in.{name}), index=4",
            *(start for start, _ in pairs),
            f"%{kernel}.1 = {results} custom-call(%steps.{name}, {queries}, %k.{name}, %v.{name}), "
            f'metadata={{op_name="{path}/{kernel}/pallas_call"}}',
            *(done for _, done in pairs),
            f"ROOT %o.{name} = {state} tuple(%i.{name}, %q.{name}, %{name}.k.d, %d.{name}, %steps.{name})",
        ]
        return f"%{name} (in: {state}) -> {state} {{\n  " + "\n  ".join(lines) + "\n}\n"

    def layer(name: str, body: str, last: tuple[tuple[str, str], ...] = ()) -> str:
        turns = 'backend_config={"known_trip_count":{"n":"4"}}'
        lines = [
            f"%in.{name} = {state} parameter(0)",
            f"%d.{name} = f32[1,2,64,8] get-tuple-element(%in.{name}), index=3",
            f"%loop.{name} = {state} while(%in.{name}), condition=%condition, body=%{body}, {turns}",
            *(line for pair in last for line in pair),
            f"ROOT %again.{name} = {state} copy(%loop.{name})",
        ]
        return f"%{name} (in: {state}) -> {state} {{\n  " + "\n  ".join(lines) + "\n}\n"

    after = "jit(whole)/transpose(jvp())/while/body/shard_map"
    turns = 'backend_config={"known_trip_count":{"n":"3"}}'
    return "\n".join(
        [
            "HloModule step, is_scheduled=true\n",
            hop("hop1", "jvp()", "attention_forward", "(f32[1,6,64,8], f32[1,6,1,64])", ()),
            hop(
                "hop2",
                "transpose(jvp())",
                "attention_backward",
                "(f32[1,2,3,8,64], f32[1,2,64,8], f32[1,2,64,8])",
                ("dk", "dv"),
            ),
            layer("layer1", "hop1"),
            layer(
                "layer2", "hop2", tuple(permute(f"last.{x}", "f32[1,2,64,8]", "d.layer2", after) for x in ("dk", "dv"))
            ),
            f"%condition (in: {state}) -> pred[] {{",
            f"  %in.c = {state} parameter(0)",
            "  ROOT %go = pred[] constant(true)\n}\n",
            f"ENTRY %main (start: {state}) -> {state} {{",
            f"  %start = {state} parameter(0)",
            f"  %first = {state} while(%start), condition=%condition, body=%layer1, {turns}",
            f"  ROOT %second = {state} while(%first), condition=%condition, body=%layer2, {turns}",
            "}",
        ]
    )


RING = ring()


@pytest.fixture(scope="module")
def checks():
    sys.path.insert(0, str(TOOL.parent))
    import step_hlo_checks

    return step_hlo_checks


@pytest.fixture(scope="module")
def judge(checks):
    """(text, strategy) -> names of the checks that fail."""

    def judge(text, strategy="gather"):
        facts = checks.Facts(
            length=256,
            shards=4,
            rows=1,
            layers=3,
            kv_heads=2,
            heads=6,
            head_dim=8,
            vocabulary=152,
            vocabulary_shards=4,
            columns=10,
            widths=frozenset({10, 48, 8, 38, 152}),
            strategy=strategy,
        )
        return {name for name, finding in checks.judge(text, facts).items() if finding.bad}

    return judge


def replaced(text, old, new):
    assert old in text
    return text.replace(old, new)


def test_good_programs_pass(judge):
    assert judge(GATHER) == set()
    assert judge(RING, "ring") == set()


@pytest.mark.parametrize(
    ("check", "old", "new"),
    [
        # All scores of a device, also in blocks, which have no dimension of the row's length.
        ("scores", "f32[16,38] broadcast", "f32[6,64,256] broadcast"),
        ("scores", "f32[16,38] broadcast", "pred[4,16,16,16] broadcast"),
        ("scores", "f32[16,38] broadcast", "f32[64,8,256] broadcast"),
        # Logits of a quarter of the row's tokens, or of a device's tokens over the whole vocabulary.
        ("logits", "f32[16,38] broadcast", "f32[1,64,38] broadcast"),
        ("logits", "f32[16,38] broadcast", "bf16[16,152] broadcast"),
        ("forward-once", "while/body/shard_map/attention_forward", "transpose(jvp())/shard_map/attention_forward"),
        ("forward-once", '"n":"3"}}\n  %logits', '"n":"6"}}\n  %logits'),
        ("kv-heads", "%kv2 = bf16[1,2,256,8]", "%kv2 = bf16[1,6,256,8]"),
        ("kv-heads", "%row1 = bf16[256,16]", "%row1 = bf16[256,48]"),
        ("kv-gradients", "reduce-scatter(%dk_rows, %dv_rows)", "all-reduce(%dk_rows, %dv_rows)"),
        ("kv-gradients", "reduce-scatter(%dk_rows, %dv_rows)", "reduce-scatter(%dk_rows)"),
        ("all-reduce", "calls=%all-reduce-scatter.1", "calls=%renamed"),
        ("table", "%logits = f32[16,38] broadcast", "%logits = f32[152,10] all-gather"),
        ("kept-rows", "bf16[3,1,64,10] broadcast", "bf16[3,1,256,2,8] broadcast"),
    ],
)
def test_a_fault_of_a_gathering_step_is_noticed(judge, check, old, new):
    text = replaced(GATHER, old, new)
    if new.endswith("%renamed"):
        text = replaced(text, "%all-reduce-scatter.1 (", "%renamed (")
    assert check in judge(text)


def test_a_kernel_of_the_wrong_loop_is_noticed(judge):
    """The forward kernel inside of the loop with the backward kernel, whatever its name says."""
    [line] = [line for line in GATHER.splitlines() if "%attention_forward.1 =" in line]
    again = line.replace("forward.1", "forward.2").replace("1, %q1, %kv1, %kv1", "2, %q2, %kv2, %kv2")
    assert judge(replaced(GATHER, "  %dk = ", f"{again}\n  %dk = ")) == {"forward-once"}


def moved(text, line_with, before):
    """A line put before another."""
    lines = text.splitlines()
    [place] = [n for n, line in enumerate(lines) if line_with in line]
    line = lines.pop(place)
    [target] = [n for n, other in enumerate(lines) if before in other]
    lines.insert(target, line)
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("transfer", "kernel"), [("hop1.k", "forward"), ("hop1.v", "forward"), ("hop2.dv", "backward")]
)
def test_a_transfer_that_a_kernel_waits_for_is_noticed(judge, transfer, kernel):
    assert judge(moved(RING, f"%{transfer}.d = ", f"%attention_{kernel}.1 = "), "ring") == {"ring-overlap"}


def test_faults_of_a_ring_are_noticed(judge):
    assert judge(replaced(RING, "f32[1,2,64,8] collective-permute-done", "f32[1,2,64,8] copy"), "ring") >= {
        "ring-overlap"
    }
    repeated = replaced(RING, "%hop1.k = (bf16[1,2,64,8], bf16[1,2,64,8]", "%hop1.k = (bf16[1,6,64,8], bf16[1,6,64,8]")
    assert judge(repeated, "ring") == {"kv-heads"}
    rounded = replaced(RING, "%d.hop2 = f32[1,2,64,8]", "%d.hop2 = bf16[1,2,64,8]")
    assert judge(rounded, "ring") == {"kv-gradients"}


def test_a_step_without_kernels_passes_no_check_of_them(judge):
    text = GATHER.replace("attention_forward/", "forward/").replace("attention_backward/", "backward/")
    assert {"forward-once", "kv-heads"} <= judge(text)


def test_the_command_line_refuses_what_it_does_not_know():
    for arguments, message in ((["--variant", "worse"], "invalid choice"), ([], "--config is missing")):
        done = subprocess.run([sys.executable, TOOL, *arguments], capture_output=True, text=True)
        assert done.returncode == 2
        assert message in done.stderr


@pytest.mark.slow
def test_small_steps_pass_and_their_variants_fail_where_they_should():
    pytest.importorskip("libtpu")
    done = subprocess.run([sys.executable, TOOL, "--self-test"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "self-test: ok, 10 steps" in done.stdout
