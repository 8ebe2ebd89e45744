"""What each kind of leaf means, and functions on the leaves of a pytree.

Throughout the package, "floating" covers the first two of these kinds:

* float8, float16, bfloat16, float32: computed in float32; float64 in float64;
* complex: real and imaginary part, each as above;
* integer, bool, `float0`, keys and other extended dtypes: returned unchanged, and
  always finite;
* what is no array, such as a function, a module or a dtype, although it may have a
  `dtype`: returned unchanged;
* an array of another library, which would be skipped silently: refused;
* `None` and `optax.MaskedNode`: no leaves;
* empty arrays: finite, with magnitude zero.
"""

import operator
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from optax_lossscale._ground.types import KeyPath, Mask, PyTree

_ARRAYS = (jax.Array, np.ndarray, np.generic)
# They describe an array, and stand for it where no entries are needed.
_ABSTRACT = (jax.ShapeDtypeStruct, jax.core.AbstractValue)


def are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Whether two lists hold the very same objects."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def dtype_of(leaf: object) -> np.dtype | None:
    """The dtype of an array, which may be abstract or wrapped; None for other objects.

    Other objects may have a `dtype` too: a module, or a class such as `jnp.float16`.
    """
    array = unwrapped(leaf)
    is_array = isinstance(array, _ARRAYS + _ABSTRACT)
    return getattr(array, "dtype", None) if is_array else None


def is_numeric(leaf: object) -> bool:
    """Whether a leaf is an array, which may be abstract or wrapped, or a number."""
    return dtype_of(leaf) is not None or isinstance(leaf, complex | float | int)


def is_floating_array(leaf: object) -> bool:
    """Whether a leaf is a floating or complex array."""
    dtype = dtype_of(leaf)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def is_floating(leaf: object) -> bool:
    """Whether a leaf is a floating or complex array or number."""
    return isinstance(leaf, float | complex) or is_floating_array(leaf)


def check_arrays(leaves: Iterable[object]) -> None:
    """Refuses arrays of other libraries, whose entries would all count as finite."""
    for leaf in leaves:
        is_foreign = hasattr(type(leaf), "__array__") and dtype_of(leaf) is None
        if is_foreign or isinstance(leaf, jax.Ref):
            raise TypeError(
                "every array must be one of JAX or NumPy, got one of type "
                f"{type(leaf).__name__}. (Convert it with `jnp.asarray`, or read a "
                "`jax.Ref` with `ref[...]`.)"
            )


def unwrapped(leaf: PyTree) -> PyTree:
    """The array in a wrapped one; any other object unchanged."""
    return leaf.__jax_array__() if is_wrapped(leaf) else leaf


def is_wrapped(node: object) -> bool:
    """Whether a node wraps an array, as `nnx.Variable` and Keras's variables do."""
    # That of a traced `jax.Ref` is None.
    method = getattr(type(node), "__jax_array__", None)
    return callable(method) and not isinstance(node, jax.Array)


def unwrap(tree: PyTree) -> PyTree:
    """Replaces wrapped arrays, such as Flax's `nnx.Variable`, by the arrays."""
    return jax.tree.map(
        lambda node: jnp.asarray(unwrapped(node)) if is_wrapped(node) else node,
        tree,
        is_leaf=is_wrapped,
    )


def is_absent(node: object) -> bool:
    """Whether a node stands for a leaf that is missing."""
    return node is None or isinstance(node, optax.MaskedNode)


def wide_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """Returns float32 for narrower floating dtypes, and any other one unchanged."""
    return jnp.dtype(jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype)


def widen(leaf: PyTree) -> PyTree:
    """Casts a floating leaf, which may be abstract, to float32 or wider.

    Arrays become strongly typed. Other leaves are returned unchanged.
    """
    if not is_floating(leaf):
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return cast_abstract(leaf, wide_dtype(leaf.dtype))
    array = leaf if isinstance(leaf, jax.Array) else jnp.asarray(unwrapped(leaf))
    dtype = wide_dtype(array.dtype)
    if array.dtype == dtype and not array.weak_type:
        return array  # Saves a call for each leaf outside `jit`.
    return lax.convert_element_type(keep_rounding(array), dtype)


def keep_rounding(array: jax.Array) -> jax.Array:
    """The same array, of which XLA does not undo the rounding.

    In one compiled program XLA for GPU leaves out a cast to a narrower dtype and back
    to float32 (https://github.com/openxla/xla/issues/41605). What reads the array in
    float32 then sees numbers that the array cannot hold. A `reduce_precision` between
    the casts keeps them. It rounds to the bits of float32, which changes nothing.
    """
    if jnp.finfo(array.dtype).bits >= 32 or not isinstance(array, jax.core.Tracer):
        return array  # Outside `jit` each cast is a program of its own.
    return lax.reduce_precision(array, exponent_bits=8, mantissa_bits=23)


def strengthen(leaf: PyTree) -> PyTree:
    """Makes a leaf strongly typed, as it will be after the first update."""
    # Keys are arrays without this attribute.
    is_weak = isinstance(leaf, jax.Array) and getattr(leaf, "weak_type", False)
    return leaf.astype(leaf.dtype) if is_weak else leaf


def copy_wide(param: PyTree) -> PyTree:
    """A widened copy of a parameter, or zeros for an abstract one.

    The copy has a buffer of its own, so that parameters and state can both be donated.
    """
    if not is_numeric(param):
        return param
    if isinstance(param, jax.ShapeDtypeStruct):
        return jnp.zeros_like(widen(param))
    return jnp.array(widen(param))


def cast_abstract(
    array: jax.ShapeDtypeStruct, dtype: jax.typing.DTypeLike
) -> jax.ShapeDtypeStruct:
    """An abstract array of another dtype, with the same sharding."""
    return jax.ShapeDtypeStruct(array.shape, dtype, sharding=array.sharding)


def real_parts(array: jax.Array) -> tuple[jax.Array, ...]:
    """Both parts of a complex array; a real array alone."""
    is_complex = array.dtype.kind == "c"
    return (lax.real(array), lax.imag(array)) if is_complex else (array,)


def map_floating(
    function: Callable[..., list[jax.Array]], tree: PyTree, *args: jax.Array
) -> PyTree:
    """Replaces floating leaves by the results of a function of the list of them."""
    leaves, structure = jax.tree.flatten(tree)
    check_arrays(leaves)
    floating = [unwrapped(leaf) for leaf in leaves if is_floating(leaf)]
    mapped = iter(function(floating, *args))
    merged = [next(mapped) if is_floating(leaf) else leaf for leaf in leaves]
    return jax.tree.unflatten(structure, merged)


def floating_leaves(tree: PyTree) -> dict[str, PyTree]:
    """The floating leaves by their paths, such as `"layer/kernel"`."""
    check_arrays(jax.tree.leaves(tree))
    found: dict[str, PyTree] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if is_floating(leaf):
            name = path_name(path)
            # A key may itself hold a slash, so that two paths read the same.
            found[jax.tree_util.keystr(path) if name in found else name] = leaf
    return found


def path_name(path: KeyPath) -> str:
    """The name of a path in a pytree, such as `"layer/kernel"`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def is_at(keys: KeyPath, path: str | None) -> bool:
    """Whether a key path is, or begins with, a path in words; True for None."""
    if not isinstance(path, str | None):
        raise TypeError(f'`path` must be a string such as "generator", got {path!r}.')
    return path is None or f"{path_name(keys)}/".startswith(f"{path.rstrip('/')}/")


def find_one(
    tree: PyTree, kind: type, path: str | None, must: str, pick: str
) -> tuple[KeyPath, PyTree] | None:
    """Path and value of the one node of a type at `path`; None if there is none at all.

    If there are several, an error lists their paths. It begins with `must`, such as
    "the tree must hold one LossScaleState", and ends with `pick`, which says how to
    choose one: `{}` in it stands for the argument, such as `path='generator'`.
    """
    everywhere = find_by_type(tree, kind)
    found = [(keys, node) for keys, node in everywhere if is_at(keys, path)]
    if len(found) == 1 or not everywhere:
        return found[0] if found else None
    at = "" if path is None else f" at `path` {path!r}"
    got = f"got {len(found)}, at" if found else "got none there, but some at"
    names = [path_name(keys) for keys, _ in found or everywhere]
    hint = pick.format(f"path={names[0]!r}")
    raise ValueError(f"{must}{at}, {got} {names}. (Pick one by its path: {hint})")


def find_by_type(
    tree: PyTree, kind: type | tuple[type, ...]
) -> list[tuple[KeyPath, PyTree]]:
    """Path and value of every node of a type, except those inside another one."""

    def is_one(node: object) -> bool:
        return isinstance(node, kind)

    nodes = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_one)[0]
    return [(path, node) for path, node in nodes if is_one(node)]


def flags_of(mask: Mask, tree: PyTree) -> PyTree:
    """What a mask of Optax means: a pytree of bools that is a prefix of `tree`."""
    if mask is None:
        return True
    # An Equinox module of bools may be callable too.
    has_bools = any(isinstance(leaf, bool) for leaf in jax.tree.leaves(mask))
    mask = mask(tree) if callable(mask) and not has_bools else mask
    # A mask made from `nnx.state(model)` holds its bools in variables.
    return jax.tree.map(unwrapped, mask, is_leaf=is_wrapped)


def keep_marked(flags: PyTree, tree: PyTree) -> PyTree:
    """Keeps the parts of a tree whose flags are True; None elsewhere."""
    return jax.tree.map(lambda keep, part: part if keep else None, flags, tree)
