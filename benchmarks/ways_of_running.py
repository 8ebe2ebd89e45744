"""Runs the same training in each of JAX's ways to use several devices: one table.

    python benchmarks/ways_of_running.py [--quick] [--record]

Every way takes ten steps of Adam on the same network and the same global batches, on
eight CPU devices. At `BAD_STEP` the batch has one NaN, which only one device sees. For
the last two rows the script starts several processes. `--quick` tries fewer ways.
"""

import argparse
import functools
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from _lib.tables import add_outputs, publish, versions

STEPS, BAD_STEP = 10, 5
COLLECTIVE = r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)"
Tree = Any


class Result(NamedTuple):
    """The result of one way of running.

    Attributes:
      params: The final parameters.
      together: Whether all devices skipped the bad step.
      collectives: Number of collectives in the compiled update.
    """

    params: dict[str, np.ndarray]
    together: bool
    collectives: int


def make_params() -> Tree:
    """Makes two layers, `w1: f32[16, 32]` and `w2: f32[32, 8]`, with a bias `b`."""
    keys = jax.random.split(jax.random.key(0))
    return {
        "w1": 0.3 * jax.random.normal(keys[0], (16, 32)),
        "w2": 0.3 * jax.random.normal(keys[1], (32, 8)),
        "b": jnp.zeros(8),
    }


def make_batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Makes the global batch of a step: 64 rows, one of which is bad at `BAD_STEP`."""
    rng = np.random.default_rng(step)
    x, y = rng.normal(size=(64, 16)), rng.normal(size=(64, 8))
    if step == BAD_STEP:
        x[63, 0] = np.nan
    return x.astype(np.float32), y.astype(np.float32)


def loss_fn(params: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the mean squared error of the network."""
    return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"] + params["b"] - y) ** 2)


def make_tx(axis_name: Any = None) -> optax.GradientTransformationExtraArgs:
    """Makes Adam with a dynamic loss scale."""
    rule = ols.dynamic_loss_scale(growth_interval=4)
    return ols.loss_scaled(optax.adam(1e-2), rule, axis_name=axis_name)


def make_step(
    tx: optax.GradientTransformation, scaled_grads: Callable[..., Tree]
) -> Any:
    """Makes a training step; `scaled_grads` takes parameters, state and batch."""

    def step(params: Tree, state: Tree, x: jax.Array, y: jax.Array) -> Any:
        updates, state = tx.update(scaled_grads(params, state, x, y), state, params)
        return optax.apply_updates(params, updates), state

    return step


def shards(tree: Tree) -> list[np.ndarray]:
    """Returns the part of each array on each device of this process."""
    return [
        np.asarray(shard.data)
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
    ]


def train(
    step: Any,
    update: Any,
    params: Tree,
    state: Tree,
    put: Callable[[np.ndarray], Any] = jnp.asarray,
    fetch: Callable[[jax.Array], Any] = np.asarray,
) -> Result:
    """Trains, and looks at what the bad step did on each device.

    Args:
      step: Takes parameters, state and batch, and returns new parameters and state.
      update: The optimizer's update alone, whose collectives are counted.
      params: The initial parameters, on the devices.
      state: The initial optimizer state, on the devices.
      put: Puts an array of the batch on the devices.
      fetch: Gets a parameter back from the devices.
    """
    compiled = update.lower(params, state, params).compile().as_text()
    for index in range(STEPS):
        before = shards(params)
        params, state = step(params, state, *map(put, make_batch(index)))
        if index == BAD_STEP:
            unchanged = map(np.array_equal, shards(params), before)
            counts = shards(ols.find_loss_scale_state(state).total_notfinite)
            together = all(unchanged) and all((count == 1).all() for count in counts)
    final = {name: np.asarray(fetch(param)) for name, param in params.items()}
    return Result(final, together, len(re.findall(COLLECTIVE, compiled)))


def one_device() -> Result:
    """Trains on one device; all other ways are compared with this one."""
    tx, params = make_tx(), make_params()
    step = make_step(tx, lambda p, s, x, y: ols.scaled_grad(loss_fn, s)(p, x, y))
    return train(jax.jit(step), jax.jit(tx.update), params, tx.init(params))


def pmap() -> Result:
    """Trains replicas with `pmap`, and averages the gradients with `pmean`."""
    tx, params = make_tx("data"), make_params()

    def grads(params: Tree, state: Tree, x: jax.Array, y: jax.Array) -> Tree:
        return jax.lax.pmean(ols.scaled_grad(loss_fn, state)(params, x, y), "data")

    step = jax.pmap(make_step(tx, grads), axis_name="data")
    update = jax.pmap(tx.update, axis_name="data")
    spread = jax.pmap(lambda tree, _: tree, in_axes=(None, 0))
    params, state = spread((params, tx.init(params)), jnp.arange(8))
    return train(
        step, update, params, state, lambda x: x.reshape(8, 8, -1), lambda p: p[0]
    )


def shard_map(shape: tuple[int, ...], check_vma: bool) -> Result:
    """Trains with `shard_map`: parameters replicated, batch split over all axes."""
    names = ("data", "model")[: len(shape)]
    mesh = jax.make_mesh(shape, names, (AxisType.Auto,) * len(shape))
    tx, params = make_tx(names), make_params()

    def mean_loss(params: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.pmean(loss_fn(params, x, y), names)

    def grads(params: Tree, state: Tree, x: jax.Array, y: jax.Array) -> Tree:
        if check_vma:  # JAX sums the gradients of replicated parameters.
            return ols.scaled_grad(mean_loss, state)(params, x, y)
        return jax.lax.pmean(ols.scaled_grad(loss_fn, state)(params, x, y), names)

    over = functools.partial(
        jax.shard_map, mesh=mesh, out_specs=P(), check_vma=check_vma
    )
    step = over(make_step(tx, grads), in_specs=(P(), P(), P(names), P(names)))
    update = over(tx.update, in_specs=P())
    everywhere = NamedSharding(mesh, P())
    params = jax.device_put(params, everywhere)
    state = jax.device_put(tx.init(params), everywhere)
    return train(jax.jit(step), jax.jit(update), params, state)


def sharded_jit(specs: Tree, shape: tuple[int, ...], axis_type: AxisType) -> Result:
    """Trains with `jit`: parameters and moments sharded by `specs`, batch by row."""
    names = ("data", "model")[: len(shape)]
    mesh = jax.make_mesh(shape, names, (axis_type,) * len(shape))
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    everywhere, by_row = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    tx = make_tx()

    def grads(params: Tree, state: Tree, x: jax.Array, y: jax.Array) -> Tree:
        def gathered_loss(params: Tree) -> jax.Array:
            if axis_type == AxisType.Explicit:
                # An explicit mesh does not gather parameters by itself.
                params = jax.sharding.reshard(params, P())
            return loss_fn(params, x, y)

        return ols.scaled_grad(gathered_loss, state)(params)

    with jax.set_mesh(mesh):
        params = jax.jit(make_params, out_shardings=shardings)()
        state = jax.tree.map(lambda _: everywhere, jax.eval_shape(tx.init, params))
        state = optax.tree.set(state, mu=shardings, nu=shardings)
        state = jax.jit(tx.init, out_shardings=state)(params)
        return train(
            jax.jit(make_step(tx, grads), donate_argnums=(0, 1)),
            jax.jit(tx.update),
            params,
            state,
            lambda x: jax.make_array_from_callback(x.shape, by_row, lambda i: x[i]),
            jax.jit(lambda p: p, out_shardings=everywhere),
        )


REPLICATED = {"w1": P(), "w2": P(), "b": P()}
BY_ROW = {"w1": P("data"), "w2": P("data"), "b": P()}
TENSOR = {"w1": P(None, "model"), "w2": P("model"), "b": P()}
BOTH = {"w1": P("data", "model"), "w2": P("model", "data"), "b": P()}
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit

WAYS: dict[str, Callable[[], Result]] = {
    "one device": one_device,
    "pmap, 8 devices": pmap,
    "shard_map, check_vma=True": lambda: shard_map((8,), True),
    "shard_map, check_vma=False": lambda: shard_map((8,), False),
    "shard_map, two axes, check_vma=True": lambda: shard_map((4, 2), True),
    "shard_map, two axes, check_vma=False": lambda: shard_map((4, 2), False),
    "jit, data parallel": lambda: sharded_jit(REPLICATED, (8,), AUTO),
    "jit, data parallel, explicit mesh": lambda: sharded_jit(
        REPLICATED, (8,), EXPLICIT
    ),
    "jit, fully sharded": lambda: sharded_jit(BY_ROW, (8,), AUTO),
    "jit, fully sharded, explicit mesh": lambda: sharded_jit(BY_ROW, (8,), EXPLICIT),
    "jit, tensor parallel": lambda: sharded_jit(TENSOR, (4, 2), AUTO),
    "jit, sharded over both axes": lambda: sharded_jit(BOTH, (4, 2), AUTO),
    "jit, sharded over both axes, explicit mesh": lambda: sharded_jit(
        BOTH, (4, 2), EXPLICIT
    ),
}
IN_PROCESSES = "jit, fully sharded"
FEW_WAYS = ["one device", "shard_map, check_vma=True", IN_PROCESSES]


def run_processes(count: int) -> Result:
    """Runs `IN_PROCESSES` on eight devices that several processes share."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--worker", folder, port, str(count)]
        workers = [
            subprocess.Popen([*command, str(index)], stdout=subprocess.DEVNULL)
            for index in range(count)
        ]
        if any(worker.wait() for worker in workers):
            raise RuntimeError("a process failed; see its messages above")
        paths = sorted(pathlib.Path(folder).glob("*.npz"))
        finals = [np.load(path, allow_pickle=True) for path in paths]
        results = [Result(**{k: v.item() for k, v in f.items()}) for f in finals]
    same = all(
        np.array_equal(result.params[name], results[0].params[name])
        for result in results
        for name in result.params
    )
    together = same and all(result.together for result in results)
    return results[0]._replace(together=together)


def work(folder: str, port: str, count: str, index: str) -> None:
    """Trains in one of several processes, and writes its result to a folder."""
    jax.config.update("jax_num_cpu_devices", 8 // int(count))
    jax.distributed.initialize(f"localhost:{port}", int(count), int(index))
    result = WAYS[IN_PROCESSES]()
    np.savez(pathlib.Path(folder) / f"{index}.npz", **result._asdict())


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_outputs(parser)
    parser.add_argument("--quick", action="store_true", help="try fewer ways")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    if arguments.worker is not None:
        work(*arguments.worker)
        return
    jax.config.update("jax_num_cpu_devices", 8)
    names = FEW_WAYS if arguments.quick else list(WAYS)
    results = {name: WAYS[name]() for name in names}
    for count in (2,) if arguments.quick else (2, 4):
        results[f"{IN_PROCESSES}, {count} processes"] = run_processes(count)
    alone = results["one device"].params
    rows = []
    for name, result in results.items():
        errors = [np.max(np.abs(result.params[key] - alone[key])) for key in alone]
        row = {"way of running": name, "largest difference": f"{max(errors):.1e}"}
        row["collectives"] = result.collectives
        rows.append(row | {"together": "yes" if result.together else "NO"})
    publish(versions(), {"Ways of running": rows}, arguments)


if __name__ == "__main__":
    main()
