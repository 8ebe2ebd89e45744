"""No program casts to half precision and back; XLA for GPU removes the rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend import core

import optax_lossscale as ols
from helpers.inner import lenient

SGD = lenient(optax.sgd(1.0))
in_each_half = pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])


def casts_left_out_on_gpu(function, *args):
    """How many casts from float32 to less, and back, XLA for GPU would leave out."""
    closed = jax.make_jaxpr(function)(*args)
    return _undone(closed.jaxpr, [False] * len(closed.jaxpr.invars))[0]


def _undone(program, are_rounded):
    """The casts left out in a program, and which of its results were just rounded."""
    rounded = dict(zip(program.invars, are_rounded, strict=True))
    count = 0

    def was_rounded(atom):
        return not isinstance(atom, core.Literal) and rounded.get(atom, False)

    for equation in program.eqns:
        flags = [was_rounded(atom) for atom in equation.invars]
        results = [False] * len(equation.outvars)
        if equation.primitive.name == "convert_element_type":
            old, new = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
            count += flags[0] and new == jnp.float32
            results = [old == jnp.float32 and new.itemsize < 4]
        elif equation.primitive.name == "stop_gradient":  # Nothing, once compiled.
            results = flags
        elif "jaxpr" in equation.params:  # A call of a jitted function.
            inner = equation.params["jaxpr"]
            inner_count, results = _undone(getattr(inner, "jaxpr", inner), flags)
            count += inner_count
        rounded.update(zip(equation.outvars, results, strict=True))
    return count, [was_rounded(atom) for atom in program.outvars]


@in_each_half
def test_a_cast_to_half_precision_and_back_is_counted(dtype):
    def there_and_back(x):
        return jax.jit(lambda x: x.astype(dtype).astype(jnp.float32))(x)

    assert casts_left_out_on_gpu(there_and_back, np.float32(1.0)) == 1


@in_each_half
def test_the_update_of_masters_is_the_difference_of_rounded_numbers(dtype):
    tx, params = ols.loss_scaled(ols.master_weights(SGD)), jnp.ones(2, dtype)
    assert casts_left_out_on_gpu(tx.update, params, tx.init(params), params) == 0


@in_each_half
def test_masters_of_cast_parameters_are_rounded(dtype):
    def init(x):
        return ols.master_weights(SGD).init(ols.cast_params(x, dtype))

    assert casts_left_out_on_gpu(init, np.float32(1.0)) == 0


@in_each_half
@pytest.mark.parametrize("check", [ols.all_finite, ols.max_magnitude])
def test_checks_see_the_numbers_that_an_array_holds(check, dtype):
    def rounded_and_checked(x):
        return check(x.astype(dtype))

    assert casts_left_out_on_gpu(rounded_and_checked, np.float32([1.0])) == 0


@pytest.mark.parametrize("rule", [ols.dynamic_loss_scale(), ols.headroom_loss_scale()])
def test_a_step_is_skipped_for_what_the_gradients_hold(rule):
    tx, params = ols.loss_scaled(SGD, rule), jnp.ones(2)

    def update(grads, state):
        _, state = tx.update(grads.astype(jnp.float16), state, params)
        return state.loss_scale_state

    assert casts_left_out_on_gpu(update, params, tx.init(params)) == 0
