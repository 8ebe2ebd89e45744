"""The scope of an equation is that of its line, under every transformation."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import optax_lossscale as ols
from helpers.under_autocast import W, X, products_of
from optax_lossscale._autocast.programs import scope_of


def scopes_of_products(fun):
    return {scope_of(equation) for equation in products_of(fun, W, X)}


def plain(w, x):
    return x @ w


@jax.custom_jvp
def with_rule(w, x):
    return x @ w


@with_rule.defjvp
def with_rule_jvp(primals, tangents):
    (w, x), (w_dot, x_dot) = primals, tangents
    with jax.named_scope("rule"):
        return with_rule(w, x), x @ w_dot + x_dot @ w


def in_net(fun):
    def loss(w, x):
        with jax.named_scope("Net"):
            return jnp.sum(fun(w, x))

    return loss


def of_gradient(fun):
    return jax.grad(fun, (0, 1))


def of_rows(fun):
    return jax.vmap(fun, (None, 0))


@pytest.mark.parametrize("wrap", [lambda fun: fun, ols.autocast])
@pytest.mark.parametrize(
    ("fun", "scopes"),
    [
        (of_gradient(in_net(plain)), {("Net",)}),
        # JAX names the transposed products transpose/jvp/Net/jvp/Net/rule.
        (of_gradient(in_net(with_rule)), {("Net", "rule"), ()}),
        (of_rows(of_gradient(in_net(with_rule))), {("Net", "rule"), ()}),
        (in_net(in_net(plain)), {("Net", "Net")}),
        (of_gradient(in_net(in_net(plain))), {("Net", "Net")}),
        (in_net(of_rows(in_net(plain))), {("Net", "Net")}),
    ],
)
def test_scopes_are_named_once_and_those_of_one_name_are_kept(fun, scopes, wrap):
    assert scopes_of_products(wrap(fun)) == scopes


@pytest.mark.parametrize("run", [of_gradient, lambda f: of_rows(of_gradient(f))])
def test_a_checkpoint_is_in_its_scope_in_the_backward_pass(run):
    program = jax.make_jaxpr(run(in_net(jax.checkpoint(plain))))(W, X)
    calls = [e for e in program.eqns if e.primitive.name in ("checkpoint", "remat2")]
    assert {scope_of(equation) for equation in calls} == {("Net",)}


def test_a_loop_is_in_its_scope_in_the_backward_pass():
    @in_net
    def loop(w, x):
        return lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=2)[0]

    program = jax.make_jaxpr(of_gradient(loop))(W, X)
    loops = [e for e in program.eqns if e.primitive.name == "scan"]
    assert [scope_of(equation) for equation in loops] == [("Net",)] * 2
