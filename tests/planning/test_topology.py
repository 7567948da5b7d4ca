"""Names of topologies, messages about what is missing, and the compiler's complaints about memory."""

from typing import Any

import pytest

from vibethinker_jax.errors import UserError
from vibethinker_jax.planning import command, topology


@pytest.mark.parametrize("name", ["v9:2x2", "v5e", "v5e:", "v5e:2x", "v5e:two", "TPU v5e:2x2"])
def test_a_name_that_is_no_topology_is_answered_with_those_that_are(name: str) -> None:
    with pytest.raises(UserError, match=r"--topology is '.*v5e:4x4.*v5p:2x2x4.*v6e:2x2"):
        topology.open_topology(name)


def test_without_libtpu_the_verb_names_the_extra_that_has_it(monkeypatch: Any) -> None:
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(command, "set_environment", lambda: None)
    with pytest.raises(UserError, match=r"libtpu is not installed.*pip install 'vibethinker-jax\[tpu\]'"):
        command.run(["--config", "configs/sft_stage1.py"], "v5e:2x2", as_json=True, search=False, use_cache=False)


def test_topologies_for_a_mesh_have_its_number_of_chips() -> None:
    assert topology.names_with(16, multiples=False) == ["v5e:4x4", "v5p:2x2x4", "v6e:4x4"]
    assert topology.names_with(128, multiples=True) == [
        "v5e:8x16", "v5e:16x16", "v5p:4x4x8", "v5p:4x8x8", "v6e:8x16", "v6e:16x16",
    ]  # fmt: skip
    assert topology.names_with(3, multiples=True) == []


def test_complaints_about_hbm_give_what_is_needed_and_what_is_there() -> None:
    gibi = 1 << 30
    newer = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (50.50G) exceeds available HBM (15.75G). HLO module: jit_whole."
    )
    older = (
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 1.25T of 95.75G hbm. Exceeded hbm capacity by "
        "1.15T."
    )
    assert topology.out_of_memory(newer) == (50.5 * gibi, 15.75 * gibi)
    assert topology.out_of_memory(older) == (1280 * gibi, 95.75 * gibi)


@pytest.mark.parametrize(
    "message",
    [
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 20.00M of 16.00M vmem.",
        "INVALID_ARGUMENT: Mosaic failed to compile TPU kernel",
    ],
)
def test_other_failures_of_the_compiler_are_not_about_hbm(message: str) -> None:
    assert topology.out_of_memory(message) is None


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--config", "configs/a.py"], "configs/a.py"),
        (["--config=configs/a.py:tiny", "--config.mesh.fsdp=2"], "configs/a.py"),
    ],
)
def test_the_config_file_is_found_among_the_arguments(arguments: list[str], expected: str) -> None:
    assert command._config_file(arguments) == expected
