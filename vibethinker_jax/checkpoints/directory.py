"""Directories that come into being whole or not at all.

On a file system the contents are written to a sibling, `NAME.partial`, and renamed at the end. Object stores have no
atomic rename, so there the contents go straight to their place; every format here has one file without which nothing
loads (config.json of a Hugging Face directory, manifest.json of ours), and writers write that file last.
"""

import contextlib
import os
import uuid
from collections.abc import Iterator

import jax
from etils import epath

from vibethinker_jax.errors import UserError

PARTIAL_SUFFIX = ".partial"
# Names the process that fills a partial directory, so that a second one that starts over is noticed.
_OWNER_FILE = ".owner"


def absolute_path(path: epath.PathLike) -> epath.Path:
    """The path made absolute where it is local (Orbax accepts no other), with `~` expanded."""
    text = os.fspath(path)
    return epath.Path(text) if "://" in text else epath.Path(os.path.abspath(os.path.expanduser(text)))


def on_object_store(path: epath.Path) -> bool:
    """Whether the path is on an object store such as gs://, which renames by copying."""
    return "://" in os.fspath(path)


def is_main_process() -> bool:
    """Whether this process writes the files that are not sharded."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Waits until all processes are here. `name` must be the same in all of them."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


@contextlib.contextmanager
def new_directory(destination: epath.PathLike) -> Iterator[epath.Path]:
    """Yields a directory to fill, which becomes `destination` if the block ends without an exception.

    All processes enter together and get the same path; the first one creates, renames and removes. What an
    interrupted earlier attempt has left beside `destination` is removed.

    Raises:
        UserError: `destination` exists and is not an empty directory, or another process took over meanwhile.
    """
    destination = absolute_path(destination)
    _require_unused(destination)
    barrier(f"{destination}: checked")
    in_place = on_object_store(destination)
    partial = destination if in_place else destination.parent / (destination.name + PARTIAL_SUFFIX)
    token = uuid.uuid4().hex
    if is_main_process():
        if not in_place and partial.exists():
            partial.rmtree()
        partial.mkdir(parents=True, exist_ok=in_place)
        if not in_place:
            (partial / _OWNER_FILE).write_text(token)
    barrier(f"{destination}: created")
    try:
        yield partial
        barrier(f"{destination}: filled")
        if is_main_process() and not in_place:
            _rename(partial, destination, token)
    except BaseException:
        if is_main_process() and (in_place or _owner(partial) == token):
            partial.rmtree()
        raise
    barrier(f"{destination}: complete")


def _require_unused(destination: epath.Path) -> None:
    if destination.name.endswith(PARTIAL_SUFFIX):
        raise UserError(f"{destination}: names that end in {PARTIAL_SUFFIX} are for unfinished writes; choose another")
    if not destination.exists():
        return
    if not destination.is_dir():
        raise UserError(f"{destination}: is a file; choose a directory that does not exist yet")
    if any(True for _ in destination.iterdir()):
        raise UserError(f"{destination}: exists and is not empty; remove it or choose another destination")


def _owner(partial: epath.Path) -> str | None:
    file = partial / _OWNER_FILE
    return file.read_text() if file.exists() else None


def _rename(partial: epath.Path, destination: epath.Path, token: str) -> None:
    if _owner(partial) != token:
        raise UserError(f"{partial}: another process has started to write {destination}; run one at a time")
    (partial / _OWNER_FILE).unlink()
    if destination.exists():
        destination.rmdir()  # empty when we began; fails if someone has put something there since
    partial.rename(destination)
