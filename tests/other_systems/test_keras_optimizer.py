"""`loss_scale_optimizer`: Keras's options together, and refusals.

That they compute what Keras computes is in `test_recorded_trajectories.py`.
"""

import functools
import inspect
import re

import chex
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import optax_lossscale as ols
from helpers.compare import assert_same_bits, types
from helpers.inner import lenient

PARAMS = {"w": np.float32([[1.0, -2.0], [3.0, 0.5]]), "b": np.float32([0.25, -1.0])}
RATE = 0.1


def rate_at(step):
    return 0.1 / (1 + step)


def make(inner=None, **options):
    """A function that trains, and returns parameters and state after each step."""
    inner = optax.sgd(RATE) if inner is None else inner
    tx = lenient(ols.loss_scale_optimizer(inner, **{"initial_scale": 64.0} | options))

    def step(carry, grads):
        params, opt_state = carry
        scaled = ols.scale(grads, opt_state)
        updates, opt_state = tx.update(scaled, opt_state, params)
        carry = optax.apply_updates(params, updates), opt_state
        return carry, carry

    params = jax.tree.map(jnp.asarray, PARAMS)
    start = params, tx.init(params)
    return jax.jit(lambda grads: jax.lax.scan(step, start, grads)[1])


def random_grads(steps, bad=(), seed=0):
    rng = np.random.default_rng(seed)
    grads = {
        key: np.float32(rng.normal(size=(steps, *value.shape)))
        for key, value in PARAMS.items()
    }
    grads["b"][list(bad), 0] = rng.choice([np.nan, np.inf, -np.inf], len(bad))
    return grads


DECAY = {"weight_decay": 0.2, "learning_rate": RATE}
EMA = {"use_ema": True, "ema_momentum": 0.6}
TOGETHER = {
    "average": EMA | {"ema_overwrite_frequency": 2},
    "clip, decay, average": {"clipvalue": 0.4, **DECAY, **EMA},
    "clip, partial decay": {
        "global_clipnorm": 0.9,
        **DECAY,
        "weight_decay_mask": {"w": True, "b": False},
    },
}


@functools.cache
def with_and_without_accumulation(name):
    options = TOGETHER[name]
    return make(gradient_accumulation_steps=3, **options), make(**options)


@pytest.mark.slow
@pytest.mark.parametrize("name", TOGETHER)
@given(st.sets(st.integers(0, 12), min_size=4, max_size=4).map(sorted))
def test_accumulated_updates_are_those_of_the_means_of_good_micro_batches(name, bad):
    accumulate, plain = with_and_without_accumulation(name)
    grads = random_grads(13, bad)
    good = jax.tree.map(lambda grad: np.delete(grad, bad, axis=0), grads)
    means = jax.tree.map(lambda grad: grad.reshape(3, 3, *grad.shape[1:]).mean(1), good)
    every_third = np.delete(np.arange(13), bad)[2::3]
    held = jax.tree.map(lambda leaf: leaf[every_third], accumulate(grads))
    expected = plain(means)
    chex.assert_trees_all_close(held[0], expected[0], rtol=1e-5, atol=1e-6)
    if "use_ema" in TOGETHER[name]:
        averages = ols.ema_params(held[1]), ols.ema_params(expected[1])
        chex.assert_trees_all_close(*averages, rtol=1e-5, atol=1e-6)


ALL = {
    "clipnorm": 1.0,
    "weight_decay": 0.1,
    "learning_rate": rate_at,
    "use_ema": True,
    "ema_overwrite_frequency": 2,
    "gradient_accumulation_steps": 2,
}


@pytest.mark.slow
def test_nothing_advances_on_a_skipped_step():
    # In the middle of an accumulation, and after it. tf.keras would count an iteration.
    inner = optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.1, 0.0, 10))
    params, opt_state = make(inner, **ALL)(random_grads(4, bad=[1, 3]))
    changing = params, opt_state.inner_state
    skipped = jax.tree.map(lambda x: x[1::2], changing)
    assert_same_bits(skipped, jax.tree.map(lambda x: x[::2], changing))


def test_until_the_first_update_the_average_equals_the_initial_parameters():
    tx = ols.loss_scale_optimizer(optax.sgd(0.1), use_ema=True)
    params = jax.tree.map(jnp.asarray, PARAMS)
    opt_state = tx.init(params)
    assert_same_bits(ols.ema_params(opt_state), params)
    assert_same_bits(ols.finalize_params(params, opt_state), params)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_state_and_parameters_keep_their_types_under_scan_and_donation(dtype):
    inner = optax.inject_hyperparams(optax.adam)(rate_at)
    tx = lenient(ols.loss_scale_optimizer(inner, **ALL))
    params = {"w": jnp.ones((2, 2), dtype), "none": None}
    opt_state = tx.init(params)
    before = types((params, opt_state))

    def step(carry, _):
        params, opt_state = carry
        grads = jax.tree.map(jnp.ones_like, params)
        updates, opt_state = tx.update(grads, opt_state, params)
        with jax.numpy_dtype_promotion("standard"):
            return (optax.apply_updates(params, updates), opt_state), None

    loop = jax.jit(lambda carry: jax.lax.scan(step, carry, length=4), donate_argnums=0)
    carry, _ = loop((params, opt_state))
    assert types(carry) == before
    assert ols.ema_params(carry[1])["w"].dtype == jnp.float32
    assert ols.finalize_params(*carry)["w"].dtype == dtype


def test_init_takes_shapes_in_the_place_of_parameters():
    tx = lenient(ols.loss_scale_optimizer(optax.adam(0.1), **ALL))
    params = {"w": jnp.ones((2, 2)), "none": None}
    shapes = jax.eval_shape(lambda: params)
    opt_state = tx.init(params)
    assert types(tx.init(shapes)) == types(opt_state)
    abstract = jax.eval_shape(tx.init, params)
    assert jax.tree.structure(abstract) == jax.tree.structure(opt_state)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("absent", "window"), [(None, None), (optax.MaskedNode(), None), (None, 2)]
)
def test_a_parameter_without_gradient_is_averaged_but_does_not_decay(absent, window):
    # As in Keras. `optax.MultiSteps` itself fails on such a gradient.
    settings = {"weight_decay": 0.5, "learning_rate": 1.0, "use_ema": True}
    tx = lenient(
        ols.loss_scale_optimizer(
            optax.sgd(1.0), clipnorm=1.0, gradient_accumulation_steps=window, **settings
        )
    )
    params = {"used": jnp.ones(1), "unused": jnp.ones(1), "none": None}
    params["n"] = jnp.asarray(3)
    grads = {"used": jnp.zeros(1), "unused": absent, "none": None, "n": jnp.asarray(0)}
    opt_state = tx.init(params)
    before = types(opt_state)
    for _ in range(window or 1):
        updates, opt_state = tx.update(grads, opt_state, params)
    assert updates | {"n": 0} == {"used": -0.5, "unused": absent, "none": None, "n": 0}
    average = {"used": 0.5, "unused": 1.0, "none": None, "n": None}  # Held fixed.
    assert ols.ema_params(opt_state) == average
    assert ols.finalize_params(params, opt_state) == average | {"n": 3}
    assert types(opt_state) == before


@pytest.mark.slow
def test_accumulation_keeps_the_imaginary_part():
    # optax.MultiSteps itself accumulates in float32.
    tx = lenient(
        ols.loss_scale_optimizer(optax.sgd(1.0), gradient_accumulation_steps=2)
    )
    params = jnp.zeros(1, jnp.complex64)
    opt_state = tx.init(params)
    for grad in (1.0 + 2.0j, 3.0 + 4.0j):
        grads = ols.scale(jnp.full(1, grad, jnp.complex64), opt_state)
        updates, opt_state = tx.update(grads, opt_state, params)
    assert updates == -2.0 - 3.0j


@pytest.mark.parametrize(
    "options",
    [{"dynamic": False, "initial_scale": 8.0}, {"loss_scale_factor": 8.0}],
)
def test_a_fixed_scale_is_unscaled_and_never_skips(options):
    tx = ols.loss_scale_optimizer(optax.sgd(1.0), **options)
    grads = jnp.asarray([8.0, jnp.nan])
    updates, opt_state = tx.update(grads, tx.init(grads), grads)
    assert ols.get_loss_scale(opt_state) == 8.0
    np.testing.assert_array_equal(updates, [-1.0, np.nan])


R_DEFAULTS = dict.fromkeys(
    [
        *("weight_decay", "clipnorm", "clipvalue", "global_clipnorm", "ema_momentum"),
        *("ema_overwrite_frequency", "loss_scale_factor"),
        "gradient_accumulation_steps",
    ]
)


@pytest.mark.parametrize("use_ema", [None, True])
def test_the_nulls_of_the_r_page_are_the_defaults(use_ema):
    nulls = R_DEFAULTS | {"use_ema": use_ema}
    ours = make(initial_scale=32768, dynamic_growth_steps=2000, **nulls)
    plain = make(initial_scale=None, use_ema=bool(use_ema))
    grads = random_grads(3, bad=[1])
    assert_same_bits(ours(grads), plain(grads))


@pytest.mark.slow
def test_with_an_axis_name_all_devices_skip_together():
    tx = lenient(ols.loss_scale_optimizer(optax.sgd(1.0), axis_name="data", **ALL))
    params = jnp.ones((8, 1))
    opt_state = jax.vmap(tx.init)(params)
    grads = jnp.ones((8, 1)).at[3].set(jnp.nan)
    update = jax.jit(jax.vmap(tx.update, axis_name="data"))
    updates, opt_state = update(grads, opt_state, params)
    assert not updates.any()
    assert not ols.find_loss_scale_state(opt_state).last_finite.any()


REFUSED_VALUES = [
    ({"clipnorm": 1.0, "clipvalue": 1.0}, "at most one .*`clipnorm` and `clipvalue`"),
    ({"clipnorm": 1.0, "global_clipnorm": 1.0}, "at most one of"),
    ({"clipnorm": 0.0}, "`clipnorm` must be finite, at least"),
    ({"clipvalue": -1.0}, "`clipvalue` must be finite, at least"),
    ({"global_clipnorm": np.nan}, "`global_clipnorm` must be finite"),
    ({"weight_decay": 0.1}, "`learning_rate` must be given with `weight_decay`"),
    ({"weight_decay_mask": True}, "`weight_decay_mask` must be None without"),
    ({"weight_decay": -0.1, "learning_rate": 0.1}, "`weight_decay` must be finite"),
    ({"learning_rate": -0.1}, "`learning_rate` must be finite, at least 0"),
    ({"dynamic": False}, "`initial_scale` must be given with `dynamic=False`"),
    (
        {"loss_scale_factor": 2.0, "initial_scale": 4.0},
        "`initial_scale` must be None with `loss_scale_factor`, got 4.0",
    ),
    (
        {"loss_scale_factor": 2.0, "dynamic_growth_steps": 4},
        "`dynamic_growth_steps` must be None with `loss_scale_factor`, got 4",
    ),
    ({"loss_scale_factor": 0.0}, "`loss_scale_factor` must be positive"),
    ({"initial_scale": np.inf}, "`initial_scale` must be positive"),
    ({"gradient_accumulation_steps": 0}, "`gradient_accumulation_steps` must be at"),
    ({"ema_overwrite_frequency": 0}, "`ema_overwrite_frequency` must be at least 1"),
    ({"ema_momentum": 1.01}, "`ema_momentum` must be .* at most 1, got 1.01"),
    ({"ema_momentum": -0.01}, "`ema_momentum` must be .* at least 0"),
]
REFUSED_KINDS = [
    ({"dynamic": 1}, "`dynamic` must be"),
    ({"use_ema": "yes"}, "`use_ema` must be"),
    ({"gradient_accumulation_steps": 2.0}, "`gradient_accumulation_steps` must be"),
    ({"clipnorm": "1"}, "`clipnorm` must be"),
    ({"learning_rate": "0.1"}, "`learning_rate` must be"),
    ({"learning_rate": lambda: 0.1}, "`learning_rate` must be .* function of the step"),
    ({"dynamic_growth_steps": 2000.0}, "`dynamic_growth_steps` must be"),
    ({"ema_momentum": "0.9"}, "`ema_momentum` must be"),
    # The orders of other wrappers.
    ({"initial_scale": ols.presets.keras()}, r"`initial_scale` .*`loss_scaled\(inner_"),
    ({"initial_scale": ols.presets.keras}, r"`initial_scale` .*`loss_scaled\(inner_op"),
    ({"initial_scale": True}, "`initial_scale` .*`dynamic=True`"),
    ({"initial_scale": False}, "`initial_scale` .*`dynamic=False`"),
]
REFUSED = [(ValueError, *case) for case in REFUSED_VALUES]
REFUSED += [(TypeError, *case) for case in REFUSED_KINDS]


@pytest.mark.parametrize(("error", "options", "message"), REFUSED)
def test_a_setting_of_a_wrong_value_or_kind_is_refused(error, options, message):
    with pytest.raises(error, match=message):
        ols.loss_scale_optimizer(optax.sgd(0.1), **options)


@pytest.mark.parametrize("inner", [1024.0, optax.sgd])
def test_an_inner_optimizer_of_the_wrong_kind_is_refused(inner):
    with pytest.raises(TypeError, match="`inner_optimizer` must be an optimizer"):
        ols.loss_scale_optimizer(inner, optax.sgd(0.1))


@pytest.mark.parametrize(
    "options", [{"use_ema": True}, {"weight_decay": 0.1, "learning_rate": 0.1}]
)
def test_missing_params_are_named(options):
    tx = ols.loss_scale_optimizer(optax.sgd(0.1), **options)
    (name, *_) = options
    with pytest.raises(ValueError, match=f"`params` must be given.*`{name}`"):
        tx.update(jnp.ones(1), tx.init(jnp.ones(1)))


@pytest.fixture
def several_averages():
    """Parameters and states of two optimizers with averages, and one without."""
    averaging = ols.loss_scale_optimizer(
        optax.sgd(1.0), 1.0, use_ema=True, ema_momentum=0.5
    )
    plain = ols.loss_scale_optimizer(optax.sgd(1.0), 1.0)
    parts = {"generator": averaging, "critic": averaging, "encoder": plain}
    tx = optax.partition(parts, {name: name for name in parts})
    params = {name: jnp.ones(1) for name in parts}
    opt_state = tx.init(params)
    for _ in range(2):  # Each goes from 1 to 0 to 0, and is averaged from 0 on.
        updates, opt_state = tx.update(params, opt_state, params)
        params = optax.apply_updates(params, updates)
    return params, opt_state


def test_several_averages_name_the_path_that_picks_one(several_averages):
    _, opt_state = several_averages
    with pytest.raises(ValueError, match=r"got 2, at `.inner_states\['critic") as error:
        ols.ema_params(opt_state)
    (path,) = re.findall("path='(.*)'", str(error.value))
    average = ols.ema_params(opt_state, path=path)
    assert average["critic"] == 0.0
    assert jax.tree.leaves(average) == [0.0]


def test_several_averages_are_finalized_one_after_the_other(several_averages):
    params, opt_state = several_averages
    params = start = jax.tree.map(lambda p: p + 7.0, params)
    for name in params:
        params = ols.finalize_params(params, opt_state, path=f"inner_states/{name}")
    assert params == {"generator": 0.0, "critic": 0.0, "encoder": start["encoder"]}


@pytest.mark.parametrize("path", ["elsewhere", "inner_states/encoder"])
def test_a_path_without_an_average_names_those_that_have_one(several_averages, path):
    with pytest.raises(ValueError, match=r"got none there, but some at `.inn"):
        ols.ema_params(several_averages[1], path=path)


def test_finalize_params_refuses_a_path_that_is_no_text_or_picks_none(several_averages):
    with pytest.raises(TypeError, match="`path` must be a string"):
        ols.finalize_params(*several_averages, path=0)
    for path, message in (("elsewhere", "elsewhere"), (None, "got 2, at")):
        with pytest.raises(ValueError, match=message):
            ols.finalize_params(*several_averages, path=path)


def test_without_an_average_there_is_none_and_the_parameters_are_final():
    params = {"w": jnp.ones(2)}
    opt_state = ols.loss_scale_optimizer(optax.sgd(0.1)).init(params)
    assert ols.finalize_params(params, opt_state) is params
    with pytest.raises(ValueError, match=r"got 0.*use_ema=True"):
        ols.ema_params(opt_state)


STATE = ols.loss_scale_optimizer(optax.sgd(0.1), use_ema=True).init(jnp.ones(2))


@pytest.mark.parametrize(
    ("params", "state", "message"),
    [
        ({"a": jnp.ones(2)}, STATE, "`params` must have the tree structure of"),
        (jnp.ones(5), STATE, r"got shape \(5,\) for \(2,\)"),
        (jnp.ones(1), jnp.ones(1), "must hold a LossScaleState"),
    ],
    ids=["structure", "shape", "no state"],
)
def test_finalize_params_refuses_what_does_not_fit(params, state, message):
    with pytest.raises(ValueError, match=message):
        ols.finalize_params(params, state)


def test_the_learning_rate_can_be_a_function_without_a_signature():
    # max(0.25, step): 0.25 at step 0, later the step.
    rate = functools.partial(max, 0.25)
    with pytest.raises(ValueError, match="signature"):
        inspect.signature(rate)
    tx = lenient(
        ols.loss_scale_optimizer(optax.sgd(1.0), weight_decay=0.5, learning_rate=rate)
    )
    updates, _ = tx.update(jnp.zeros(1), tx.init(jnp.ones(1)), jnp.ones(1))
    assert updates.tolist() == [-0.125]


def test_an_injected_learning_rate_reaches_the_weight_decay_under_jit():
    def make_optimizer(learning_rate):
        return ols.loss_scale_optimizer(
            optax.sgd(learning_rate), weight_decay=0.5, learning_rate=learning_rate
        )

    tx = lenient(optax.inject_hyperparams(make_optimizer)(learning_rate=1.0))
    params = jnp.ones(1)
    update = jax.jit(tx.update)
    updates, opt_state = update(jnp.zeros(1), tx.init(params), params)
    assert updates == -0.5
    opt_state = optax.tree.set(opt_state, learning_rate=jnp.asarray(0.5))
    assert update(jnp.zeros(1), opt_state, params)[0] == -0.25


def test_an_average_that_was_restored_as_numbers_is_finalized():
    params = {"scalar": jnp.float32(1.0)}
    opt_state = ols.loss_scale_optimizer(optax.sgd(0.1), use_ema=True).init(params)
    restored = jax.tree.map(lambda leaf: leaf.tolist(), opt_state)
    assert_same_bits(ols.finalize_params(params, restored), params)


def test_a_traced_setting_other_than_the_learning_rate_is_refused_by_name():
    build = jax.jit(lambda x: ols.loss_scale_optimizer(optax.sgd(0.1), clipnorm=x).init)
    with pytest.raises(TypeError, match="`clipnorm` must be a concrete number"):
        build(1.0)


@pytest.mark.slow
def test_finalized_parameters_of_an_nnx_model_go_back_by_nnx_update():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    tx = ols.loss_scale_optimizer(optax.sgd(0.1), use_ema=True, ema_momentum=0.5)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for _ in range(2):
        grads = ols.scaled_grad(lambda m: jnp.sum(m.bias[...]), optimizer)(model)
        optimizer.update(model, grads)
    average = jax.tree.leaves(ols.ema_params(optimizer.opt_state))
    assert all(isinstance(leaf, jax.Array) for leaf in average)
    params = nnx.state(model, nnx.Param)
    final = ols.finalize_params(params, optimizer)
    assert jax.tree.structure(final) == jax.tree.structure(params)
    nnx.update(model, final)
    np.testing.assert_allclose(model.bias[...], [-0.15], rtol=1e-6)
