"""Shows what loops over layers save for their backward pass: one table.

    python benchmarks/loop_memory.py [--record]

A layer is the body of a `jax.lax.scan`. Of its gradient, compiled for the CPU, the
temporary bytes are counted, for each entry of the carry in each iteration.
"""

import argparse
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

import optax_lossscale as ols
from _lib.devices import use_host_cpu
from _lib.tables import add_outputs, publish, versions

LAYERS, BATCH, WIDTH = 64, 2048, 64
SEQUENCES = 32  # Of attention; each has BATCH / SEQUENCES tokens.
Array = jax.Array


def normalized(x: Array) -> Array:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5)


def attention(x: Array, w: Array) -> Array:
    tokens = x.reshape(SEQUENCES, -1, x.shape[-1])
    q, k, v = (normalized(tokens) @ w * scale for scale in (1.0, 0.5, 0.25))
    weights = jax.nn.softmax(q @ k.swapaxes(1, 2) / 8)
    return (weights @ v).reshape(x.shape)


BODIES: dict[str, Callable[[Array, Array], Array]] = {
    "ReLU": lambda x, w: jax.nn.relu(x @ w),
    "softplus": lambda x, w: jax.nn.softplus(x @ w),
    "tanh": lambda x, w: jnp.tanh(x @ w),
    "GELU": lambda x, w: jax.nn.gelu(x @ w),
    "gated (SwiGLU)": lambda x, w: jax.nn.silu(x @ w) * (x @ w.T),
    "norm and GELU": lambda x, w: jax.nn.gelu(normalized(x) @ w),
    "attention": attention,
}


def loop(body: Callable[[Array, Array], Array], ws: Array, x: Array) -> Array:
    """The sum of the activations behind all layers."""
    return jax.lax.scan(lambda x, w: (x + body(x, w), None), x, ws)[0].sum()


def bytes_an_entry(fun: Callable[[Array, Array], Array]) -> float:
    """Temporary bytes of the compiled gradient, by entry and iteration."""
    ws = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
    x = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    compiled = jax.jit(jax.grad(fun)).lower(ws, x).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    return float(temporary / (LAYERS * BATCH * WIDTH))


def row_of(name: str) -> dict[str, str]:
    """The row of a layer."""
    fun = functools.partial(loop, BODIES[name])
    ways = {
        "float32": fun,
        "nothing computed again": ols.autocast(fun, recompute=False),
        "cheap operations computed again": _recomputed(BODIES[name]),
        "chosen": ols.autocast(fun),
    }
    found = {way: f"{bytes_an_entry(fun):.2f}" for way, fun in ways.items()}
    return {"layer": name, **found}


def _recomputed(body: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    """The loop with the policy that loops have, whatever it saves."""
    from optax_lossscale._autocast.loops import _save_all_but_cheap

    policy = _save_all_but_cheap
    checkpoint = functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)
    return ols.autocast(functools.partial(loop, checkpoint(body)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_outputs(parser)
    arguments = parser.parse_args()
    use_host_cpu()
    publish(versions(), {"Bytes an entry": list(map(row_of, BODIES))}, arguments)


if __name__ == "__main__":
    main()
