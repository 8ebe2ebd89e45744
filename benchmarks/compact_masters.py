"""Compares full and compact float32 masters: memory, bytes of an update, time on a CPU.

    python benchmarks/compact_masters.py [--platforms cpu tpu cuda] [--record]

The script needs no TPU and no GPU, only their compilers: `pip install libtpu
'jax[cuda12]'`. Bytes, kernels and temporary memory are those of the compiled update by
AdamW. The limit is each array read once, and each but the gradients written once; with
loss scaling, the gradients are read once more.
"""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import optax_lossscale as ols
from _lib.costs import Cost, compile_step
from _lib.devices import DEVICE_NAMES, add_platforms, device_of, use_host_cpu
from _lib.large_models import MODELS
from _lib.tables import add_outputs, publish, versions
from _lib.update_times import make_inputs, make_program, median_ratios
from _lib.updates import OPTIMIZERS, Way, bare, loss_scaled

MODEL = "GPT, 125 M"
LEAVES, SIZE = 60, 100_000
Wrap = Callable[[Any], Any]


class Form(NamedTuple):
    """How parameters are held.

    Attributes:
      dtype: The dtype of the parameters.
      wrap: What is put around the optimizer.
      master_bytes: Bytes of the state for each parameter, without those of AdamW.
    """

    dtype: Any
    wrap: Wrap
    master_bytes: int


def compact(inner: Any) -> Any:
    """Wraps an optimizer with compact masters."""
    return ols.master_weights(inner, compact=True)


FORMS = {
    "float32": Form(jnp.float32, lambda inner: inner, 0),
    "float16, full masters": Form(jnp.float16, ols.master_weights, 4),
    "float16, compact masters": Form(jnp.float16, compact, 2),
    "bfloat16, full masters": Form(jnp.bfloat16, ols.master_weights, 4),
    "bfloat16, compact masters": Form(jnp.bfloat16, compact, 2),
}


def make_update(form: Form, is_scaled: bool) -> Way:
    """Makes the update by AdamW of parameters that are held in a form."""
    make = loss_scaled if is_scaled else bare
    return make(form.wrap(OPTIMIZERS["adamw"]))


def memory_rows() -> list[dict[str, str]]:
    """Returns a row for each form: the memory that a large model takes."""
    _, shapes, _ = MODELS[MODEL](None, False)
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    rows = []
    for name, form in FORMS.items():
        params = jax.eval_shape(lambda p, d=form.dtype: ols.cast_params(p, d), shapes)
        state = jax.eval_shape(make_update(form, False).init, params)
        held = [bytes_of(params), bytes_of(state)]
        rows.append(
            {
                "parameters": name,
                "millions": f"{count / 1e6:.0f}",
                "parameters, MB": f"{held[0] / 1e6:.0f}",
                "optimizer's state, MB": f"{held[1] / 1e6:.0f}",
                "together, MB": f"{sum(held) / 1e6:.0f}",
                "bytes a parameter": f"{sum(held) / count:.2f}",
            }
        )
    return rows


def bytes_of(tree: Any) -> int:
    """Returns the size of all arrays in a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def cost(platform: str, form: Form, is_scaled: bool, leaves: int) -> Cost:
    """Compiles an update, with gradients in the parameters' dtype, for a platform."""
    update = make_update(form, is_scaled)
    params = [jax.ShapeDtypeStruct((SIZE // 100, 100), form.dtype)] * leaves
    args = (params, jax.eval_shape(update.init, params), params)
    return compile_step(update.step, args, device_of(platform))[1]


def limit(form: Form, is_scaled: bool, leaves: int) -> int:
    """Returns the least bytes that an update can move."""
    param = grad = jnp.dtype(form.dtype).itemsize
    moments = 8
    updated = param + form.master_bytes + moments
    return leaves * SIZE * (2 * updated + grad * (1 + is_scaled))


def byte_rows(platforms: list[str]) -> list[dict[str, str]]:
    """Returns a row for each platform and form: what the compiled update moves."""
    rows = []
    for platform in platforms:
        for is_scaled in (False, True):
            for name, form in FORMS.items():
                own = cost(platform, form, is_scaled, LEAVES)
                least = limit(form, is_scaled, LEAVES)
                rows.append(
                    {
                        "compiled for": DEVICE_NAMES[platform],
                        "parameters": name,
                        "loss scaling": "yes" if is_scaled else "no",
                        "MB": f"{own.moved / 1e6:.1f}",
                        "/ limit": f"{own.moved / least:.3f}",
                        "kernels": str(own.kernels),
                        "temporary MB": f"{own.temporaries / 1e6:.1f}",
                        "compile s": f"{own.compile_s:.1f}",
                    }
                )
    return rows


def time_rows() -> list[dict[str, str]]:
    """Returns a row for each form: the time of an update on the CPU, over float32's."""
    params, grads = make_inputs([(SIZE // 100, 100)] * LEAVES, jnp.float16)
    programs = []
    for form in FORMS.values():
        held = [leaf.astype(form.dtype) for leaf in params]
        programs.append(make_program(make_update(form, True), held, grads, 1))
    ratios = median_ratios(programs, grads)
    return [
        {"parameters": name, "time / float32": f"{ratio:.2f}"}
        for name, ratio in zip(FORMS, ratios, strict=True)
    ]


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_platforms(parser)
    add_outputs(parser)
    arguments = parser.parse_args()
    use_host_cpu()
    tables = {
        f"Memory of {MODEL}, with AdamW": memory_rows(),
        f"One update, {LEAVES} leaves of {SIZE}": byte_rows(arguments.platforms),
        "The same update with loss scaling, on this CPU": time_rows(),
    }
    publish(versions(), tables, arguments)


if __name__ == "__main__":
    main()
