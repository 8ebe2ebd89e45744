"""Shows in which dtype gradients cross devices, in three tables.

    python benchmarks/collectives.py [--platforms cpu tpu cuda] [--quick] [--record]

The programs for a TPU need its compiler (`pip install libtpu`), those for an NVIDIA GPU
need NVIDIA's (`pip install 'jax[cuda12]'`); neither needs the device. `--quick`
compiles only for a CPU and on automatic meshes, in the first table only data parallel
programs, and runs one product on fewer devices.
"""

import argparse
import collections
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from _lib.compiled_text import Sent, sent_arrays
from _lib.devices import DEVICE_NAMES, devices_of, use_host_cpu
from _lib.models import Decoder, next_token_loss
from _lib.tables import add_outputs, publish, versions

DEVICES = {"cpu": 4, "tpu": 64, "cuda": 8}
HEADS, WIDTH = 4, 256
# Each device has a prime number of sequences, and other sizes are powers of two, so
# that the sizes of activations, and no others, are multiples of it.
SEQUENCES = 13
LOSS_SCALE = 2.0**10
WAYS = ("data parallel", "fully sharded", "tensor parallel")
Tree = Any
Loss = Callable[[Tree, jax.Array], jax.Array]


def plain(loss_of: Callable[[Any], Loss]) -> Loss:
    """Computes in float32."""
    return loss_of(None)


def by_hand(loss_of: Callable[[Any], Loss]) -> Loss:
    """Uses the model's own setting, as in `nn.Dense(dtype=jnp.float16)`."""
    return loss_of(jnp.float16)


def autocast(loss_of: Callable[[Any], Loss]) -> Loss:
    """Casts the float32 model."""
    return ols.autocast(loss_of(None))


def autocast_o2(loss_of: Callable[[Any], Loss]) -> Loss:
    """Casts the float32 model, and all but its sums and normalization layers."""
    return ols.autocast(loss_of(None), level="O2")


# Each takes a function that makes the loss of a Flax model with this `dtype`.
MODELS: dict[str, Callable[[Callable[[Any], Loss]], Loss]] = {
    "float32": plain,
    "Flax, dtype=float16": by_hand,
    "autocast": autocast,
    "autocast, O2": autocast_o2,
}


class Case(NamedTuple):
    """A loss function, and the shapes, dtypes and shardings of its arguments."""

    loss_fn: Loss
    params: Tree
    tokens: jax.ShapeDtypeStruct


def mesh_of(way: str, devices: list[Any], axis_type: AxisType) -> Mesh:
    """Returns the mesh of a way to use several devices."""
    if way != "tensor parallel":
        return Mesh(np.array(devices), ("data",), axis_types=(axis_type,))
    grid = np.array(devices).reshape(-1, min(HEADS, len(devices) // 2))
    return Mesh(grid, ("data", "model"), axis_types=(axis_type,) * 2)


def spec_of(way: str, shape: tuple[int, ...], mesh: Mesh) -> P:
    """Returns how a way splits a parameter of this shape."""
    if way == "data parallel":
        return P()
    if way == "tensor parallel":  # Heads of attention, and the inner width of MLPs.
        return P(*("model" if size in (HEADS, 4 * WIDTH) else None for size in shape))
    first = next(i for i, size in enumerate(shape) if size % mesh.size == 0)
    return P(*[None] * first, "data")


def make_case(way: str, mesh: Mesh, model: Callable[..., Loss]) -> Case:
    """Makes a small GPT, split over a mesh."""
    by_row = NamedSharding(mesh, P("data"))
    plan = Decoder(vocabulary=2048, length=128, width=WIDTH)
    tokens = jax.ShapeDtypeStruct(
        (SEQUENCES * mesh.shape["data"], plan.length), jnp.int32, sharding=by_row
    )

    def loss_of(dtype: Any) -> Loss:
        return next_token_loss(plan.clone(dtype=dtype, sharding=by_row))

    def split(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec_of(way, leaf.shape, mesh))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    loss_fn = model(loss_of)
    one = jax.ShapeDtypeStruct((1, plan.length), jnp.int32)
    params = jax.eval_shape(plan.init, jax.random.key(0), one)
    if way == "fully sharded" and AxisType.Explicit in mesh.axis_types:
        loss_fn = gathered(loss_fn)
    return Case(loss_fn, jax.tree.map(split, params), tokens)


def gathered(loss_fn: Loss) -> Loss:
    """Gathers the parameters, which an explicit mesh does not do by itself."""
    return lambda params, batch: loss_fn(jax.sharding.reshard(params, P()), batch)


def shardings(tree: Tree) -> Tree:
    """Returns the shardings of abstract arrays."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def compile_gradient(case: Case, mesh: Mesh) -> str:
    """Compiles the value and the gradient, which is split as the parameters are."""
    gradient = jax.jit(
        jax.value_and_grad(case.loss_fn), out_shardings=(None, shardings(case.params))
    )
    with jax.set_mesh(mesh):
        return gradient.lower(case.params, case.tokens).compile().as_text()


def purpose_of(sent: Sent) -> str:
    """Returns what an array that crosses devices is for."""
    if sent.elements < 64:
        return "numbers"
    if sent.elements % SEQUENCES == 0:
        return "activations"
    return "parameters" if sent.is_gather else "gradients"


def describe(arrays: Iterable[Sent]) -> str:
    """Returns the kinds, dtypes and megabytes of arrays, the most bytes first."""
    sizes: collections.Counter[str] = collections.Counter()
    kinds: collections.Counter[str] = collections.Counter()
    for sent in arrays:
        sizes[sent.dtype] += sent.megabytes
        kinds[sent.kind] += sent.megabytes
    if not sizes:
        return ""
    sent_by = " and ".join(kind for kind, _ in kinds.most_common())
    listed = ", ".join(f"{dtype} {size:.1f}" for dtype, size in sizes.most_common())
    return f"{listed} ({sent_by})"


def collective_row(platform: str, way: str, kind: AxisType, model: str) -> Any:
    """Returns what crosses devices for gradients, parameters and activations."""
    mesh = mesh_of(way, devices_of(platform, DEVICES[platform]), kind)
    program = compile_gradient(make_case(way, mesh, MODELS[model]), mesh)
    arrays = list(sent_arrays(program))
    return {
        f"{purpose}, MB": describe(a for a in arrays if purpose_of(a) == purpose)
        for purpose in ("gradients", "parameters", "activations")
    }


def collective_rows(
    ways: Iterable[str], platforms: list[str], kinds: list[AxisType]
) -> list[Any]:
    """Returns a row for each way and platform; models that send the same share one."""
    return merged(
        (way, platform, model, kind, collective_row(platform, way, kind, model))
        for way in ways
        for platform in platforms
        for model in MODELS
        for kind in kinds
    )


def merged(results: Iterable[tuple[str, str, str, AxisType, Any]]) -> list[Any]:
    """Returns rows of way, platform, models and what they send."""
    rows: dict[tuple[str, ...], Any] = {}
    kinds: dict[tuple[str, str], set[str]] = collections.defaultdict(set)
    for way, platform, model, kind, result in results:
        _, models = rows.setdefault((way, platform, *result.values()), (result, {}))
        models.setdefault(model, set()).add(kind.name.lower())
        kinds[way, platform].add(kind.name.lower())
    return [
        {
            "way": way,
            "compiled for": f"{DEVICES[platform]} {DEVICE_NAMES[platform]}",
            "model": named(models, kinds[way, platform]),
        }
        | result
        for (way, platform, *_), (result, models) in rows.items()
    ]


def named(models: dict[str, set[str]], kinds: set[str]) -> str:
    """Names models, and the kind of their mesh where only one has this result."""
    groups: dict[str, list[str]] = collections.defaultdict(list)
    for model, found in models.items():
        groups["" if found == kinds else f" ({min(found)})"].append(model)
    return "; ".join("; ".join(names) + mesh for mesh, names in groups.items())


def step_programs(platform: str) -> dict[str, tuple[str, Tree]]:
    """Compiles parts of a training step, fully sharded, and the whole of it."""
    mesh = mesh_of("", devices_of(platform, DEVICES[platform]), AxisType.Auto)
    loss_fn, params, tokens = case = make_case("fully sharded", mesh, autocast)

    def compile_step(tx: Any, grad_fn: Callable[[Tree], Any]) -> str:
        def step(params: Tree, state: Tree, tokens: jax.Array) -> Any:
            loss, grads = grad_fn(state)(params, tokens)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        state = jax.eval_shape(tx.init, params)
        everywhere = jax.tree.map(lambda _: NamedSharding(mesh, P()), state)
        split = optax.tree.set(everywhere, mu=shardings(params), nu=shardings(params))
        state = jax.tree.map(
            lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to),
            state,
            split,
        )
        step = jax.jit(
            step,
            donate_argnums=(0, 1),
            out_shardings=(shardings(params), split, None),
        )
        with jax.set_mesh(mesh):
            return step.lower(params, state, tokens).compile().as_text()

    bare, scaled = optax.adamw(1e-3), ols.loss_scaled(optax.adamw(1e-3))
    return params, {
        "gradient alone": compile_gradient(case, mesh),
        "with AdamW": compile_step(bare, lambda _: jax.value_and_grad(loss_fn)),
        "with loss_scaled(AdamW)": compile_step(
            scaled, lambda state: ols.scaled_value_and_grad(loss_fn, state)
        ),
    }


def copies_of(params: Tree, program: str) -> int:
    """Counts copies of arrays as large as a device's piece of a parameter."""
    pieces = {leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(params)}
    pieces = {",".join(map(str, piece)) for piece in pieces}
    found = re.findall(r" = f32\[([\d,]*)\]\S* copy\(", program)
    return sum(dims in pieces for dims in found)


def step_rows(platform: str) -> list[dict[str, str]]:
    """Returns what crosses devices in each part of a fully sharded training step."""
    params, programs = step_programs(platform)
    rows = []
    for name, program in programs.items():
        arrays = collections.defaultdict(list)
        for sent in sent_arrays(program):
            arrays[purpose_of(sent)].append(sent)
        numbers = collections.Counter(sent.dtype for sent in arrays["numbers"])
        rows.append(
            {
                "step": name,
                "compiled for": f"{DEVICES[platform]} {DEVICE_NAMES[platform]}",
                "gradients, MB": describe(arrays["gradients"]),
                "parameters, MB": describe(arrays["parameters"]),
                "activations, MB": describe(arrays["activations"]),
                "single numbers": ", ".join(f"{n} {d}" for d, n in numbers.items()),
                "copies of a piece": str(copies_of(params, program)),
            }
        )
    return rows


def error_problems() -> dict[str, tuple[Callable[[Any], Loss], Tree, jax.Array]]:
    """Makes functions that return a loss, parameters, and a batch of 64 rows.

    The first is one product of numbers that float16 holds exactly, so that its error
    is that of the sum. The second is a small GPT.
    """
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 64, 8, 64)).astype(np.float16)

    def product_of(dtype: Any) -> Loss:
        def loss_fn(params: Tree, xy: jax.Array) -> jax.Array:
            out = nn.Dense(64, use_bias=False, dtype=dtype).apply(params, xy[:, 0])
            return jnp.sum(out.astype(xy.dtype) * xy[:, 1]) / LOSS_SCALE

        return loss_fn

    plan = Decoder()
    tokens = jnp.asarray(rng.integers(0, plan.vocabulary, (64, plan.length)))
    params = plan.init(jax.random.key(0), tokens)
    kernel = {"params": {"kernel": jnp.zeros((64, 64))}}
    batch = jnp.stack([x, y], axis=1).astype(jnp.float32)
    return {
        "one product": (product_of, kernel, batch),
        "GPT": (lambda dtype: next_token_loss(plan.clone(dtype=dtype)), params, tokens),
    }


def error_rows(names: list[str], counts: list[int]) -> list[dict[str, str]]:
    """Returns errors of gradients against float64, by the number of devices."""
    rows = []
    problems = error_problems()
    for problem in names:
        loss_of, params, batch = problems[problem]
        with jax.enable_x64(True):
            wide = jax.tree.map(
                lambda x: x.astype(np.float64) if x.dtype == np.float32 else x,
                (params, batch),
            )
            exact = jax.tree.map(np.asarray, jax.jit(jax.grad(loss_of(None)))(*wide))
        for model in MODELS:
            row = {"gradient of": problem, "model": model, "sums in": ""}
            for count in counts:
                grads, sums_in = gradient_on(
                    count, MODELS[model](loss_of), params, batch
                )
                row["sums in"] = sums_in
                row[f"on {count}"] = f"{relative_error(grads, exact):.1e}"
            rows.append(row)
    return rows


def gradient_on(
    count: int, loss_fn: Loss, params: Tree, batch: jax.Array
) -> tuple[Tree, str]:
    """Computes a gradient on CPU devices, and names the dtype that most is summed in.

    The loss is scaled, so that nothing flushes to zero.
    """
    mesh = mesh_of("", jax.devices()[:count], AxisType.Auto)
    params = jax.device_put(params, NamedSharding(mesh, P()))
    batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
    gradient = jax.jit(
        jax.grad(lambda *args: loss_fn(*args) * LOSS_SCALE),
        out_shardings=NamedSharding(mesh, P()),
    )
    compiled = gradient.lower(params, batch).compile()
    sent = max(sent_arrays(compiled.as_text()), key=lambda s: s.elements, default=None)
    grads = jax.tree.map(
        lambda g: np.asarray(g, np.float64) / LOSS_SCALE, compiled(params, batch)
    )
    return grads, sent.dtype if sent else ""


def relative_error(grads: Tree, exact: Tree) -> float:
    """Returns the norm of the error over the norm of the exact gradient."""
    pairs = list(zip(jax.tree.leaves(grads), jax.tree.leaves(exact), strict=True))
    error = sum(float(np.sum((g - e) ** 2)) for g, e in pairs)
    return math.sqrt(error / sum(float(np.sum(e**2)) for _, e in pairs))


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--platforms",
        nargs="+",
        choices=list(DEVICES),
        default=list(DEVICES),
        help="compile for these platforms (default: all)",
    )
    add_outputs(parser)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="compile few programs for a CPU, and run one product on 8 devices",
    )
    arguments = parser.parse_args()
    use_host_cpu()
    ways, platforms, kinds = (
        WAYS,
        arguments.platforms,
        [AxisType.Auto, AxisType.Explicit],
    )
    problems, counts = ["one product", "GPT"], [1, 8, 64]
    if arguments.quick:
        ways, platforms, kinds = WAYS[:1], ["cpu"], [AxisType.Auto]
        problems, counts = ["one product"], [1, 8]
    jax.config.update("jax_num_cpu_devices", counts[-1])
    tables = {
        "The gradient": collective_rows(ways, platforms, kinds),
        "The whole step": [row for name in platforms for row in step_rows(name)],
        "Error": error_rows(problems, counts),
    }
    publish(versions(), tables, arguments)


if __name__ == "__main__":
    main()
