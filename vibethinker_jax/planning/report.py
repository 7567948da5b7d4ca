"""The plan for people. For machines it is the dict that planning/plan.py returns:

config, topology, chips, hbm_bytes (usable, per chip), mesh, and under `steps`, per chip unless said otherwise:
  fits                    whether every program of the step fits the HBM together with all that stays there beside it
  argument_bytes, temp_bytes, peak_bytes, reserved_bytes   memory of its largest program; the last two count what stays
  held_bytes              what outlives a program: parameters, moments, accumulator, engine weights, caches
  micro_batches, tokens   of one execution over all chips; of a sampling step: one chunk, or one burst in all slots
  model_flops             what the model needs (DESIGN.md, planner), recomputation left out
  executed_flops          what the programs execute: every matrix product, kernels included, loops multiplied out
  collective_bytes        by kind, and by mesh axis in collective_bytes_by_axis (planning/collectives.py: convention)
  estimated_seconds, tokens_per_second_per_chip, mfu   estimates from the roofline, never measurements
  compile_seconds         on this machine
  programs                the same for each program, per execution, and what else is in memory meanwhile
"""

from collections.abc import Mapping, Sequence
from typing import Any

GIBI = 1 << 30


def format_plan(plan: Mapping[str, Any]) -> str:
    """A short text with one block per step."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan["mesh"].items() if size > 1) or "one chip"
    lines = [
        f"{plan['config']} on {plan['topology']}: {plan['chips']} chips, {mesh}, "
        f"{_gib(plan['hbm_bytes'])} of HBM per chip"
    ]
    for name, step in plan["steps"].items():
        lines += ["", *_step_lines(name, step, plan["hbm_bytes"])]
    return "\n".join(lines)


def _step_lines(name: str, step: Mapping[str, Any], hbm: int) -> list[str]:
    verdict = "FITS" if step["fits"] else "DOES NOT FIT"
    kind = f" in {step['micro_batches']} micro-batches" if step["micro_batches"] > 1 else ""
    lines = [
        f"{name}: {step['tokens']:,} tokens{kind}: {verdict}, peak {_gib(step['peak_bytes'])} of {_gib(hbm)} "
        f"({step['peak_bytes'] / hbm:.0%})"
    ]
    rows = [("held", ", ".join(f"{what} {_gib(size)}" for what, size in step["held_bytes"].items()))]
    for program, entry in step["programs"].items():
        rows.append((f"memory of {program}", _memory(entry)))
    executed = step["executed_flops"]
    if executed is None:
        rows.append(("FLOPs per chip", f"model {step['model_flops']:.3e}; not compiled, so nothing is executed"))
    else:
        rows += [
            (
                "FLOPs per chip",
                f"model {step['model_flops']:.3e}, executed {executed:.3e} ({step['executed_over_model']:.2f} times)",
            ),
            ("collectives", _collectives(step["collective_bytes_by_axis"])),
            (
                "estimates",
                f"{step['estimated_seconds']:.4g} s, {step['tokens_per_second_per_chip']:,.0f} tokens/s/chip, "
                f"MFU {step['mfu']:.1%} (roofline, not measured)",
            ),
        ]
    rows.append(("compiled in", f"{step['compile_seconds']:.0f} s"))
    rows += [("note", text) for text in notes(step)]
    width = max(len(label) for label, _ in rows)
    return lines + [f"  {label.ljust(width)}  {text}" for label, text in rows]


def notes(step: Mapping[str, Any]) -> list[str]:
    """What the reader should know of how the numbers came about."""
    found = []
    for name, program in step["programs"].items():
        if program.get("message"):
            found.append(f"{name}: the compiler says: {program['message']}")
        if program.get("unknown_loops"):
            found.append(f"{name}: {len(program['unknown_loops'])} loops of unknown length count as one turn")
        if program.get("unknown_kernels"):
            found.append(f"{name}: FLOPs of {', '.join(program['unknown_kernels'])} are not known and not counted")
    return found


def _memory(program: Mapping[str, Any]) -> str:
    temp = "?" if program["temp_bytes"] is None else _gib(program["temp_bytes"])
    beside = "".join(f" + {what} {_gib(size)}" for what, size in program["beside_bytes"].items() if size)
    host = f", {_gib(program['host_bytes'])} on the host" if program.get("host_bytes") else ""
    return (
        f"arguments {_gib(program['argument_bytes'])}, temporaries {temp}, peak {_gib(program['peak_bytes'])}"
        f"{f' with{beside[2:]} beside' if beside else ''}{host}"
    )


def _collectives(by_axis: Mapping[str, Mapping[str, int]]) -> str:
    parts = [
        f"{axes}: " + ", ".join(f"{kind} {_gib(size)}" for kind, size in table.items() if size)
        for axes, table in by_axis.items()
        if any(table.values())
    ]
    return "; ".join(parts) or "none"


def _gib(size: float) -> str:
    return f"{size / GIBI:.2f} GiB" if size >= GIBI / 10 else f"{size / (1 << 20):.2f} MiB"


def format_search(rows: Sequence[Mapping[str, Any]], hbm: int) -> str:
    """The table of a search: what fits, fastest first; a star marks what nothing beats in both memory and time."""
    header = ("", "mesh", "remat", "peak", "of HBM", "estimated tokens/s/chip", "estimated MFU")
    table = [header]
    for row in rows:
        rate = row["tokens_per_second_per_chip"]
        table.append(
            (
                "*" if row["pareto"] else "" if row["fits"] else "x",
                row["mesh"],
                row["remat"],
                _gib(row["peak_bytes"]) if row["peak_bytes"] is not None else "-",
                f"{row['peak_bytes'] / hbm:.0%}" if row["peak_bytes"] is not None else "-",
                f"{rate:,.0f}" if rate is not None else "-",
                f"{row['mfu']:.1%}" if row["mfu"] is not None else row.get("refused", "-"),
            )
        )
    widths = [max(len(line[column]) for line in table) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
    return "\n".join([*lines, "* on the Pareto front of memory and time, x does not fit"])
