"""One optimizer step from any number of equally shaped micro-batches.

A loss gives an unreduced sum, what to divide it by, and metrics. Micro-batches add all three and the gradient of the
sum; the division happens once, so a step over many micro-batches is the step over one big batch, whatever their
lengths, and the number of micro-batches never recompiles anything.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vibethinker_jax.errors import UserError
from vibethinker_jax.models.parameters import Params, abstract_params, parameter_shardings
from vibethinker_jax.objectives.metrics import Metrics
from vibethinker_jax.parallel.rules import Placement
from vibethinker_jax.training.forward import Batch, PackedForward
from vibethinker_jax.training.optimizer import optimizer_shardings

# (params, batch) -> (loss sum, denominator, metrics)
Loss = Callable[[Params, Batch], tuple[jax.Array, jax.Array, Metrics]]


class TrainState(NamedTuple):
    """What an optimizer step reads and replaces: float32 master weights and optimizer state."""

    params: Params
    opt_state: optax.OptState


class Accumulated(NamedTuple):
    """Sums over the micro-batches of one step, not divided yet."""

    gradient: Params
    loss: jax.Array
    denominator: jax.Array
    metrics: Metrics


class TrainStep:
    """Compiled functions of one kind of training step, with explicit shardings and donated state.

    Args:
        loss: pure function of (params, batch).
        optimizer: from training/optimizer.py.
        forward: the model, the mesh on which everything lives, and the layout of rows on it.
        offload: keep the optimizer's moments in host memory between steps; they visit the device for the update.

    Raises:
        UserError: `offload` without a mesh.
    """

    def __init__(
        self, loss: Loss, optimizer: optax.GradientTransformation, forward: PackedForward, *, offload: bool = False
    ) -> None:
        self.forward, self.model, self.placement = forward, forward.model, forward.placement
        self.optimizer, self.offload = optimizer, offload
        self._loss = loss
        params = parameter_shardings(self.model, self.placement)
        on_device = optimizer_shardings(optimizer, self.model, self.placement)
        at_rest = optimizer_shardings(optimizer, self.model, self.placement, offload=offload)
        self.state_shardings = TrainState(params, at_rest)
        everywhere = self.placement.replicated()
        accumulated = Accumulated(params, everywhere, everywhere, everywhere)

        def first(params: Params, batch: Batch) -> Accumulated:
            def scalar(params: Params) -> tuple[jax.Array, tuple[jax.Array, Metrics]]:
                loss_sum, denominator, metrics = loss(params, batch)
                return loss_sum, (denominator, metrics)

            (loss_sum, (denominator, metrics)), gradient = jax.value_and_grad(scalar, has_aux=True)(params)
            return Accumulated(gradient, loss_sum, denominator, metrics)

        def add(total: Accumulated, params: Params, batch: Batch) -> Accumulated:
            new = first(params, batch)
            return Accumulated(
                jax.tree.map(jnp.add, total.gradient, new.gradient),
                total.loss + new.loss,
                total.denominator + new.denominator,
                total.metrics.add(new.metrics),
            )

        def update(state: TrainState, total: Accumulated) -> tuple[TrainState, Metrics]:
            scale = jnp.where(total.denominator > 0, 1 / total.denominator, 0.0)
            gradient = jax.tree.map(lambda g: g * scale, total.gradient)
            moments = jax.device_put(state.opt_state, on_device) if offload else state.opt_state
            updates, opt_state = optimizer.update(gradient, moments, state.params)
            norms = {"gradient_norm": optax.tree.norm(gradient), "update_norm": optax.tree.norm(updates)}
            once = jnp.float32(1)
            metrics = total.metrics.add(
                Metrics(
                    means={"loss": (total.loss, total.denominator), **{name: (norms[name], once) for name in norms}}
                )
            )
            return TrainState(optax.apply_updates(state.params, updates), opt_state), metrics

        def whole(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            return update(state, first(state.params, batch))

        out = (self.state_shardings, everywhere)
        self._init = jax.jit(optimizer.init, out_shardings=self.state_shardings.opt_state)
        self._first = jax.jit(first, out_shardings=accumulated)
        self._add = jax.jit(add, out_shardings=accumulated, donate_argnums=0)
        self._update = jax.jit(update, out_shardings=out, donate_argnums=0)
        self._whole = jax.jit(whole, out_shardings=out, donate_argnums=0)

    def init(self, params: Params) -> TrainState:
        """A fresh optimizer around `params`, which the first step consumes."""
        return TrainState(params, self._init(params))

    def check(self, batch: Batch) -> None:
        """Raises what this kind of batch would raise in a step, without computing anything.

        Raises:
            UserError: the mesh does not divide the batch, or a setting of the loss is out of range.
        """
        host = {name: np.asarray(array) for name, array in batch.items()}
        abstract = {name: jax.ShapeDtypeStruct(self._shape(name, a)[1], a.dtype) for name, a in host.items()}
        jax.eval_shape(self._loss, abstract_params(self.model), abstract)

    def lower(self, batch: Mapping[str, jax.ShapeDtypeStruct]) -> jax.stages.Lowered:
        """The program of a step with a single micro-batch, for compiling ahead of time.

        With `offload` such a step runs "first" and "update" of `lower_accumulated` instead.

        Args:
            batch: global shapes (training/abstract.py); the step adds where they live.
        """
        return self._whole.lower(self._abstract_state(), self._abstract_batch(batch))

    def lower_accumulated(self, batch: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.stages.Lowered]:
        """The programs of a step with several micro-batches: "first", "add" (for each further one) and "update"."""
        state, arrays = self._abstract_state(), self._abstract_batch(batch)
        total = jax.eval_shape(self._first, state.params, arrays)
        total = total._replace(gradient=jax.tree.map(_placed, total.gradient, self.state_shardings.params))
        return {
            "first": self._first.lower(state.params, arrays),
            "add": self._add.lower(total, state.params, arrays),
            "update": self._update.lower(state, total),
        }

    def _abstract_state(self) -> TrainState:
        params = abstract_params(self.model)
        state = TrainState(params, jax.eval_shape(self.optimizer.init, params))
        return jax.tree.map(_placed, state, self.state_shardings)

    def _abstract_batch(self, batch: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            name: _placed(array, self.placement.sharding(self._axes(name, array), array.shape))
            for name, array in batch.items()
        }

    def gradient(self, params: Params, batches: Sequence[Batch]) -> Accumulated:
        """Undivided sums over the micro-batches."""
        total = self._first(params, self.place(batches[0]))
        for batch in batches[1:]:
            total = self._add(total, params, self.place(batch))
        return total

    def __call__(self, state: TrainState, batches: Sequence[Batch]) -> tuple[TrainState, Metrics]:
        """One optimizer step over the sum of the micro-batches. `state` is donated.

        Args:
            state: from `init`, a checkpoint or an earlier step.
            batches: host arrays, this process's rows; every process passes the same number of micro-batches.

        Returns:
            The new state, and the loss's metrics with "loss", "gradient_norm" (before clipping) and "update_norm".
            A step whose denominator is zero (nothing to train on) has a zero gradient.
        """
        # In one program without a separate accumulator; but moments that come from the host should come only when the
        # activations are gone, which a program of their own sees to.
        if len(batches) == 1 and not self.offload:
            return self._whole(state, self.place(batches[0]))
        return self.update(state, self.gradient(state.params, batches))

    def update(self, state: TrainState, total: Accumulated) -> tuple[TrainState, Metrics]:
        """Divides the sums and takes the optimizer step; `state` is donated."""
        return self._update(state, total)

    def place(self, batch: Batch) -> dict[str, jax.Array]:
        """Moves host arrays of one micro-batch to the mesh; rows over the batch axes, tokens over `context`.

        Raises:
            UserError: the mesh does not divide the batch.
        """
        return {name: self._place(name, np.asarray(array)) for name, array in batch.items()}

    def _place(self, name: str, array: np.ndarray) -> jax.Array:
        if self.placement.mesh is None:
            return jnp.asarray(array)
        if array.ndim == 0:
            return jax.device_put(array, self.placement.replicated())
        axes, shape = self._shape(name, array)
        if "sequence" in axes and (order := self.forward.order(array.shape[1])) is not None:
            array = array[:, order]
        return jax.make_array_from_process_local_data(self.placement.sharding(axes, shape), array, shape)

    def _shape(self, name: str, array: np.ndarray) -> tuple[tuple[str | None, ...], tuple[int, ...]]:
        """Logical axes and global shape of a micro-batch's array."""
        axes = self._axes(name, array)
        if not axes:
            return (), ()
        shape = (array.shape[0] * row_share(self.placement)[1], *array.shape[1:])
        for axis, length in zip(axes, shape, strict=True):
            size = self.placement.size("replica", "fsdp") if axis == "batch" else self.placement.size("context")
            if axis is not None and length % size:
                what, mesh_axes = (
                    ("micro_batch_rows", "replica x fsdp") if axis == "batch" else ("sequence_length", "context")
                )
                raise UserError(
                    f"{what} is {length}; make it a multiple of mesh {mesh_axes} = {size}, or change the mesh"
                )
        return axes, shape

    def _axes(self, name: str, array: Any) -> tuple[str | None, ...]:
        if array.ndim == 0:
            return ()
        return ("batch", None) if name in PER_SEGMENT else ("batch", "sequence")


def _placed(array: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def fill_metrics(batch: Batch) -> Metrics:
    """ "filled": the share of a micro-batch's tokens that are not padding."""
    tokens = jnp.sum(batch["segment_ids"] > 0).astype(jnp.float32)
    return Metrics(means={"filled": (tokens, jnp.float32(batch["tokens"].size))})


# Batch entries [rows, segments]: one number per document of a row.
PER_SEGMENT = frozenset({"advantages", "sequence_weights"})


def row_share(placement: Placement) -> tuple[int, int]:
    """Which equal share of a global batch's rows this process holds, and into how many shares they are cut.

    Processes that only differ along `context` or `tensor` hold the same rows.
    """
    if placement.mesh is None or jax.process_count() == 1:
        return 0, 1
    devices = placement.mesh.devices.reshape(placement.size("replica", "fsdp"), -1)
    mine = [i for i, row in enumerate(devices) if any(d.process_index == jax.process_index() for d in row)]
    if mine != list(range(mine[0], mine[0] + len(mine))) or len(devices) % len(mine) or mine[0] % len(mine):
        raise UserError(
            f"mesh: process {jax.process_index()} holds the shares {mine} of the batch, which are not one equal block; "
            "order the mesh so that replica x fsdp follows the processes"
        )
    return mine[0] // len(mine), len(devices) // len(mine)
