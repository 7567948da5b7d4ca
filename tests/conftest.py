"""Fixtures shared by all tests: a CPU mesh of eight fake devices, the compilation cache, and optional real data."""

import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
# Threads for the fake devices: independent collectives of eight devices that wait for each other on fewer threads than
# waiters never end.
os.environ.setdefault("NPROC", "32")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(pathlib.Path.home() / ".cache" / "vibethinker_jax" / "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")

import hypothesis
import pytest

# The same examples in every run: a test that passed does not fail for luck.
hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.load_profile("repeatable")

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_dir() -> pathlib.Path:
    """The directory of real data beside the checkout (VIBETHINKER_SHARED overrides it)."""
    path = pathlib.Path(os.environ.get("VIBETHINKER_SHARED", REPOSITORY.parent / "shared"))
    if not (path / "data").is_dir():
        pytest.skip(f"no real data: {path}/data is absent (set VIBETHINKER_SHARED to a directory that has it)")
    return path
