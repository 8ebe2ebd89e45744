"""Reading the programs that JAX has traced, and changing those that they hold."""

import jax
import jax.numpy as jnp

from helpers.programs import equations_of
from optax_lossscale._autocast.programs import bind, with_programs


def names_in(function, *args):
    return [e.primitive.name for e in equations_of(jax.make_jaxpr(function)(*args))]


def test_equations_of_nested_programs_come_after_the_equation_that_holds_them():
    def function(x):
        y = jax.lax.cond(x > 0, jnp.sin, jnp.cos, x)
        return jax.lax.while_loop(lambda y: y < 9, jnp.exp, y)

    names = names_in(function, 1.0)
    assert names[:2] == ["gt", "convert_element_type"]
    assert {*names[names.index("cond") + 1 : names.index("while")]} == {"sin", "cos"}
    assert {*names[names.index("while") + 1 :]} == {"lt", "exp"}


def test_an_equation_can_be_evaluated_with_other_parameters():
    cube = jax.make_jaxpr(lambda x: jax.lax.integer_pow(x, 3))(2.0).eqns[0]
    assert bind(cube.primitive, [jnp.asarray(2.0)], cube.params) == [8]
    assert bind(cube.primitive, [jnp.asarray(2.0)], {**cube.params, "y": 5}) == [32]


def test_programs_change_where_a_parameter_holds_nothing_else():
    old, new = (jax.make_jaxpr(function)(1.0) for function in (jnp.sin, jnp.cos))
    change = {id(old): new}.get
    for parameter, changed in [
        (old, new),
        ((old, old), (new, new)),
        ((old, None), (new, None)),
        ((old, "name"), (old, "name")),
        ("name", "name"),
        (None, None),
        ((), ()),
    ]:
        assert with_programs(parameter, lambda x: change(id(x), x)) == changed
    branches = (old, old)
    assert with_programs(branches, lambda x: x) is branches
