"""Data-parallel float16 training on several processes, with checkpoints.

To try it, run several processes on this machine's CPU:

    python notebooks/many_processes.py --processes 2

On a cluster, run one process on each host with a launcher that
`jax.distributed.initialize()` knows (SLURM, Open MPI, Kubernetes, Cloud TPU):

    srun python notebooks/many_processes.py --checkpoint /shared/run

Loss scaling needs no extra code for several processes: under sharded `jit` it checks
the gradients of all devices together, so if one process sees a NaN, all skip the step.
"""

import argparse
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from optax_lossscale.demo import MLP, Data, load_data, loss_fn

BATCH_SIZE = 256  # Rows in one batch of all processes together.


def output_folder(name: str) -> pathlib.Path:
    """Returns the path of a folder, once it is clear that it can be written to."""
    folder = pathlib.Path(name).absolute()
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        tempfile.TemporaryDirectory(dir=nearest).cleanup()
    except OSError as error:
        reason = error.strerror
        raise argparse.ArgumentTypeError(f"cannot write {name}: {reason}") from error
    return folder


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="steps to train")
    parser.add_argument(
        "--checkpoint",
        type=output_folder,
        help="folder to save to and to continue from",
    )
    parser.add_argument(
        "--save-every",
        type=int,
        default=10,
        metavar="STEPS",
        help="steps between checkpoints",
    )
    parser.add_argument("--processes", type=int, help="start this many on this machine")
    parser.add_argument(
        "--devices", type=int, default=2, help="devices of each process"
    )
    parser.add_argument(
        "--nan-step", type=int, help="give one process a NaN at this step"
    )
    parser.add_argument("--kill-step", type=int, help="kill one process at this step")
    parser.add_argument(
        "--save-final",
        type=output_folder,
        metavar="FOLDER",
        help="save the final state here",
    )
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.processes is not None and arguments.processes < 1:
        parser.error("--processes must be at least 1")
    return arguments


def start_processes(count: int) -> int:
    """Runs this command in several processes; if one dies, stops the others."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, *sys.argv, "--port", str(port)]
    processes = [
        subprocess.Popen([*command, "--process", str(index)]) for index in range(count)
    ]
    while any(process.poll() is None for process in processes):
        failed = [index for index in range(count) if processes[index].poll()]
        if failed:
            code = processes[failed[0]].returncode
            print(f"process {failed[0]} ended with code {code}: stopping the others")
            for process in processes:
                process.kill()
            return abs(code)
        time.sleep(0.1)
    return max(abs(process.returncode) for process in processes)


def load_batch(data: Data, step: int, sharding: NamedSharding, nan: bool) -> Data:
    """Loads this process's rows of a batch, and spreads the batch over all devices."""
    rows = np.random.default_rng(step).permutation(len(data.labels))[:BATCH_SIZE]
    share = BATCH_SIZE // jax.process_count()
    rows = rows[jax.process_index() * share :][:share]
    images, labels = np.asarray(data.images)[rows], np.asarray(data.labels)[rows]
    if nan and jax.process_index() == jax.process_count() - 1:
        images[-1, 0] = np.nan
    return Data(
        jax.make_array_from_process_local_data(sharding, images),
        jax.make_array_from_process_local_data(sharding, labels),
    )


def train(arguments: argparse.Namespace) -> None:
    """Trains from the start, or from the last checkpoint if there is one."""
    if BATCH_SIZE % jax.device_count():
        sys.exit(f"{BATCH_SIZE} rows do not divide among {jax.device_count()} devices")
    mesh = jax.make_mesh((jax.device_count(),), ("data",), (AxisType.Auto,))
    replicated, by_row = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    data, _ = load_data()
    rule = ols.dynamic_loss_scale(growth_interval=10)
    tx = ols.loss_scaled(optax.adam(2e-3), rule)
    network = MLP(jnp.float16).apply

    def start() -> tuple[optax.Params, optax.OptState]:
        params = MLP(jnp.float16).init(jax.random.key(0), jnp.zeros((1, 64)))
        return params, tx.init(params)

    def update(
        params: optax.Params, opt_state: optax.OptState, batch: Data
    ) -> tuple[optax.Params, optax.OptState, jax.Array]:
        grad_fn = ols.scaled_value_and_grad(loss_fn, opt_state)
        loss, grads = grad_fn(params, network, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    # With `out_shardings` the state never moves, so JAX compiles each function once.
    params, opt_state = jax.jit(start, out_shardings=replicated)()
    update = jax.jit(update, out_shardings=replicated, donate_argnums=(0, 1))
    manager, first = None, 0
    if arguments.checkpoint is not None:
        options = ocp.CheckpointManagerOptions(
            save_interval_steps=arguments.save_every, enable_async_checkpointing=False
        )
        manager = ocp.CheckpointManager(arguments.checkpoint, options=options)
        if manager.latest_step() is not None:
            saved = ocp.args.StandardRestore((params, opt_state))
            params, opt_state = manager.restore(manager.latest_step(), args=saved)
            first = manager.latest_step() + 1
    for step in range(first, arguments.steps):
        batch = load_batch(data, step, by_row, nan=step == arguments.nan_step)
        params, opt_state, _ = update(params, opt_state, batch)
        if manager is not None:
            saved = ocp.args.StandardSave((params, opt_state))
            manager.save(step, args=saved, force=step == arguments.steps - 1)
        if step == arguments.kill_step and jax.process_index() == 0:
            os._exit(9)
    ols.raise_if_stalled(opt_state)
    metrics = ols.loss_scale_metrics(opt_state)
    print(
        f"process {jax.process_index()} of {jax.process_count()}, "
        f"{jax.device_count()} devices, from step {first}: "
        f"scale {metrics['loss_scale']:g}, skipped {metrics['total_notfinite']}",
        flush=True,
    )
    if arguments.save_final is not None:
        arguments.save_final.mkdir(parents=True, exist_ok=True)
        leaves = jax.tree.leaves((params, opt_state))
        path = arguments.save_final / f"{jax.process_index()}.npz"
        np.savez(path, *(np.asarray(leaf) for leaf in leaves))


def main() -> None:
    """Starts processes on this machine, or trains as one of the processes."""
    arguments = parse_arguments()
    if arguments.processes is not None and arguments.process is None:
        sys.exit(start_processes(arguments.processes))
    if arguments.processes is None:
        try:
            jax.distributed.initialize()
        except ValueError as error:
            sys.exit(f"{error} (JAX found no cluster: try `--processes 2`.)")
    else:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", arguments.devices)
        jax.distributed.initialize(
            f"localhost:{arguments.port}", arguments.processes, arguments.process
        )
    train(arguments)


if __name__ == "__main__":
    main()
