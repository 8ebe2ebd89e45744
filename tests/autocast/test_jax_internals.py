"""What `_autocast/jax_internals.py` needs of JAX and Flax is there.

Run this file first with a new JAX. The docstring of a test that fails says what to do,
and what is lost if nothing is done. The package is imported only where it has to be, so
that these tests fail before an ImportError. Derivative rules, kernels, scopes and lines
are tested where they are used: `test_derivative_rules.py`, `test_transformations.py`
and `test_scopes_and_report.py`.
"""

import functools
import importlib

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

X = jnp.ones((2, 2))
SPLIT = jax.sharding.PartitionSpec("i")


@pytest.fixture
def over_devices():
    """`jax.shard_map` over one device."""
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("i",), auto, devices=jax.devices()[:1])
    return functools.partial(jax.shard_map, mesh=mesh, out_specs=SPLIT)


@pytest.mark.parametrize(
    ("module", "name", "fun"),
    [
        ("jax._src.ad_checkpoint", "remat_p", jax.checkpoint(jnp.sin)),
        ("jax._src.ad_checkpoint", "name_p", lambda x: checkpoint_name(x, "x")),
        ("jax._src.lax.lax", "split_p", lambda x: lax.split(x, (1, 1))),
        (
            "jax._src.lax.lax",
            "ragged_dot_general_p",
            lambda x: lax.ragged_dot(x, x[None], jnp.array([2])),
        ),
    ],
)
def test_a_primitive_is_where_it_is_imported_from_and_still_in_use(module, name, fun):
    """Else import what `make_jaxpr` prints from where JAX makes it.

    If JAX has dropped it, drop it from `_CHEAP` or `PRODUCTS` as well.
    """
    primitive = getattr(importlib.import_module(module), name, None)
    assert jax.make_jaxpr(fun)(X).eqns[-1].primitive is primitive


def test_shard_map_marks_arrays_that_vary_by_a_primitive_that_is_known(over_devices):
    """Else add the new one to `_CHEAP`, or every loop saves what it marks."""
    from optax_lossscale._autocast.jax_internals import pvary_p

    whole = jax.sharding.PartitionSpec()
    fun = over_devices(lambda x, y: x * y, in_specs=(whole, SPLIT))
    program = jax.make_jaxpr(fun)(X, X).eqns[0].params["jaxpr"]
    names = {equation.primitive.name for equation in program.eqns}
    assert names <= {pvary_p.name, "mul"}


def test_arrays_in_a_shard_map_know_over_which_axes_they_vary(over_devices):
    """Else change `axes_varying`, for Flax."""
    from optax_lossscale._ground.axes import axes_varying

    def fun(x):
        assert axes_varying(x) == {"i"}
        return x

    over_devices(fun, in_specs=SPLIT)(X)


def test_a_traced_array_knows_where_it_comes_from():
    """Else correct `equation_of`, `origin_of`, `traces_around` or `program_around`.

    Look into the class of an array, or of its trace, for what made it. Without them
    `update` does not warn of unscaled gradients. Numbers are in `constant_of`.
    """
    from optax_lossscale._autocast.jax_internals import (
        constant_of,
        equation_of,
        origin_of,
        program_around,
        traces_around,
    )
    from optax_lossscale._autocast.programs import is_transposed

    def origins(array):
        return [*map(origin_of, equation_of(origin_of(array)).in_tracers)]

    @jax.jit
    def fun(x):
        assert equation_of(x) is None
        assert is_transposed(equation_of(jax.grad(lambda x: 2.0 * jnp.sum(x @ x))(x)))
        return closed_over(x), in_a_batch(x)

    def closed_over(x):
        def body(carry, y):
            total = x + carry
            assert any(origin is x for origin in origins(total))
            assert traces_around(total) == ["scan", "jit", None]
            return carry, y

        return jax.lax.scan(body, x, x)

    def in_a_batch(x):
        def row(x, y):
            product = x * 2.0
            assert constant_of(origins(product)[1]) == 2.0
            assert origin_of(y).shape == X.shape
            return product

        return jax.vmap(row, (None, 0))(x, x)

    @jax.jit
    def with_branch(x):
        return lax.cond(True, branch, lambda y: y, jnp.sin(x))

    def branch(y):
        equations, inputs = program_around(y)
        assert [str(equation.primitive) for equation in equations] == ["sin"]
        assert [variable.aval.shape for variable in inputs] == [X.shape]
        return y

    fun(X)
    with_branch(X)


def test_a_jitted_call_holds_its_program():
    """Else change `_run_masked_early` of `_scaling/early_masks.py`."""
    (call,) = jax.make_jaxpr(jax.jit(jnp.sin))(X).eqns
    assert call.params["jaxpr"].jaxpr.eqns
