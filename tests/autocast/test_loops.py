"""What loops and checkpoints save (docs/guides/autocast.md), and what runs again."""

import collections
import functools
import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import primitives

import optax_lossscale as ols
from helpers.under_autocast import W, X, assert_close, products_of
from optax_lossscale._autocast.programs import equations_of

STEPS = 5
WS = jnp.stack([W] * STEPS)


def activation(y):
    """Several elementwise operations; JAX saves something for each of them."""
    return jnp.exp(jnp.sin(jnp.tanh(y)))


def layers(ws, x, wrap=lambda body: body):
    def body(h, w):
        return h + activation(h @ w), None

    return jnp.mean(lax.scan(wrap(body), x, ws)[0] ** 2)


def recurrent(w, xs):
    def body(h, x):
        return activation(x @ w + h @ w), jnp.sum(h)

    h, sums = lax.scan(body, jnp.zeros_like(xs[0]), xs)
    return jnp.sum(h) + jnp.sum(sums)


def saved(fun, *args):
    """How many arrays of each dtype and shape are kept for the backward pass."""
    pullback = jax.eval_shape(lambda *args: jax.vjp(fun, *args)[1], *args)
    leaves = jax.tree.leaves(pullback)
    return collections.Counter((str(x.dtype), x.shape) for x in leaves)


def stacked(counts):
    """Those that a loop stacks for its steps, by dtype."""
    return {dtype: counts[dtype, (STEPS, *X.shape)] for dtype in ("float16", "float32")}


def count(fun, *args):
    """How often each operation occurs in a traced function."""
    program = jax.make_jaxpr(fun)(*args)
    return collections.Counter(e.primitive.name for e in equations_of(program))


# --- Loops ------------------------------------------------------------------------


def with_fori_loop(ws, x):
    return lax.fori_loop(0, STEPS, lambda i, x: x + activation(x @ ws[i]), x).sum()


@pytest.mark.parametrize(
    ("fun", "args", "products"),
    # `xs` is an argument, which is not saved again.
    [
        (jax.jit(layers), (WS, X), 1),
        (recurrent, (W, jnp.stack([X] * STEPS)), 2),
        (with_fori_loop, (WS, X), 1),
    ],
)
def test_a_loop_saves_its_products_and_its_carry(fun, args, products):
    found = stacked(saved(ols.autocast(fun), *args))
    assert found == {"float16": products, "float32": products}


def test_without_recompute_a_loop_saves_what_jax_saves():
    found = stacked(saved(ols.autocast(layers, recompute=False), WS, X))
    in_float32 = stacked(saved(layers, WS, X))
    # Only the factor of the product is saved as a low copy.
    assert found == {"float16": 1, "float32": in_float32["float32"] - 1}
    assert in_float32["float32"] > 3


DEAR = {
    "sort": lambda y: jnp.sort(y, axis=-1),
    "reduce_sum": lambda y: y - jnp.mean(y, axis=-1, keepdims=True),
}


@pytest.mark.parametrize("name", DEAR)
def test_dear_operations_are_saved_and_not_computed_again(name):
    def loss(ws, x):
        def body(h, w):
            return activation(DEAR[name](h @ w)), None

        return lax.scan(body, x, ws)[0].sum()

    plain = count(jax.grad(loss), WS, X)
    low = count(jax.grad(ols.autocast(loss)), WS, X)
    assert low[name] == plain[name] > 0
    assert low["exp"] > plain["exp"]  # This one is cheap.


def test_a_loop_with_complex_numbers_has_a_gradient():
    """JAX cannot round those that a checkpoint saves."""

    def loss(ws, x):
        def body(h, w):
            return jnp.abs(jnp.fft.fft(h @ w)), None

        return lax.scan(body, x, ws)[0].sum()

    assert jax.eval_shape(jax.grad(ols.autocast(loss)), WS, X).dtype == jnp.float32


def test_a_print_in_a_loop_prints_once_a_step(capsys):
    def with_print(body):
        def printing(h, w):
            jax.debug.print("step {}", h[0, 0])
            return body(h, w)

        return printing

    loss = functools.partial(layers, wrap=with_print)
    jax.jit(jax.value_and_grad(ols.autocast(loss)))(WS, X)
    jax.effects_barrier()
    assert capsys.readouterr().out.count("step") == STEPS


@pytest.mark.parametrize(
    "policy", [None, jax.checkpoint_policies.everything_saveable, ols.save_products]
)
def test_a_checkpoint_in_a_loop_says_itself_what_is_saved(policy):
    checkpoint = functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)
    loss = functools.partial(layers, wrap=checkpoint)
    found = stacked(saved(ols.autocast(loss), WS, X))
    assert found == stacked(saved(ols.autocast(loss, recompute=False), WS, X))
    assert found["float16"] == (0 if policy is None else 1)
    assert (found["float32"] == 1) == (policy in (None, ols.save_products))


def casts_in_scans(fun, *args):
    """The shapes that are cast to float16 in the bodies of scans."""
    program = jax.make_jaxpr(fun)(*args)
    scans = [each for each in program.eqns if each.primitive.name == "scan"]
    return [
        each.invars[0].aval.shape
        for scan in scans
        for each in equations_of(scan.params["jaxpr"])
        if each.params.get("new_dtype") == jnp.float16
    ]


@pytest.mark.parametrize("recompute", [True, False])
def test_the_low_copy_of_a_constant_weight_is_made_before_the_loop(recompute):
    args = W / 8, jnp.stack([X] * STEPS) / 8
    grad = jax.grad(ols.autocast(recurrent, recompute=recompute))
    assert X.shape in casts_in_scans(grad, *args)
    assert W.shape not in casts_in_scans(grad, *args)
    assert_close(jax.jit(grad)(*args), jax.jit(jax.grad(recurrent))(*args))


# --- Checkpoints ------------------------------------------------------------------

POLICIES = jax.checkpoint_policies


def two_layers(w, x):
    y = checkpoint_name(activation(x @ w), "y")
    return jnp.sum(activation(y @ w))


def kept(fun, *args):
    """What a function keeps but for its arguments, which it keeps in any case."""
    return saved(fun, *args) - saved(jax.checkpoint(fun), *args)


def test_save_products_saves_low_products_alone():
    checkpointed = jax.checkpoint(two_layers, policy=ols.save_products)
    for cast in (
        ols.autocast(checkpointed),
        jax.checkpoint(ols.autocast(two_layers), policy=ols.save_products),
    ):
        assert kept(cast, W, X) == {("float16", X.shape): 2}


def test_save_products_saves_the_product_of_a_frozen_layer():
    frozen, v = jnp.ones((4, 5)), jnp.ones((5, 4))
    loss = jax.checkpoint(
        lambda v, x: jnp.sum(jnp.sin(jnp.sin(x @ frozen) @ v)), policy=ols.save_products
    )
    found = saved(lambda v: ols.autocast(loss)(v, X), v)
    assert found == {("float16", (3, 5)): 1, ("float16", (3, 4)): 1}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_outside_of_autocast_save_products_saves_what_is_written_low(dtype):
    def loss(w, x):
        y = jnp.sin(lax.ragged_dot(x, w[None], jnp.array([3])))
        return jnp.sin(jnp.dot(y, w, preferred_element_type=w.dtype))

    checkpointed = jax.checkpoint(loss, policy=ols.save_products)
    found = kept(checkpointed, W.astype(dtype), X.astype(dtype))
    assert found[dtype, X.shape] == (2 if dtype == "float16" else 0)


@pytest.mark.parametrize(
    "policy",
    [
        POLICIES.dots_with_no_batch_dims_saveable,
        POLICIES.everything_saveable,
        POLICIES.save_only_these_names("y"),
    ],
)
def test_policies_of_jax_see_the_products_that_are_written(policy):
    def products(fun):
        return len(products_of(jax.grad(fun), W, X))

    expected = products(jax.checkpoint(two_layers, policy=policy))
    inside = ols.autocast(jax.checkpoint(two_layers, policy=policy))
    outside = jax.checkpoint(ols.autocast(two_layers), policy=policy)
    assert products(inside) == products(outside) == expected


# --- Which of both is less --------------------------------------------------------

BODIES = {
    "relu": lambda x, w: jax.nn.relu(x @ w),
    "softplus": lambda x, w: jax.nn.softplus(x @ w),
    "tanh": lambda x, w: jnp.tanh(x @ w),
    "gelu": lambda x, w: jax.nn.gelu(x @ w),
    "gated": lambda x, w: jax.nn.silu(x @ w) * (x @ w.T),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_loop_saves_whichever_is_less_and_never_more_than_float32(name):
    def fun(ws, x):
        def body(x, w):
            return x + BODIES[name](x, w), None

        return jnp.sum(lax.scan(body, x, ws)[0])

    def saved_bytes(fun):
        arrays = kept(fun, jnp.ones((16, 16, 16)), jnp.ones((512, 16))).elements()
        return sum(
            math.prod(shape) * jnp.dtype(dtype).itemsize for dtype, shape in arrays
        )

    written, low, chosen = map(
        saved_bytes, (fun, ols.autocast(fun, recompute=False), ols.autocast(fun))
    )
    assert chosen <= 1.05 * min(written, low)
    # Since JAX 0.12 the derivative of tanh is one array, as that of ReLU.
    has_small_tanh = hasattr(primitives, "one_minus_square_p")
    if name in ("relu", "softplus") or (name == "tanh" and has_small_tanh):
        assert chosen == low
    else:
        assert chosen < 0.7 * min(written, low)


def test_a_loop_around_a_loop_saves_less_too():
    def fun(ws, x):
        def layer(h, w):
            h, _ = lax.scan(lambda h, _: (jax.nn.gelu(h @ w), None), h, length=2)
            return activation(h), None

        return lax.scan(layer, x, ws)[0]

    counts = saved(ols.autocast(fun), WS, X)
    # The carry of the outer loop, and the product of the inner one.
    assert stacked(counts) == {"float16": 0, "float32": 1}
    inner = [(dtype, n) for (dtype, shape), n in counts.items() if len(shape) == 4]
    assert inner == [("float16", 1)]


def test_a_loop_that_cannot_be_differentiated_is_computed_as_before():
    def body(x, w):
        return lax.while_loop(lambda x: x[0, 0] < 1, lambda x: x + x @ w, x), None

    def fun(ws, x):
        return lax.scan(body, x, ws)[0]

    ws, x = jnp.ones((2, 3, 3)), jnp.ones((4, 3)) / 8
    assert_close(ols.autocast(fun)(ws, x), fun(ws, x))
