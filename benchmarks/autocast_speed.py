"""Times tracing and calls outside `jit` under autocast, against the plain function.

    python benchmarks/autocast_speed.py [--layers 24] [--rounds 7] [--record]

Each time is the median of some rounds, in which the two take turns.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import optax_lossscale as ols
from _lib.devices import use_host_cpu
from _lib.models import Encoder
from _lib.tables import add_outputs, publish, versions

WIDTH, HEADS, BATCH, LENGTH = 64, 4, 4, 32
Case = tuple[Callable[..., jax.Array], Any, jax.Array]


def layer_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Normalizes the last axis, as a user without a framework would write it."""
    centered = x - x.mean(-1, keepdims=True)
    variance = (centered**2).mean(-1, keepdims=True)
    return centered / jnp.sqrt(variance + 1e-5) * scale


def plain_layer(x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
    """Applies one pre-norm transformer layer that is written in `jax.numpy` alone."""
    qkv = jnp.split(layer_norm(x, p["scale1"]) @ p["qkv"], 3, -1)
    q, k, v = (
        part.reshape(BATCH, LENGTH, HEADS, -1).transpose(0, 2, 1, 3) for part in qkv
    )
    weights = jax.nn.softmax(q @ k.swapaxes(-1, -2) / 4.0, -1)
    x += (weights @ v).transpose(0, 2, 1, 3).reshape(x.shape) @ p["out"]
    hidden = jax.nn.gelu(layer_norm(x, p["scale2"]) @ p["up"] + p["up_bias"])
    return x + hidden @ p["down"] + p["down_bias"]


def plain(layers: int) -> Case:
    """Makes a transformer in `jax.numpy`, one Python call a layer."""
    shapes = {
        "qkv": (WIDTH, 3 * WIDTH),
        "out": (WIDTH, WIDTH),
        "up": (WIDTH, 4 * WIDTH),
        "up_bias": (4 * WIDTH,),
        "down": (4 * WIDTH, WIDTH),
        "down_bias": (WIDTH,),
        "scale1": (WIDTH,),
        "scale2": (WIDTH,),
    }
    layer = {name: jnp.full(shape, 0.02) for name, shape in shapes.items()}

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        for p in params:
            x = plain_layer(x, p)
        return jnp.mean(x**2)

    return loss_fn, [layer] * layers, jnp.ones((BATCH, LENGTH, WIDTH))


def linen(layers: int) -> Case:
    """Makes a transformer of Flax linen."""
    model, x = Encoder(width=WIDTH, depth=layers), jnp.ones((BATCH, LENGTH, WIDTH))
    params = jax.jit(model.init)(jax.random.key(0), x)
    return lambda params, x: jnp.mean(model.apply(params, x) ** 2), params, x


class Block(nnx.Module):
    """A pre-norm transformer layer of Flax NNX."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = (nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


def nnx_modules(layers: int) -> Case:
    """Makes a transformer of Flax NNX."""
    blocks = [Block(nnx.Rngs(index)) for index in range(layers)]
    graph, params = nnx.split(nnx.List(blocks))

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        for block in nnx.merge(graph, params):
            x = block(x)
        return jnp.mean(x**2)

    return loss_fn, params, jnp.ones((BATCH, LENGTH, WIDTH))


def nested_loss(depth: int) -> Callable[..., jax.Array]:
    """Makes a loss of loops in loops, with one product in the innermost."""

    def run(w: jax.Array, x: jax.Array, depth: int) -> jax.Array:
        if depth == 0:
            return jnp.tanh(x @ w)
        return jax.lax.scan(
            lambda x, _: (run(w, x, depth - 1), None), x, None, length=2
        )[0]

    return lambda w, x: jnp.mean(run(w, x, depth))


def product(w: jax.Array, x: jax.Array) -> jax.Array:
    """Applies one product and one relu: the smallest layer there is."""
    return jax.nn.relu(x @ w)


def network(params: list[jax.Array], x: jax.Array) -> jax.Array:
    """Applies four layers and a softmax."""
    for w in params:
        x = jax.nn.gelu(x @ w)
    return jax.nn.softmax(x)


def seconds(call: Callable[[], Any]) -> float:
    """Times one call."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def compare(
    plain: Callable[[], Any], cast: Callable[[], Any], rounds: int
) -> dict[str, str]:
    """Times two calls in turn, after one call of each."""
    seconds(plain), seconds(cast)
    times = [(seconds(plain), seconds(cast)) for _ in range(rounds)]
    ours, theirs = (statistics.median(column) for column in zip(*times, strict=True))
    return {
        "plain ms": f"{1e3 * ours:.3g}",
        "autocast ms": f"{1e3 * theirs:.3g}",
        "ratio": f"{theirs / ours:.2f}",
    }


def tracing_rows(layers: int, rounds: int) -> list[dict[str, str]]:
    """Compares how long it takes to trace a gradient."""

    def trace(fun: Any, *args: Any) -> Callable[[], Any]:
        # A new function each time, because JAX would remember the trace of an old one.
        return lambda: jax.jit(jax.grad(lambda *xs: fun(*xs))).trace(*args) and None

    cases = {"jax.numpy": plain, "linen": linen, "nnx": nnx_modules}
    return [
        {"model": name, "level": level}
        | compare(
            trace(loss_fn, *args),
            trace(ols.autocast(loss_fn, level=level), *args),
            rounds,
        )
        for name, make in cases.items()
        for level in ("O1", "O2")
        for loss_fn, *args in [make(layers)]
    ]


def nested_rows(rounds: int) -> list[dict[str, str]]:
    """Compares how long it takes to trace loops in loops."""
    x, w = jnp.ones((8, 16)), jnp.full((16, 16), 0.1)
    passes: dict[str, Callable[..., Any]] = {
        "forward": lambda fun: fun,
        "gradient": jax.grad,
    }

    def trace(depth: int, around: Callable[..., Any]) -> Callable[[], Any]:
        return lambda: jax.jit(around(nested_loss(depth))).trace(w, x) and None

    return [
        {"depth": str(depth), "pass": name}
        | compare(
            trace(depth, around),
            trace(depth, lambda fun, around=around: around(ols.autocast(fun))),
            3 * rounds,
        )
        for depth in (1, 3, 6)
        for name, around in passes.items()
    ]


def eager_rows(rounds: int) -> list[dict[str, str]]:
    """Compares calls outside `jit`."""
    x, w = jnp.ones((8, 64)), jnp.full((64, 64), 0.01)
    calls: dict[str, tuple[Callable[..., Any], Any]] = {
        "relu(x @ w)": (product, w),
        "four layers": (network, [w] * 4),
    }
    rows = []
    for name, (fun, params) in calls.items():
        cast = ols.autocast(fun)
        times = compare(
            lambda fun=fun, p=params: fun(p, x),
            lambda cast=cast, p=params: cast(p, x),
            20 * rounds,
        )
        rows.append({"call": name} | times)
    return rows


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=7)
    add_outputs(parser)
    arguments = parser.parse_args()
    use_host_cpu()
    tables = {
        "Tracing the gradient": tracing_rows(arguments.layers, arguments.rounds),
        "Tracing nested loops": nested_rows(arguments.rounds),
        "Calls outside jit": eager_rows(arguments.rounds),
    }
    publish(f"{versions()}; {arguments.layers} layers", tables, arguments)


if __name__ == "__main__":
    main()
