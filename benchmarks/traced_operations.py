"""Times `trace_operations` on a transformer and on four small models.

    python benchmarks/traced_operations.py [--batch N] [--length N] [--layers N]
                                           [--width N]

Tracing stands beside the first call of the compiled gradient, which is mostly the time
to compile it. The target is six times as long.
"""

import argparse
import gc
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import optax_lossscale as ols
from _lib import plain_models
from _lib.models import Decoder, next_token_loss, random_key
from _lib.tables import add_outputs, publish, versions


def seconds(call: Callable[[], Any]) -> float:
    """Returns how long a call takes until its results are there."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def live_bytes() -> int:
    """Returns the size of all arrays that are alive."""
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def time_tracing(model: str, loss_fn: Any, *args: Any) -> dict[str, Any]:
    """Times `trace_operations` beside the gradient, and counts what it leaves."""
    gradient = jax.jit(jax.value_and_grad(ols.autocast(loss_fn)))
    plain = seconds(lambda: gradient(*args))
    before, start = live_bytes(), time.perf_counter()
    operations = ols.diagnostics.trace_operations(loss_fn, *args, loss_scale=2.0**15)
    traced = time.perf_counter() - start
    return {
        "model": model,
        "first call of the gradient s": f"{plain:.1f}",
        "trace_operations s": f"{traced:.1f}",
        "ratio": f"{traced / plain:.1f}",
        "operations": len(operations),
        "bytes of new arrays": live_bytes() - before,
    }


def plain_case(model: str) -> tuple[Any, ...]:
    """Returns the loss and the arguments of a small model of `plain_models`."""
    loss_fn, params, batch = plain_models.MODELS[model](None, jnp.float32, True)
    shapes, tree = jax.tree.flatten((params, *batch))
    arrays = [
        jax.random.normal(random_key(i), x.shape).astype(x.dtype) / 8
        if jnp.issubdtype(x.dtype, jnp.floating)
        else jax.random.randint(random_key(i), x.shape, 0, 8)
        for i, x in enumerate(shapes)
    ]
    return model, loss_fn, *jax.tree.unflatten(tree, arrays)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_outputs(parser)
    parser.add_argument("--batch", type=int, default=2, help="how many sequences")
    parser.add_argument("--length", type=int, default=64, help="tokens in each")
    parser.add_argument("--layers", type=int, default=12, help="how many layers")
    parser.add_argument("--width", type=int, default=256, help="of each layer")
    args = parser.parse_args()
    shape = (args.batch, args.length)
    model = Decoder(
        vocabulary=256, length=args.length, width=args.width, depth=args.layers
    )
    tokens = jax.random.randint(random_key(0), shape, 0, 256)
    params, loss_fn = model.init(random_key(1), tokens), next_token_loss(model)
    size = sum(leaf.size for leaf in jax.tree.leaves(params)) / 1e6
    size_text = f"{args.layers} layers, {size:.1f} million parameters"
    title = f"{versions()}; {size_text}; {args.batch} x {args.length} tokens"
    rows = [time_tracing("the transformer", loss_fn, params, tokens)]
    rows += [time_tracing(*plain_case(model)) for model in plain_models.MODELS]
    publish(title, {"Tracing operations": rows}, args)


if __name__ == "__main__":
    main()
