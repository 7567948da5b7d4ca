"""A process that kills itself with SIGKILL at its n-th file operation: python -m tests.checkpoints.dying_child ...

Arguments: WHAT N [PATH ...]. N = 0 survives and prints how many operations there were. Operations are those that
Python audits: opening for writing, creating, renaming and removing files and directories.
"""

import os
import signal
import sys

OPERATIONS = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir"}
count = 0
fatal = int(sys.argv[2])
root = ""


def audit(event: str, args: tuple) -> None:
    global count
    if event != "open" and event not in OPERATIONS:
        return
    if not root or not isinstance(args[0], str | os.PathLike) or not os.fspath(args[0]).startswith(root):
        return  # Python's own files
    count += 1
    if count == fatal:
        os.kill(os.getpid(), signal.SIGKILL)


def convert(direction: str, in_place: bool, source: str, destination: str) -> None:
    from vibethinker_jax.checkpoints import convert as module
    from vibethinker_jax.checkpoints import directory

    if in_place:
        directory.on_object_store = lambda path: True
    getattr(module, direction)(source, destination)


def train(workdir: str) -> None:
    import jax.numpy as jnp

    from vibethinker_jax.checkpoints.training_store import TrainingStore

    with TrainingStore(workdir, keep=2) as store:
        first = (store.latest_step() or 0) + 1
        for step in range(first, 6 if fatal == 0 else 1000):
            params = {"a": jnp.full((64, 64), step, jnp.float32), "b": jnp.full(3, step, jnp.float32)}
            store.save(step, params, {"count": jnp.int32(step)}, {"step": step})


def main() -> None:
    global root
    what, _, *paths = sys.argv[1:]
    sys.addaudithook(audit)
    root = os.path.dirname(paths[-1])
    if what == "train":
        train(paths[0])
    else:
        convert(what.removesuffix("_in_place"), what.endswith("_in_place"), *paths)
    print(f"operations: {count}")


main()
