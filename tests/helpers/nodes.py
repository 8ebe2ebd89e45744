"""A node of one's own, whose leaves all have one key; foreign and wrapped arrays."""

import jax
import numpy as np


class Twins:
    def __init__(self, *leaves):
        self.leaves = leaves


jax.tree_util.register_pytree_with_keys(
    Twins,
    lambda twins: ([(jax.tree_util.DictKey("x"), x) for x in twins.leaves], None),
    lambda _, leaves: Twins(*leaves),
)


class Foreign:
    """An array of another library."""

    dtype = "float32"

    def __array__(self, dtype=None, copy=None):
        return np.asarray([np.nan])


class Wrapped:
    """A wrapped array, as a variable of Keras is."""

    def __init__(self, array):
        self.array = array
        self.dtype = str(array.dtype)

    def __jax_array__(self):
        return self.array
