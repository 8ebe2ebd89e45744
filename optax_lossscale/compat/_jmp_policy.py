"""jmp's policies: dtypes for parameters, computation and results, and casts to them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._ground.types import PyTree


@dataclasses.dataclass(frozen=True)
class Policy:
    """Dtypes for parameters, computation and results, and the casts to them.

        cast_to_param(x) = x.astype(param_dtype)  for every floating array x

    and likewise for the other two. Python numbers, NumPy scalars, integer and complex
    arrays are returned unchanged. Printed, it is a name for `get_policy`.

    A policy casts what you pass to it. `autocast` chooses a dtype for each operation of
    a function that was written for float32.

    Departure: a policy with other dtypes, such as float8, or with dtypes given as
    strings or as `np.dtype` can be printed too; jmp raises `KeyError`.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_lossscale.compat import jmp
      >>> policy = jmp.Policy(jnp.float32, jnp.float16, jnp.float32)
      >>> print(policy, policy.cast_to_compute(jnp.ones(2)).dtype)
      p=full,c=f16,o=full float16

    References:
      jmp 0.0.4, `jmp/_src/policy.py`.
    """

    param_dtype: jax.typing.DTypeLike
    compute_dtype: jax.typing.DTypeLike
    output_dtype: jax.typing.DTypeLike

    def cast_to_param(self, x: PyTree) -> PyTree:
        """Casts floating arrays to `param_dtype`."""
        return _cast_floating(x, self.param_dtype)

    def cast_to_compute(self, x: PyTree) -> PyTree:
        """Casts floating arrays to `compute_dtype`."""
        return _cast_floating(x, self.compute_dtype)

    def cast_to_output(self, x: PyTree) -> PyTree:
        """Casts floating arrays to `output_dtype`."""
        return _cast_floating(x, self.output_dtype)

    def with_output_dtype(self, output_dtype: jax.typing.DTypeLike) -> Policy:
        """Returns the same policy with another dtype of the results."""
        return dataclasses.replace(self, output_dtype=output_dtype)

    def __str__(self) -> str:
        dtypes = map(jnp.dtype, dataclasses.astuple(self))
        names = [dtype_to_names.get(dtype.type, (dtype.name,))[0] for dtype in dtypes]
        return "p={},c={},o={}".format(*names)


# What a policy calls the dtypes; it prints the first name of each. jmp's tests read it.
dtype_to_names = {
    jnp.bfloat16: ("bf16", "bfloat16"),
    jnp.float16: ("f16", "float16"),
    jnp.float32: ("full", "f32", "float32"),
    jnp.float64: ("f64", "float64"),
}


def get_policy(policy_name: str) -> Policy:
    """Makes a `Policy` from its name.

    A name is one dtype for all three, or a list such as `"p=f32,c=f16,o=f32"` with the
    keys `p` or `params`, `c` or `compute`, `o` or `output`. Missing ones follow:

        params = float32;  compute = params;  output = compute

    The dtypes are `half` (see `half_dtype`), `full`, `f16`, `f32`, `f64`, `bf16`,
    `float16`, `float32`, `float64` and `bfloat16`.

    Raises:
      ValueError: If a dtype or a key is unknown, or a part is not `key=dtype`.

    Example:
      >>> from optax_lossscale.compat import jmp
      >>> print(jmp.get_policy("c=f16"))
      p=full,c=f16,o=f16

    References:
      jmp 0.0.4, `jmp/_src/policy.py`.
    """
    if "=" not in policy_name:
        dtype = _named_dtype(policy_name)
        return Policy(dtype, dtype, dtype)
    named = {}
    for part in policy_name.split(","):
        key, *values = part.split("=")
        if len(values) != 1:
            raise ValueError(
                f"`policy_name` must be a list of key=dtype, got {part!r} in "
                f"{policy_name!r}."
            )
        if key not in ("params", "compute", "output", "p", "c", "o"):
            raise ValueError(
                f"Unknown key {key!r} in `policy_name` {policy_name!r}. (Keys are "
                "params, compute and output, or p, c and o.)"
            )
        named[key[0]] = _named_dtype(values[0])
    param = named.get("p", jnp.float32)
    compute = named.get("c", param)
    return Policy(param, compute, named.get("o", compute))


def cast_to_full(tree: PyTree) -> PyTree:
    """Casts floating arrays to float32, as `Policy` does.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_lossscale.compat import jmp
      >>> jmp.cast_to_full({"a": jnp.float16(1.0), "n": 3})
      {'a': Array(1., dtype=float32), 'n': 3}
    """
    return _cast_floating(tree, jnp.float32)


def cast_to_half(tree: PyTree) -> PyTree:
    """Casts floating arrays to `half_dtype()`, as `Policy` does.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_lossscale.compat import jmp
      >>> jmp.cast_to_half(jnp.ones(2)).dtype == jmp.half_dtype()
      True
    """
    return _cast_floating(tree, half_dtype())


def half_dtype() -> Any:
    """Returns bfloat16 if the first local device is a TPU, else float16.

    Example:
      >>> import jax
      >>> from optax_lossscale.compat import jmp
      >>> is_tpu = jax.local_devices()[0].platform == "tpu"
      >>> jmp.half_dtype().dtype.name == ("bfloat16" if is_tpu else "float16")
      True
    """
    is_tpu = jax.local_devices()[0].platform == "tpu"
    return jnp.bfloat16 if is_tpu else jnp.float16


def _cast_floating(tree: PyTree, dtype: jax.typing.DTypeLike) -> PyTree:
    def cast(leaf: PyTree) -> PyTree:
        is_array = isinstance(leaf, jax.Array | np.ndarray)
        is_cast = is_array and jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(dtype) if is_cast else leaf

    return jax.tree.map(cast, tree)


def _named_dtype(name: str) -> Any:
    if name == "half":
        return half_dtype()
    for dtype, names in dtype_to_names.items():
        if name in names:
            return dtype
    known = ", ".join(name for names in dtype_to_names.values() for name in names)
    raise ValueError(f"Unknown dtype {name!r}. (Dtypes are half, {known}.)")
