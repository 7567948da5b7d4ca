"""`vibethinker plan`: compiles the programs of a configuration for a topology and adds up what they cost."""

import math
import time
from collections.abc import Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from vibethinker_jax.planning import cache
from vibethinker_jax.planning.collectives import bytes_by_axes, bytes_by_kind, collectives
from vibethinker_jax.planning.compiling import compile_with_text
from vibethinker_jax.planning.flops import executed_flops, unknown_kernels
from vibethinker_jax.planning.hlo import parse
from vibethinker_jax.planning.programs import Program, Step, place, read_model, steps_of
from vibethinker_jax.planning.roofline import estimate
from vibethinker_jax.planning.topology import Topology, open_topology, out_of_memory


def plan(
    config: ConfigDict, config_file: str, topology_name: str, *, use_cache: bool = True, only: str | None = None
) -> dict[str, Any]:
    """The plan of a configuration; see planning/report.py for what it holds.

    Args:
        config: of a stage, as `train` takes it.
        config_file: where it comes from; `model.architecture` is relative to it.
        topology_name: e.g. "v5e:4x4".
        use_cache: take a plan that was made before, if nothing that decides it has changed.
        only: plan no other step than this.

    Raises:
        UserError: no such topology, or the configuration does not fit it; names the field.
    """
    model = read_model(config, config_file)
    topology = open_topology(topology_name)
    placement = place(config, topology)
    steps = steps_of(config, model, placement)
    mesh = {name: int(size) for name, size in placement.mesh.shape.items()}
    result = {
        "config": config_file,
        "topology": topology_name,
        "chips": int(placement.mesh.devices.size),
        "hbm_bytes": topology.hbm_bytes,
        "mesh": mesh,
        "steps": {},
    }
    for name, make in steps.items():
        if only is not None and name != only:
            continue
        key = cache.key({"step": name, **config.to_dict()}, topology_name, dict(model.raw))
        entry = cache.load(key) if use_cache else None
        if entry is None:
            entry = plan_step(make(), mesh, topology)
            cache.store(key, entry)
        result["steps"][name] = entry
    return result


def plan_step(step: Step, mesh: Mapping[str, int], topology: Topology) -> dict[str, Any]:
    """Compiles the programs of a step; memory is that of the largest, the rest is summed over all executions."""
    chips = math.prod(mesh.values())
    programs = {name: measure(program, step, mesh, topology) for name, program in step.programs.items()}
    largest = max(programs.values(), key=lambda each: each["peak_bytes"])
    entry: dict[str, Any] = {
        "fits": all(program["fits"] for program in programs.values()),
        "argument_bytes": largest["argument_bytes"],
        "temp_bytes": largest["temp_bytes"],
        "peak_bytes": largest["peak_bytes"],
        "reserved_bytes": max(program["reserved_bytes"] for program in programs.values()),
        "held_bytes": dict(step.holds),
        "micro_batches": step.micro_batches,
        "tokens": step.tokens,
        "model_flops": step.model_flops / chips,
        "model_flops_all_chips": step.model_flops,
    }
    compiled = all(program["executed_flops"] is not None for program in programs.values())
    runs = {name: program.runs for name, program in step.programs.items()}

    def total(field: str) -> float | None:
        return sum(runs[name] * programs[name][field] for name in programs) if compiled else None

    seconds = total("estimated_seconds")
    executed = total("executed_flops")
    by_axis = {name: program["collective_bytes_by_axis"] for name, program in programs.items()}
    entry |= {
        "executed_flops": executed,
        "executed_over_model": executed / entry["model_flops"] if executed is not None else None,
        "collective_bytes": _sum_tables(runs, programs, "collective_bytes") if compiled else None,
        "collective_bytes_by_axis": {
            axes: _sum_tables(runs, by_axis, axes)
            for axes in sorted({axes for table in by_axis.values() for axes in table})
        },
        "estimated_seconds": seconds,
        "tokens_per_second_per_chip": step.tokens / seconds / chips if seconds else None,
        "mfu": entry["model_flops"] / seconds / topology.chip.bf16_flops if seconds else None,
        "compile_seconds": sum(program["compile_seconds"] for program in programs.values()),
        "programs": programs,
    }
    return entry


def measure(program: Program, step: Step, mesh: Mapping[str, int], topology: Topology) -> dict[str, Any]:
    """What one program costs per execution and chip; only memory if it does not compile for lack of that."""
    began = time.perf_counter()
    lowered = program.lower()
    traced = time.perf_counter()
    beside = sum(program.beside.values())
    result: dict[str, Any] = {"runs": program.runs, "beside_bytes": dict(program.beside)}
    try:
        compiled, text = compile_with_text(lowered)
    except jax.errors.JaxRuntimeError as error:
        needed = out_of_memory(str(error))
        if needed is None:
            raise
        return result | {
            "fits": False,
            "argument_bytes": sum(step.holds.values()) - beside,
            "temp_bytes": None,
            "peak_bytes": needed[0] + beside,
            "reserved_bytes": needed[0] + beside,
            "executed_flops": None,
            "collective_bytes_by_axis": {},
            "compile_seconds": time.perf_counter() - traced,
            "message": str(error).splitlines()[0],
        }
    finished = time.perf_counter()
    memory = compiled.memory_analysis()
    module = parse(text)
    found = collectives(module, mesh)
    seconds = estimate(module, found, step.kernels, topology.chip)
    arguments, outputs = memory.argument_size_in_bytes, memory.output_size_in_bytes
    # Two views of the same: the compiler's peak counts what is alive at once, and on-chip memory with it; what is
    # set aside before the program starts counts fragments, and buffers that are never alive together.
    peak = memory.peak_memory_in_bytes + beside
    reserved = arguments + memory.temp_size_in_bytes + outputs - memory.alias_size_in_bytes + beside
    return result | {
        "fits": max(peak, reserved) <= topology.hbm_bytes,
        "argument_bytes": arguments,
        "temp_bytes": memory.temp_size_in_bytes,
        "host_bytes": memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes,
        "peak_bytes": peak,
        "reserved_bytes": reserved,
        "executed_flops": executed_flops(module, step.kernels),
        "hbm_traffic_bytes": seconds.hbm_bytes,
        "collective_bytes": bytes_by_kind(found),
        "collective_bytes_by_axis": bytes_by_axes(found),
        "estimated_seconds": seconds.total,
        "estimated_parts": {part: getattr(seconds, part) for part in ("compute", "hbm", "host", "collectives")},
        "unknown_loops": module.unknown_loops,
        "unknown_kernels": unknown_kernels(module, step.kernels),
        "trace_seconds": traced - began,
        "compile_seconds": finished - traced,
    }


def _sum_tables(runs: Mapping[str, int], programs: Mapping[str, Any], field: str) -> dict[str, int]:
    summed: dict[str, int] = {}
    for name, program in programs.items():
        for kind, count in program.get(field, {}).items():
            summed[kind] = summed.get(kind, 0) + runs[name] * count
    return summed
