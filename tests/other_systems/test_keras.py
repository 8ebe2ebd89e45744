"""`loss_scale_optimizer`: Keras's options together, schedules, masks and refusals.

That they compute what Keras computes is in `test_recorded_trajectories.py`.
"""

import functools
import re

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optax_lossscale as ols
from helpers.compare import assert_same_bits, types

pytestmark = pytest.mark.usefixtures("standard_promotion")

PARAMS = {"w": jnp.array([[1.0, -2.0], [3.0, 0.5]]), "b": jnp.array([0.25, -1.0])}
RATE = 0.1
ALL = {
    "clipnorm": 1.0,
    "weight_decay": 0.1,
    "learning_rate": lambda step: 0.1 / (1 + step),
    "use_ema": True,
    "ema_overwrite_frequency": 2,
    "gradient_accumulation_steps": 2,
}


def trained(tx, grads, params=PARAMS):
    """Parameters and state after each step; `grads` have one entry for each step."""

    def step(carry, grads):
        params, opt_state = carry
        scaled = ols.scale(grads, opt_state)
        updates, opt_state = tx.update(scaled, opt_state, params)
        carry = optax.apply_updates(params, updates), opt_state
        return carry, carry

    train = jax.jit(lambda carry: jax.lax.scan(step, carry, grads)[1])
    return train((params, tx.init(params)))


def random_grads(steps, bad=()):
    rng = np.random.default_rng(0)
    grads = {
        key: np.float32(rng.normal(size=(steps, *value.shape)))
        for key, value in PARAMS.items()
    }
    grads["b"][list(bad), 0] = rng.choice([np.nan, np.inf, -np.inf], len(bad))
    return grads


# Options together.

DECAY = {"weight_decay": 0.2, "learning_rate": RATE}
AVERAGE = {"use_ema": True, "ema_momentum": 0.6, "ema_overwrite_frequency": 2}
TOGETHER = {
    "average": AVERAGE,
    "clip, decay, average": {"clipvalue": 0.4, **DECAY, **AVERAGE},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.parametrize("bad", [(0, 1, 2, 3), (1, 4, 6, 12), (3, 5, 9, 11)])
def test_accumulated_updates_are_those_of_the_means_of_good_micro_batches(name, bad):
    make = functools.partial(
        ols.loss_scale_optimizer, optax.sgd(RATE), 64.0, **TOGETHER[name]
    )
    grads = random_grads(13, bad)
    good = jax.tree.map(lambda grad: np.delete(grad, bad, axis=0), grads)
    means = jax.tree.map(lambda grad: grad.reshape(3, 3, *grad.shape[1:]).mean(1), good)
    every_third = np.delete(np.arange(13), bad)[2::3]
    accumulated = trained(make(gradient_accumulation_steps=3), grads)
    params, opt_state = jax.tree.map(lambda leaf: leaf[every_third], accumulated)
    expected_params, expected_state = trained(make(), means)
    chex.assert_trees_all_close(params, expected_params, rtol=1e-5, atol=1e-6)
    averages = ols.ema_params(opt_state), ols.ema_params(expected_state)
    chex.assert_trees_all_close(*averages, rtol=1e-5, atol=1e-6)


def test_nothing_advances_on_a_skipped_step():
    # In the middle of an accumulation, and after it. tf.keras would count an iteration.
    inner = optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.1, 0.0, 10))
    tx = ols.loss_scale_optimizer(inner, **ALL)
    params, opt_state = trained(tx, random_grads(4, bad=[1, 3]))
    changing = params, opt_state.inner_state
    skipped = jax.tree.map(lambda x: x[1::2], changing)
    assert_same_bits(skipped, jax.tree.map(lambda x: x[::2], changing))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_state_and_parameters_keep_their_types_under_scan_and_donation(dtype):
    tx = ols.loss_scale_optimizer(optax.adam(ALL["learning_rate"]), **ALL)
    params = {"w": jnp.ones((2, 2), dtype), "none": None}
    opt_state = tx.init(params)
    before = types((params, opt_state))

    def step(carry, _):
        params, opt_state = carry
        grads = jax.tree.map(jnp.ones_like, params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    loop = jax.jit(lambda carry: jax.lax.scan(step, carry, length=4), donate_argnums=0)
    carry, _ = loop((params, opt_state))
    assert types(carry) == before
    assert ols.ema_params(carry[1])["w"].dtype == jnp.float32
    assert ols.finalize_params(*carry)["w"].dtype == dtype


def test_accumulation_keeps_the_imaginary_part():
    # optax.MultiSteps accumulates in float32 unless it is told another dtype.
    tx = ols.loss_scale_optimizer(optax.sgd(1.0), gradient_accumulation_steps=2)
    grads = jnp.asarray([[1.0 + 2.0j], [3.0 + 4.0j]], jnp.complex64)
    params, _ = trained(tx, grads, jnp.zeros(1, jnp.complex64))
    assert params[-1] == -2.0 - 3.0j


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


@pytest.mark.parametrize("use_ema", [None, True])
def test_the_nulls_of_the_r_page_are_the_defaults(use_ema):
    names = "weight_decay clipnorm clipvalue global_clipnorm ema_momentum"
    names += " ema_overwrite_frequency loss_scale_factor gradient_accumulation_steps"
    nulls = dict.fromkeys(names.split(), None)
    ours = ols.loss_scale_optimizer(
        optax.sgd(RATE), 32768, dynamic_growth_steps=2000, use_ema=use_ema, **nulls
    )
    plain = ols.loss_scale_optimizer(optax.sgd(RATE), use_ema=bool(use_ema))
    grads = random_grads(3, bad=[1])
    assert_same_bits(trained(ours, grads), trained(plain, grads))


def test_with_an_axis_name_all_devices_skip_together():
    tx = ols.loss_scale_optimizer(optax.sgd(1.0), axis_name="data", **ALL)
    params = jnp.ones((8, 1))
    opt_state = jax.vmap(tx.init)(params)
    grads = jnp.ones((8, 1)).at[3].set(jnp.nan)
    update = jax.jit(jax.vmap(tx.update, axis_name="data"))
    updates, opt_state = update(grads, opt_state, params)
    assert not updates.any()
    assert not ols.find_loss_scale_state(opt_state).last_finite.any()


# Refusals.

REFUSED_VALUES = [
    ({"clipnorm": 1.0, "clipvalue": 1.0}, "at most one .*`clipnorm` and `clipvalue`"),
    ({"clipnorm": 0.0}, "`clipnorm` must be finite, at least"),
    ({"global_clipnorm": np.nan}, "`global_clipnorm` must be finite"),
    ({"weight_decay": 0.1}, "`learning_rate` must be given with `weight_decay`"),
    ({"weight_decay_mask": True}, "`weight_decay_mask` must be None without"),
    ({"weight_decay": -0.1, "learning_rate": 0.1}, "`weight_decay` must be finite"),
    ({"learning_rate": -0.1}, "`learning_rate` must be finite, at least 0"),
    ({"dynamic": False}, "`dynamic=False`, `initial_scale` must be given"),
    ({"loss_scale_factor": 2.0, "initial_scale": 4.0}, "must be None with `loss_scale"),
    ({"loss_scale_factor": 0.0}, "`loss_scale_factor` must be positive"),
    ({"initial_scale": np.inf}, "`initial_scale` must be positive"),
    ({"gradient_accumulation_steps": 0}, "`gradient_accumulation_steps` must be at"),
    ({"ema_overwrite_frequency": 0}, "`ema_overwrite_frequency` must be at least 1"),
    ({"ema_momentum": 1.01}, "`ema_momentum` must be .* at most 1, got 1.01"),
]
REFUSED_KINDS = [
    ({"dynamic": 1}, "`dynamic` must be True or False"),
    ({"use_ema": "yes"}, "`use_ema` must be True or False"),
    ({"learning_rate": "0.1"}, "`learning_rate` must be a number"),
    ({"dynamic_growth_steps": 2000.0}, "`dynamic_growth_steps` must be an integer"),
    # The orders of other wrappers.
    ({"initial_scale": ols.presets.keras()}, r"`initial_scale` .*`loss_scaled\(inner_"),
    ({"initial_scale": True}, "`initial_scale` must be a number, got True"),
]
REFUSED = [(ValueError, *case) for case in REFUSED_VALUES]
REFUSED += [(TypeError, *case) for case in REFUSED_KINDS]


@pytest.mark.parametrize(("error", "options", "message"), REFUSED)
def test_a_setting_of_a_wrong_value_or_kind_is_refused(error, options, message):
    with pytest.raises(error, match=message):
        ols.loss_scale_optimizer(optax.sgd(0.1), **options)


def test_an_inner_optimizer_of_the_wrong_kind_is_refused():
    with pytest.raises(TypeError, match="`inner_optimizer` must be an optimizer"):
        ols.loss_scale_optimizer(1024.0, optax.sgd(0.1))


@pytest.mark.parametrize("options", [{"use_ema": True}, DECAY])
def test_missing_params_and_masters_inside_are_named(options):
    (name, *_) = options
    tx = ols.loss_scale_optimizer(optax.sgd(0.1), **options)
    with pytest.raises(ValueError, match=f"`params` must be given.*`{name}`"):
        tx.update(jnp.ones(1), tx.init(jnp.ones(1)))
    tx = ols.loss_scale_optimizer(ols.master_weights(optax.sgd(0.1)), **options)
    with pytest.raises(ValueError, match=f"`{name}` must be inside `master_weights`"):
        tx.init(jnp.ones(1, jnp.float16))


# Averages.


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
    with pytest.raises(ValueError, match=r"got 2, at \['inner_states/critic/") as error:
        ols.ema_params(opt_state)
    (path,) = re.findall("path='(.*)'", str(error.value))
    assert jax.tree.leaves(ols.ema_params(opt_state, path=path)) == [0.0]


def test_several_averages_are_finalized_one_after_the_other(several_averages):
    params, opt_state = several_averages
    params = start = jax.tree.map(lambda p: p + 7.0, params)
    for name in params:
        params = ols.finalize_params(params, opt_state, path=f"inner_states/{name}")
    assert params == {"generator": 0.0, "critic": 0.0, "encoder": start["encoder"]}
    with pytest.raises(ValueError, match="elsewhere"):
        ols.finalize_params(params, opt_state, path="elsewhere")


def test_before_the_first_update_the_average_equals_the_initial_parameters():
    opt_state = ols.loss_scale_optimizer(optax.sgd(0.1), use_ema=True).init(PARAMS)
    assert_same_bits(ols.ema_params(opt_state), PARAMS)
    assert_same_bits(ols.finalize_params(PARAMS, opt_state), PARAMS)


def test_without_an_average_there_is_none_and_the_parameters_are_final():
    opt_state = ols.loss_scale_optimizer(optax.sgd(0.1)).init(PARAMS)
    assert ols.finalize_params(PARAMS, opt_state) is PARAMS
    with pytest.raises(ValueError, match=r"got 0.*use_ema=True"):
        ols.ema_params(opt_state)
    with pytest.raises(ValueError, match="must hold a LossScaleState"):
        ols.finalize_params(PARAMS, PARAMS)


def test_finalized_parameters_of_an_nnx_model_go_back_by_nnx_update():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    tx = ols.loss_scale_optimizer(optax.sgd(0.1), use_ema=True, ema_momentum=0.5)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for _ in range(2):
        grads = ols.scaled_grad(lambda m: jnp.sum(m.bias[...]), optimizer)(model)
        optimizer.update(model, grads)
    params = nnx.state(model, nnx.Param)
    nnx.update(model, ols.finalize_params(params, optimizer))
    np.testing.assert_allclose(model.bias[...], [-0.15], rtol=1e-6)


# Schedules under `gradient_accumulation_steps`. Keras's pages: "Learning rate schedules
# will look at 'real' iterations value (optimizer steps)", so that with three steps the
# first updates read them at 2, 5 and 8.


def step_itself(step):
    return jnp.asarray(step, jnp.float32)


def rates(inner, steps, bad=(), window=3):
    """The learning rate of each update, which is minus the update itself."""
    tx = ols.loss_scale_optimizer(inner, 1.0, gradient_accumulation_steps=window)
    grads = np.ones((steps, 1), np.float32)
    grads[list(bad)] = np.nan
    params, _ = trained(tx, grads, jnp.zeros(1))
    moved = -np.diff(np.ravel(params), prepend=0.0)
    return moved[moved != 0].tolist()


SCHEDULED = {
    "sgd": optax.sgd(step_itself),
    "scale_by_schedule": optax.scale_by_schedule(lambda step: -step_itself(step)),
    "inject_hyperparams": optax.inject_hyperparams(optax.sgd)(step_itself),
    "chain": optax.chain(optax.identity(), optax.sgd(step_itself)),
    "partition": optax.partition({"all": optax.sgd(step_itself)}, "all"),
    "master_weights": ols.master_weights(optax.sgd(step_itself)),
}


@pytest.mark.parametrize("name", SCHEDULED)
def test_with_three_steps_the_updates_read_a_schedule_at_2_5_and_8(name):
    assert rates(SCHEDULED[name], steps=9) == [2, 5, 8]


def test_skipped_steps_count_no_iteration():
    assert rates(SCHEDULED["sgd"], steps=12, bad=(0, 4, 8)) == [2, 5, 8]


def test_without_accumulation_schedules_count_updates():
    # The update at step 0 is zero.
    assert rates(SCHEDULED["sgd"], steps=4, window=None) == [1, 2, 3]


def test_a_multi_steps_inside_moves_its_schedule_once_in_its_own_updates():
    # Two times three steps for an update, the third of each three being read.
    inner = optax.MultiSteps(optax.sgd(step_itself), 2)
    assert rates(inner, steps=18) == [2, 5, 8]


def test_the_formula_of_the_docstring_serves_an_optimizer_with_a_count_of_its_own():
    def with_a_count(schedule):
        def update(updates, count, params=None):
            return jax.tree.map(lambda g: -schedule(count) * g, updates), count + 1

        return optax.GradientTransformation(lambda params: jnp.asarray(0), update)

    k = 3
    assert rates(with_a_count(step_itself), steps=9) == [1, 2]
    inner = with_a_count(lambda count: step_itself(k * count + k - 1))
    assert rates(inner, steps=9) == [2, 5, 8]


def test_a_count_at_its_largest_does_not_wrap_around():
    inner = optax.sgd(lambda step: jnp.where(step < 0, -1.0, 1.0))
    tx = ols.loss_scale_optimizer(inner, 1.0, gradient_accumulation_steps=2)
    params = jnp.zeros(1)
    opt_state = optax.tree.set(tx.init(params), count=jnp.asarray(2**31 - 1))
    for _ in range(2):
        updates, opt_state = tx.update(jnp.ones(1), opt_state, params)
    assert updates == -1.0


def test_weight_decay_reads_its_schedule_at_2_and_5_too():
    tx = ols.loss_scale_optimizer(
        optax.sgd(1.0),
        weight_decay=0.5,
        learning_rate=lambda step: step / 4,
        gradient_accumulation_steps=3,
    )
    params, _ = trained(tx, jnp.zeros((6, 1)), jnp.ones(1))
    after_two = (1 - 0.5 * 2 / 4) * (1 - 0.5 * 5 / 4)
    assert np.ravel(params).tolist() == [1.0, 1.0, 0.75, 0.75, 0.75, after_two]


def test_an_injected_learning_rate_reaches_the_weight_decay_under_jit():
    def make_optimizer(learning_rate):
        return ols.loss_scale_optimizer(
            optax.sgd(learning_rate), weight_decay=0.5, learning_rate=learning_rate
        )

    tx = optax.inject_hyperparams(make_optimizer)(learning_rate=1.0)
    params, update = jnp.ones(1), jax.jit(tx.update)
    updates, opt_state = update(jnp.zeros(1), tx.init(params), params)
    assert updates == -0.5
    opt_state = optax.tree.set(opt_state, learning_rate=jnp.asarray(0.5))
    assert update(jnp.zeros(1), opt_state, params)[0] == -0.25


# `weight_decay_mask`, Keras's `exclude_from_weight_decay`, and frozen parameters.

LAYERS = {
    "layer": {"kernel": jnp.asarray([1.0, -2.0]), "bias": jnp.asarray([3.0])},
    "norm": jnp.asarray([4.0]),
}


def exclude_by_name(params):
    """Keras's `exclude_from_weight_decay(var_names=["bias", "norm"])`."""

    def is_decayed(path, _):
        return not any(word in jax.tree_util.keystr(path) for word in ("bias", "norm"))

    return jax.tree.map_with_path(is_decayed, params)


def halved(mask, inner=None, **options):
    """An optimizer that halves the parameters that the mask marks."""
    inner = optax.sgd(1.0) if inner is None else inner
    settings = {"weight_decay": 0.5, "learning_rate": 1.0, "weight_decay_mask": mask}
    return ols.loss_scale_optimizer(inner, 8.0, **settings, **options)


EXCLUDED = exclude_by_name(LAYERS)
MASKS = {
    "a function": exclude_by_name,
    "a tree": EXCLUDED,
    "a prefix": {"layer": EXCLUDED["layer"], "norm": False},
    "NumPy's bools": jax.tree.map(np.bool_, EXCLUDED),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_only_parameters_that_the_mask_marks_decay(mask):
    tx, zeros = halved(mask), jax.tree.map(jnp.zeros_like, LAYERS)
    updates, _ = tx.update(zeros, tx.init(LAYERS), LAYERS)
    assert updates["layer"]["kernel"].tolist() == [-0.5, 1.0]
    assert (updates["layer"]["bias"], updates["norm"]) == (0.0, 0.0)


def test_the_inner_optimizer_sees_decayed_parameters():
    tx = halved(exclude_by_name, optax.stateless(lambda updates, params: params))
    updates, _ = tx.update(LAYERS, tx.init(LAYERS), LAYERS)
    # The decayed parameter minus the decay, and the parameter itself.
    assert updates["layer"]["kernel"].tolist() == [0.5 - 0.5, -1.0 + 1.0]
    assert updates["norm"] == 4.0


def test_a_mask_works_in_an_nnx_optimizer():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    model.bias[...] = jnp.ones(2)
    kernel, params = model.kernel[...], nnx.state(model, nnx.Param)
    optimizer = nnx.Optimizer(model, halved(exclude_by_name), wrt=nnx.Param)
    optimizer.update(model, jax.tree.map(jnp.zeros_like, params))
    np.testing.assert_array_equal(model.kernel[...], kernel / 2)
    np.testing.assert_array_equal(model.bias[...], 1.0)


def test_a_mask_works_with_an_equinox_module():
    # A module of bools is callable, as the module that it was made from.
    model = eqx.nn.MLP(2, 2, 4, depth=1, key=jax.random.key(0))
    tx = halved(exclude_by_name(model), use_ema=True)
    grads = jax.tree.map(jnp.zeros_like, eqx.filter(model, eqx.is_array))
    updates, opt_state = tx.update(grads, tx.init(model), model)
    new = eqx.apply_updates(model, updates)
    finalized = ols.finalize_params(new, opt_state)
    for old_layer, *layers in zip(
        model.layers, new.layers, finalized.layers, strict=True
    ):
        for layer in layers:
            np.testing.assert_array_equal(layer.weight, old_layer.weight / 2)
            np.testing.assert_array_equal(layer.bias, old_layer.bias)
    assert finalized.activation is model.activation


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (["bias", "norm"], ValueError, "list"),
        (
            jax.tree.map(lambda _: "decay", LAYERS),
            TypeError,
            "`weight_decay_mask` must",
        ),
    ],
    ids=["Keras's list of words", "words"],
)
def test_a_mask_that_does_not_fit_the_parameters_is_refused_by_init(
    mask, error, message
):
    with pytest.raises(error, match=message):
        halved(mask).init(LAYERS)


LABELS = {"layer": {"kernel": "train", "bias": "freeze"}, "norm": "freeze"}
FREEZING = {
    "overwritten": {"use_ema": True, "ema_overwrite_frequency": 2},
    "clipped": {"global_clipnorm": 1.0},
    "accumulated": {"gradient_accumulation_steps": 2, "use_ema": True},
}


@pytest.mark.parametrize("name", FREEZING)
def test_frozen_parameters_keep_every_bit(name):
    # The advice of the docstring: `optax.partition` inside, and a mask.
    inner = {"train": optax.adam(0.1), "freeze": optax.set_to_zero()}
    mask = jax.tree.map(lambda label: label == "train", LABELS)
    tx = halved(mask, optax.partition(inner, LABELS), **FREEZING[name])
    # 0.99 times it plus 0.01 times it is not exactly 0.7 in float32.
    params = start = jax.tree.map(lambda p: p * jnp.float32(0.7), LAYERS)
    opt_state, update = tx.init(params), jax.jit(tx.update)
    for i in range(8):
        grads = jax.tree.map(lambda p, i=i: jnp.full_like(p, i), params)
        updates, opt_state = update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    for tree in (params, ols.finalize_params(params, opt_state)):
        assert_same_bits(tree["layer"]["bias"], start["layer"]["bias"])
        assert_same_bits(tree["norm"], start["norm"])
        assert not np.array_equal(tree["layer"]["kernel"], start["layer"]["kernel"])
