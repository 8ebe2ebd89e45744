"""The loop that the example programs share: devices, reports, checkpoints and pictures.

A program describes its task with four functions, and `train` does the rest:

    start() -> state                       parameters, optimizer state, random keys
    batch_of(index) -> batch               numpy arrays; the same index, the same batch
    step(state, batch) -> (state, loss)    one step of training
    evaluate(state) -> figures             a dict of scalars for a report

and perhaps a fifth, `rollout(state, batch) -> batch`, which makes what a step learns
from by a program of its own.

`state` is a pytree of arrays that holds everything that a step changes. A checkpoint
holds this state, and a batch depends on the number of its step only. So a run that was
killed continues with the same bits as if it had never stopped.

A run whose last 50 steps were all skipped ends with an error. The state of NNX hides
its loss scale, so a program with NNX also passes a function that returns the optimizer.
"""

import argparse
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import matplotlib.pyplot as plt
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tensorboardX import SummaryWriter
from tqdm import tqdm

import optax_lossscale as ols

# A run may continue with other values of these options. They do not change its numbers,
# except that another number of devices adds them up in another order.
FREE_OPTIONS = {
    "report",
    "folder",
    "json",
    "plot",
    "devices",
    "mesh",
    "coordinator",
    "processes",
    "process",
}


def make_mesh(options: argparse.Namespace) -> jax.sharding.Mesh:
    """Returns a mesh of the devices of all processes. Call it before other JAX code."""
    jax.config.update("jax_num_cpu_devices", options.devices)
    if options.processes > 1:
        if options.coordinator is None:
            raise SystemExit("--processes needs --coordinator")
        where = options.coordinator, options.processes, options.process
        jax.distributed.initialize(*where)
    count = options.devices * jax.process_count()
    if count > jax.device_count():
        raise SystemExit(f"JAX has {jax.device_count()} devices, not {count}")
    devices = jax.devices()[:count]
    return jax.make_mesh((count,), ("data",), (AxisType.Auto,), devices=devices)


def train(
    options: argparse.Namespace,
    mesh: jax.sharding.Mesh,
    start: Callable[[], Any],
    batch_of: Callable[[int], Any],
    step: Callable[[Any, Any], tuple[Any, jax.Array]],
    evaluate: Callable[[Any], dict[str, jax.Array]],
    optimizer_of: Callable[[Any], Any] = lambda state: state,
    rollout: Callable[[Any, Any], Any] | None = None,
) -> Any:
    """Trains from the start or the last checkpoint, and returns the final state."""
    everywhere, by_row = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))

    def split(x: Any) -> NamedSharding:
        """Splits the longest axis of a large array over the devices, if it divides."""
        longest = max(range(x.ndim), key=lambda axis: x.shape[axis], default=0)
        if options.mesh == "data" or x.size < 1024 or x.shape[longest] % mesh.size:
            return everywhere
        return NamedSharding(mesh, P(*[None] * longest, "data"))

    def spread(x: np.ndarray) -> jax.Array:
        """Gives each device its rows. Every process has the whole batch."""
        return jax.make_array_from_callback(x.shape, by_row, lambda rows: x[rows])

    rows = len(jax.tree.leaves(batch_of(0))[0])
    if rows % mesh.size:
        raise SystemExit(f"{rows} rows do not divide among {mesh.size} devices")
    shardings = jax.tree.map(split, jax.eval_shape(start))
    step = jax.jit(step, donate_argnums=0, out_shardings=(shardings, everywhere))
    evaluate = jax.jit(evaluate, out_shardings=everywhere)
    rollout = jax.jit(rollout) if rollout else None
    journal = Journal(options)
    state = journal.restore(jax.jit(start, out_shardings=shardings)())
    is_off = journal.is_quiet or None  # `None`: on a terminal alone.
    bar = tqdm(total=options.steps, initial=journal.count, disable=is_off)
    for count in range(journal.count + 1, options.steps + 1):
        batch = jax.tree.map(spread, batch_of(count - 1))
        batch = rollout(state, batch) if rollout else batch
        state, loss = step(state, batch)
        bar.update()
        if count % options.report == 0 or count == options.steps:
            ols.raise_if_stalled(optimizer_of(state))
            figures = journal.add(count, {"loss": loss, **evaluate(state)}, state)
            bits = np.log2(figures["loss_scale"])
            bar.set_postfix(loss=figures["loss"], loss_scale=f"2^{bits:.3g}")
    bar.close()
    journal.finish()
    return state


def has_checkpoint(folder: pathlib.Path | None) -> bool:
    """Whether a folder has a checkpoint. One that is not finished has a longer name."""
    steps = () if folder is None else (folder / "checkpoints").glob("*")
    return any(step.name.isdecimal() for step in steps)


class Journal:
    """Keeps the reports of a run in a log, for TensorBoard, and in its checkpoints."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Opens the folder of the run, if it has one."""
        self.options, self.folder = options, options.folder
        self.count, self.records = 0, []  # Steps so far, and their reports.
        self.is_quiet = jax.process_index() > 0
        self.settings = {
            name: value if isinstance(value, int | float) else str(value)
            for name, value in vars(options).items()
            if name not in FREE_OPTIONS
        }
        if self.folder is not None:
            self.folder = self.folder.absolute()
            keep = ocp.CheckpointManagerOptions(max_to_keep=2)
            self.manager = ocp.CheckpointManager(
                self.folder / "checkpoints", options=keep
            )

    def restore(self, state: Any) -> Any:
        """Returns the state of the last checkpoint, or else the given one."""
        if self.folder is None:
            return state
        if (count := self.manager.latest_step()) is not None:
            notes = ocp.args.Composite(notes=ocp.args.JsonRestore())
            notes = self.manager.restore(count, args=notes).notes
            if notes["settings"] != self.settings:
                pairs = set(notes["settings"].items()) - set(self.settings.items())
                theirs = ", ".join(f"{name} {value}" for name, value in sorted(pairs))
                raise SystemExit(f"{self.folder} holds another run, with {theirs}")
            saved = ocp.args.Composite(state=ocp.args.StandardRestore(state))
            state = self.manager.restore(count, args=saved).state
            self.count, self.records = count, notes["records"]
        if not self.is_quiet:
            lines = [json.dumps(record) + "\n" for record in self.records]
            (self.folder / "log.jsonl").write_text("".join(lines))
            self.writer = SummaryWriter(str(self.folder), purge_step=self.count + 1)
        return state

    def add(self, count: int, figures: dict[str, Any], state: Any) -> dict[str, float]:
        """Adds the report of a step, saves a checkpoint, and returns the figures."""
        figures = {name: np.asarray(x).item() for name, x in figures.items()}
        held_out = {name: x for name, x in figures.items() if name != "loss"}
        if not all(map(np.isfinite, held_out.values())):  # Not for one bad batch only.
            raise SystemExit(f"The training diverged. Step {count} gave {figures}")
        self.records.append({"step": count, **figures})
        if self.folder is None:
            return figures
        if not self.is_quiet:
            with (self.folder / "log.jsonl").open("a") as log:
                log.write(json.dumps(self.records[-1]) + "\n")
            for name, value in figures.items():
                self.writer.add_scalar(name, value, count)
            self.writer.flush()
        # Orbax writes while the training goes on, so it needs a list of its own.
        notes = {"settings": self.settings, "records": list(self.records)}
        notes = ocp.args.JsonSave(notes)
        saved = ocp.args.Composite(state=ocp.args.StandardSave(state), notes=notes)
        self.manager.save(count, args=saved)
        return figures

    def finish(self) -> None:
        """Prints the last report, and writes the files that were asked for."""
        if self.folder is not None:
            self.manager.close()
        if self.is_quiet:
            return
        last = self.records[-1]
        print("  ".join(f"{name} {value:.6g}" for name, value in last.items()))
        if self.options.json is not None:
            result = {**last, "settings": self.settings, "records": self.records}
            self.options.json.write_text(json.dumps(result, indent=1))
        if self.options.plot is not None:
            draw(self.records, self.options.plot)


def draw(records: list[dict[str, float]], file: pathlib.Path) -> None:
    """Draws each figure of the reports over the steps, one below the other."""
    names = [name for name in records[0] if name != "step"]
    figure, axes = plt.subplots(len(names), sharex=True, figsize=(6, 1.6 * len(names)))
    for name, ax in zip(names, axes, strict=True):
        ax.plot([x["step"] for x in records], [x[name] for x in records], marker=".")
        ax.set_title(name, loc="left")
        if name == "loss_scale":
            ax.set_yscale("log", base=2)
    axes[-1].set_xlabel("step")
    axes[-1].locator_params(axis="x", integer=True)
    figure.tight_layout()
    figure.savefig(file, dpi=150)
