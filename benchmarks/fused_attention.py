"""Compiles a transformer block for an H200, with fused attention and without it.

    python benchmarks/fused_attention.py [--record]

It needs NVIDIA's compiler (`pip install 'jax[cuda12]'`) but no GPU.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

import optax_lossscale as ols
from _lib.compiled_text import bytes_and_kernels
from _lib.devices import device_of, use_host_cpu
from _lib.tables import add_outputs, publish, versions

BATCH, LENGTH, HEADS, HEAD = 2, 1024, 4, 64
WIDTH = HEADS * HEAD
Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

unfused = functools.partial(
    jax.nn.dot_product_attention, implementation="xla", is_causal=True
)
fused = functools.partial(
    jax.nn.dot_product_attention, implementation="cudnn", is_causal=True
)


def block(attention: Attention, params: Any, x: jax.Array) -> jax.Array:
    """Applies a pre-norm transformer block that was written for float32."""
    y = jax.nn.standardize(x, axis=-1, epsilon=1e-5)
    q, k, v = jnp.split((y @ params["qkv"]).reshape(BATCH, LENGTH, HEADS, -1), 3, -1)
    x = x + attention(q, k, v).reshape(x.shape) @ params["out"]
    hidden = jax.nn.gelu(jax.nn.standardize(x, axis=-1, epsilon=1e-5) @ params["up"])
    return x + hidden @ params["down"]


def loss_with(attention: Attention) -> Callable[..., jax.Array]:
    """Returns the loss function of a block with this attention."""

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(block(attention, params, x) ** 2)

    return loss_fn


WAYS = {
    "float32": loss_with(unfused),
    "autocast": ols.autocast(loss_with(unfused)),
    "autocast, fused attention": ols.autocast(loss_with(ols.low_precision(fused))),
    "autocast, O2, fused attention": ols.autocast(
        loss_with(ols.low_precision(fused)), level="O2"
    ),
}


def compile_step(loss_fn: Callable[..., jax.Array]) -> Any:
    """Compiles value and gradient of the loss for an H200."""
    sharding = SingleDeviceSharding(device_of("cuda"))
    shapes = {
        "qkv": (WIDTH, 3 * WIDTH),
        "out": (WIDTH, WIDTH),
        "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH),
    }
    shape_of = functools.partial(
        jax.ShapeDtypeStruct, dtype=jnp.float32, sharding=sharding
    )
    params = {name: shape_of(shape) for name, shape in shapes.items()}
    x = shape_of((BATCH, LENGTH, WIDTH))
    return jax.jit(jax.value_and_grad(loss_fn)).lower(params, x).compile()


def row(way: str) -> dict[str, str]:
    """Returns the row of one way."""
    compiled = compile_step(WAYS[way])
    program = compiled.as_text()
    backward = program.count('custom_call_target="__cudnn$fmha') - (
        forward := program.count('custom_call_target="__cudnn$fmhaSoftmax"')
    )
    return {
        "way": way,
        "temporary MB": f"{compiled.memory_analysis().temp_size_in_bytes / 1e6:.1f}",
        "kernels": str(bytes_and_kernels(program)[1]),
        "fused, forward": str(forward),
        "fused, backward": str(backward),
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_outputs(parser)
    arguments = parser.parse_args()
    use_host_cpu()
    title = f"{versions()}; batch {BATCH}, length {LENGTH}, {HEADS} heads of {HEAD}"
    publish(title, {"A transformer block": [row(way) for way in WAYS]}, arguments)


if __name__ == "__main__":
    main()
