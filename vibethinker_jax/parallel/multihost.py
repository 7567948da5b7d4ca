"""Agreement between the processes of a run. With one process every function here is the identity."""

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def from_first(make: Callable[[], Any]) -> Any:
    """Calls `make` on the first process and gives what it returns (anything that JSON can hold) to all.

    What depends on one host's clock, disk or worker processes must pass through here before it may decide anything.
    An exception on the first process is raised on all.
    """
    if jax.process_count() == 1:
        return make()
    error: Exception | None = None
    payload = b""
    if jax.process_index() == 0:
        try:
            payload = json.dumps({"value": make()}).encode()
        except Exception as failure:  # raised below, after the others were told
            error, payload = failure, json.dumps({"error": f"{type(failure).__name__}: {failure}"}).encode()
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(payload))))
    buffer = np.frombuffer(payload, np.uint8) if jax.process_index() == 0 else np.zeros(size, np.uint8)
    received = json.loads(bytes(np.asarray(multihost_utils.broadcast_one_to_all(buffer), np.uint8)))
    if error is not None:
        raise error
    if "error" in received:
        raise RuntimeError(f"process 0 failed: {received['error']}")
    return received["value"]


def any_process(flag: bool) -> bool:
    """Whether the flag is set on any process."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.array(flag))))


def barrier(name: str) -> None:
    """Waits for all processes."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
