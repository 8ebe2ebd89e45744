"""The numbers of each layer, from inside a compiled step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from helpers.compare import assert_same_bits
from helpers.modules import FRAMEWORKS, ROWS, Net, arrays_of, mean_square
from helpers.operations import rounded
from optax_lossscale.diagnostics import watch

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.uniform(0.5, 1.0, size=(3, 4)), jnp.float32)
W = jnp.asarray(RNG.normal(size=(4, 4)), jnp.float32)


@ols.autocast
def loss_fn(weights, x):
    for i, weight in enumerate(weights):
        with jax.named_scope(f"layer{i}"):
            x = jnp.tanh(x @ weight)
    return jnp.mean(x)


WEIGHTS = [W, 2 * W]


def test_results_keep_their_bits_and_each_scope_has_scalars_of_float32():
    fun = jax.value_and_grad(loss_fn)
    results, layers = jax.jit(watch(fun))(WEIGHTS, X)
    assert_same_bits(results, jax.jit(fun)(WEIGHTS, X))
    assert set(layers) == {"layer0", "layer1"}
    for layer in layers.values():
        assert set(layer) <= {"largest", "flushed", "grad_largest", "grad_flushed"}
        assert {(x.shape, x.dtype.name) for x in layer.values()} == {((), "float32")}


def test_results_of_other_kinds_are_returned_as_they_are():
    def fun(x):
        return {"text": "kept", "none": None, "y": x * 2, "count": 3}

    results, layers = watch(fun)(X)
    assert results["text"] == "kept"
    assert results["none"] is None
    assert results["count"] == 3
    np.testing.assert_array_equal(results["y"], 2 * X)
    assert layers == {}  # Nothing is in half precision.


def test_the_largest_magnitude_of_a_scope_is_that_of_numpy():
    @ols.autocast
    def forward(w, x):
        with jax.named_scope("layer"):
            return x @ w

    _, layers = watch(forward)(3 * W, X)
    largest = np.max(np.abs(rounded(X) @ rounded(3 * W)))
    np.testing.assert_allclose(layers["layer"]["largest"], largest, rtol=2e-3)
    assert set(layers["layer"]) == {"largest", "flushed"}  # Nothing runs backward.


def test_casts_that_overflow_or_flush_are_told_by_scope():
    def fun(x):
        with jax.named_scope("above"):
            above = (1e5 * x).astype(jnp.float16)
        with jax.named_scope("below"):
            below = (1e-9 * x).astype(jnp.float16)
        return above, below

    x = jnp.float32([0.0, 0.0, 0.1, 1.0, 2.0])
    _, layers = watch(fun)(x)
    assert layers["above"]["largest"] == jnp.inf
    assert layers["above"]["flushed"] == 0
    assert layers["below"]["flushed"] == 1  # Of three that are not zero, all three.
    assert layers["below"]["largest"] == 0


def test_a_loop_counts_with_its_worst_iteration():
    def fun(x):
        def body(x, _):
            with jax.named_scope("body"):
                return x * 2, None

        return jax.lax.scan(body, x.astype(jnp.float16), length=12)[0]

    for run in (watch(fun), jax.jit(watch(fun))):
        _, layers = run(jnp.full(3, 64.0))
        assert layers["body"]["largest"] == jnp.inf


def test_watching_takes_branches_loops_and_checkpoints_under_jit():
    def fun(w, x, flag):
        def body(x, _):
            with jax.named_scope("body"):
                x = jax.checkpoint(lambda x: jnp.tanh(x @ w))(x)
            return jax.lax.cond(flag, lambda x: x * 2, lambda x: x - 1, x), None

        return jnp.mean(jax.lax.scan(body, x, length=2)[0])

    fun = jax.value_and_grad(ols.autocast(fun))
    expected = jax.jit(fun)(W, X, True)
    results, layers = jax.jit(watch(fun))(W, X, True)
    assert_same_bits(results, expected)
    assert set(layers) == {"body"}
    assert layers["body"]["grad_largest"] > 0


def test_what_a_checkpoint_computes_again_belongs_to_the_forward_pass():
    """tanh(1) is 0.76, and its gradient 0.42 times a twelfth."""

    def fun(x):
        with jax.named_scope("layer"):
            half = x.astype(jnp.float16)
            return jnp.mean(jax.checkpoint(jnp.tanh)(half).astype(jnp.float32))

    _, layers = jax.jit(watch(jax.value_and_grad(fun)))(jnp.ones((3, 4)))
    assert layers["layer"]["largest"] >= 0.76
    assert layers["layer"]["grad_largest"] < 0.1


@pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=FRAMEWORKS)
def test_layers_of_a_framework_are_named_in_both_passes(framework):
    def loss_fn(params, x):
        return jnp.mean(framework.call(params, x))

    grad_fn = watch(framework.grad(ols.autocast(loss_fn)))
    step = framework.jit(lambda params, x: grad_fn(params, x))
    with jax.numpy_rank_promotion("allow"):
        _, layers = step(framework.make([W, W]), X)
    # `eqx.filter_grad` returns an Equinox module, too, which is no layer.
    assert set(layers) == {framework.scope.format(i) for i in range(2)}
    for layer in layers.values():
        assert layer["largest"] > 0
        assert layer["grad_largest"] > 0


@pytest.mark.parametrize(
    ("call", "scopes"),
    [
        (lambda net, wrap: wrap(ols.autocast(mean_square))(net, ROWS), {"Net/linear"}),
        (lambda net, wrap: wrap(net)(ROWS), set()),  # It runs in float32.
    ],
)
def test_a_module_of_nnx_is_updated_once_as_an_argument_or_watched_itself(call, scopes):
    watched, plain = Net(), Net()
    for net in (watched, plain):
        net.dropout.eval()
    results, layers = call(watched, watch)
    expected = call(plain, lambda fun: fun)
    assert set(layers) == scopes
    for actual, other in zip(
        arrays_of((results, watched)), arrays_of((expected, plain)), strict=True
    ):
        np.testing.assert_allclose(actual, other, rtol=1e-5, atol=1e-6)


def test_the_layer_whose_gradient_makes_a_step_skip_is_named():
    """The loss scale is fine for the second layer, but the first has a steep slope."""

    def model_loss(params, x):
        with jax.named_scope("first"):
            x = 512.0 * (x @ params["first"])
        with jax.named_scope("second"):
            x = (x * 2.0**-9) @ params["second"]
        return jnp.mean(x)

    params = {"first": jnp.eye(4), "second": 600 * jnp.eye(4)}
    state = ols.static_loss_scale(2.0**18).init()
    grads_fn = ols.scaled_grad(ols.autocast(model_loss), state)
    grads, layers = jax.jit(watch(grads_fn))(params, X)
    assert not ols.all_finite(grads)
    # The second layer receives a cotangent of 2**18 / 12 = 21845, and the first one 600
    # times this, which is cast to float16 for its product.
    assert layers["first"]["largest"] < jnp.inf
    assert layers["second"]["largest"] < jnp.inf
    assert layers["second"]["grad_largest"] < jnp.inf
    assert layers["first"]["grad_largest"] == jnp.inf


def test_the_wrapper_has_the_name_of_the_function():
    def own_name(x):
        return x

    assert watch(own_name).__name__ == "own_name"
