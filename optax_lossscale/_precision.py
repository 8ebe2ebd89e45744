"""Parameters in half precision, and their float32 masters."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._checks import as_optimizer
from optax_lossscale._state import MasterWeightsState, PyTree
from optax_lossscale._tree import is_floating, wide_dtype, wide_param, widen

# A name such as `LayerNorm_0`, `batch_norm`, `norm1`, `normalization`, `ln_f`, `bn2`.
_NORMALIZATION = re.compile(
    r"(?i)(?<![a-z0-9_])"
    r"((\w*_)?(bn|gn|ln|norm|normali[sz]ation)"
    r"|\w*(batch|group|instance|layer|rms)_?norm(ali[sz]ation)?)"
    r"(_?\d+d?)?(_\w+)?(?![a-z0-9_])"
)
_CASTABLE = (jnp.float16, jnp.bfloat16, jnp.float32)


def cast_params(
    params: optax.Params,
    dtype: jax.typing.DTypeLike = jnp.float16,
    *,
    keep: Callable[[str, Any], bool] | None = None,
) -> optax.Params:
    """Casts parameters to a dtype, all but those that are kept.

        x.astype(dtype)  for every float32, float16 or bfloat16 leaf x that is not kept

    For level O2: parameters in half the memory, normalization layers in float32. Train
    them with `master_weights`, or small updates are rounded away.

    Args:
      params: Arrays of any shapes, a Flax, Haiku or Equinox tree of parameters, or a
        module. What is not float32, float16 or bfloat16 passes through.
      dtype: float16, bfloat16, or float32 for the way back.
      keep: From a leaf's path, such as `"layer/kernel"`, and the leaf: whether to leave
        it as it is. None keeps normalization layers, known by the names of their
        classes and of what holds them: `LayerNorm_0`, `batch_norm`, `norm1`, `ln_f`.

    Returns:
      The same tree.

    Raises:
      ValueError: If `dtype` is none of the three.

    Example:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> params = {"Dense_0": {"bias": jnp.ones(2)}, "LayerNorm_0": jnp.ones(2)}
      >>> ols.cast_params(params)
      {'Dense_0': {'bias': Array([1., 1.], dtype=float16)},
       'LayerNorm_0': Array([1., 1.], dtype=float32)}

    References:
      `opt_level="O2"` of NVIDIA apex (https://nvidia.github.io/apex/amp.html).
    """
    if jnp.dtype(dtype) not in [jnp.dtype(known) for known in _CASTABLE]:
        raise ValueError(
            f"`dtype` must be float16, bfloat16 or float32, got {jnp.dtype(dtype)}."
        )
    paths, structure = jax.tree_util.tree_flatten_with_path(params)
    if keep is None:
        kept = in_normalization(params)
    else:
        names = [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in paths]
        kept = [keep(name, leaf) for name, (_, leaf) in zip(names, paths, strict=True)]

    def cast(leaf: Any) -> Any:
        is_castable = getattr(leaf, "dtype", None) in _CASTABLE
        return jnp.asarray(leaf, dtype) if is_castable else leaf

    leaves = [
        leaf if is_kept else cast(leaf)
        for (_, leaf), is_kept in zip(paths, kept, strict=True)
    ]
    return jax.tree.unflatten(structure, leaves)


def master_weights(
    inner: optax.GradientTransformation | optax.MultiSteps,
) -> optax.GradientTransformationExtraArgs:
    """Updates half-precision parameters through a float32 copy of them.

    With master `m`, float32, and the inner optimizer's updates `u` of it:

        m      = m + u
        update = round(m) - params        so that params + update = round(m), exactly

    Where float32 cannot hold that difference (a parameter that falls to a thousandth
    of itself and less in one step), the master takes the value that the parameter gets.
    So after every step the parameter is the rounded master. In float16 alone an update
    of less than 2**-11 of its parameter is lost.

    It goes around `loss_scaled` or inside it, alike; inside, `check_updates` also sees
    what would take a float16 parameter to infinity. If half-precision parameters are
    changed by anything else, the next update sets them back to the masters.

    Args:
      inner: Any Optax optimizer. It sees the masters and the gradients in float32.

    Returns:
      An optimizer. Its `update` needs `params`; its updates are float32. Parameters in
      float32 and wider are updated as they would be without it.

    Raises:
      TypeError: If `inner` is no optimizer.
      ValueError: From `update`, without `params`.

    Example:
      >>> import jax.numpy as jnp, optax, optax_lossscale as ols
      >>> params = jnp.float16(1.0)
      >>> tx = ols.master_weights(optax.sgd(1e-4))
      >>> updates, state = tx.update(jnp.float16(1.0), tx.init(params), params)
      >>> updates, state.master_params  # Eight such steps move the parameter.
      (Array(0., dtype=float32), Array(0.9999, dtype=float32))

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.1
      (https://arxiv.org/abs/1710.03740).
    """
    optimizer = as_optimizer("inner", inner)

    def init(params: optax.Params) -> MasterWeightsState:
        # Copies, so that parameters and state can both be donated.
        master = jax.tree.map(
            lambda x: jnp.array(x, wide_dtype(x.dtype)) if is_floating(x) else x, params
        )
        return MasterWeightsState(master, optimizer.init(master))

    def update(
        grads: optax.Updates,
        state: MasterWeightsState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, MasterWeightsState]:
        if params is None:
            raise ValueError("`update` of `master_weights` needs `params`.")
        # What is no half may have been changed by others; its own value is the master.
        master = jax.tree.map(
            lambda p, m: p if p.dtype == m.dtype else m, params, state.master_params
        )
        grads = jax.tree.map(wide_param, grads)
        updates, inner_state = optimizer.update(
            grads, state.inner_state, master, **extra_args
        )
        moved = optax.apply_updates(master, updates)
        updates = jax.tree.map(_update_to, params, moved, updates)
        master = jax.tree.map(_rounded_from, params, moved, updates)
        return updates, MasterWeightsState(master, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _update_to(param: jax.Array, master: jax.Array, update: jax.Array) -> jax.Array:
    """What takes a parameter to its rounded master."""
    if param.dtype == master.dtype:
        return update
    return widen(master.astype(param.dtype)) - widen(param)


def _rounded_from(param: jax.Array, master: jax.Array, update: jax.Array) -> jax.Array:
    """The master, or where that is not what the parameter becomes, the parameter."""
    if param.dtype == master.dtype:
        return master
    becomes = (widen(param) + update).astype(param.dtype)
    return jnp.where(becomes == master.astype(param.dtype), master, widen(becomes))


@functools.cache
def is_normalization(names: str) -> bool:
    """Whether one name of a path is that of a normalization layer."""
    return _NORMALIZATION.search(names) is not None


def in_normalization(tree: PyTree) -> list[bool]:
    """Of each leaf, whether it belongs to a normalization layer."""

    def is_layer(node: object) -> bool:
        return is_normalization(type(node).__name__)

    flags = []
    for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_layer)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        is_one = is_layer(node) or is_normalization(name)
        flags += [is_one] * len(jax.tree.leaves(node))
    return flags
