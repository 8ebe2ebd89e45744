"""Find operations that were traced, and round as float16 does."""

import numpy as np


def select(operations, name, *, is_backward=False):
    kind = name, is_backward
    return [x for x in operations if (x.primitive, x.is_backward) == kind]


def only(operations, name, *, is_backward=False):
    (operation,) = select(operations, name, is_backward=is_backward)
    return operation


def rounded(x):
    return np.asarray(x, np.float16).astype(np.float32)
