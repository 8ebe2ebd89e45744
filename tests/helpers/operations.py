"""Find operations that were traced."""


def select(operations, name, *, is_backward=False):
    kind = name, is_backward
    return [x for x in operations if (x.primitive, x.is_backward) == kind]
