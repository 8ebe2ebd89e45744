"""`loss_scale_optimizer`: Keras's options alone and together, and refusals."""

import functools
import inspect
import itertools
import re

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


class Oracle:
    """Keras's base_optimizer.py and loss_scale_optimizer.py, for SGD, in NumPy."""

    def __init__(self, params, options):
        self.params = {key: value.copy() for key, value in params.items()}
        self.options = options
        self.iterations = self.updates = 0
        self.acc = None
        self.average = {key: np.zeros_like(value) for key, value in params.items()}

    def step(self, grads):
        if not all(np.isfinite(grad).all() for grad in grads.values()):
            return
        get = self.options.get
        window = get("gradient_accumulation_steps") or 1
        kept = self.acc or dict.fromkeys(grads, 0.0)
        self.acc = {key: kept[key] + grad for key, grad in grads.items()}
        if (self.iterations + 1) % window == 0:
            self.update({key: total / window for key, total in self.acc.items()})
            self.acc = None
        self.iterations += 1

    def update(self, grads):
        get = self.options.get
        norms = {key: np.linalg.norm(grad) for key, grad in grads.items()}
        whole = np.sqrt(sum(norm**2 for norm in norms.values()))
        for key, grad in grads.items():
            if get("clipnorm"):
                grad = grad * min(1, get("clipnorm") / norms[key])
            if get("global_clipnorm"):
                grad = grad * min(1, get("global_clipnorm") / whole)
            if get("clipvalue"):
                grad = np.clip(grad, -get("clipvalue"), get("clipvalue"))
            rate = get("learning_rate", 0.0)
            rate = rate(self.iterations) if callable(rate) else rate
            param = self.params[key]
            param = param - param * get("weight_decay", 0.0) * rate
            param = param - RATE * grad
            if get("use_ema"):
                momentum = get("ema_momentum", 0.99) if self.updates else 0.0
                self.average[key] = (
                    momentum * self.average[key] + (1 - momentum) * param
                )
                frequency = get("ema_overwrite_frequency")
                if frequency and (self.updates + 1) % frequency == 0:
                    param = self.average[key]
            self.params[key] = param
        self.updates += 1


def make(inner=None, **options):
    inner = optax.sgd(RATE) if inner is None else inner
    tx = lenient(ols.loss_scale_optimizer(inner, initial_scale=64.0, **options))
    return optax.GradientTransformationExtraArgs(tx.init, jax.jit(tx.update))


def run(tx, all_grads):
    """Parameters and optimizer state after each step."""
    params = jax.tree.map(jnp.asarray, PARAMS)
    opt_state = tx.init(params)
    for grads in all_grads:
        scaled = ols.scale(jax.tree.map(jnp.asarray, grads), opt_state)
        updates, opt_state = tx.update(scaled, opt_state, params)
        params = optax.apply_updates(params, updates)
        yield params, opt_state


def random_grads(steps, bad=(), seed=0):
    rng = np.random.default_rng(seed)
    all_grads = [
        {key: np.float32(rng.normal(size=value.shape)) for key, value in PARAMS.items()}
        for _ in range(steps)
    ]
    for step in bad:
        all_grads[step]["b"][0] = rng.choice([np.nan, np.inf, -np.inf])
    return all_grads


CLIPS = [{}, {"clipnorm": 0.7}, {"clipvalue": 0.4}, {"global_clipnorm": 0.9}]
DECAYS = [
    {},
    {"weight_decay": 0.2, "learning_rate": RATE},
    {"weight_decay": 0.2, "learning_rate": rate_at},
]
AVERAGES = [
    {},
    {"use_ema": True, "ema_momentum": 0.8},
    {"use_ema": True, "ema_momentum": 0.6, "ema_overwrite_frequency": 2},
]
WINDOWS = [{}, {"gradient_accumulation_steps": 3}]
# The fast command runs each alone and all four together, the slow one the others.
TOGETHER = [
    pytest.param(
        {key: value for option in options for key, value in option.items()},
        id="-".join(key for option in options for key in option),
        marks=[pytest.mark.slow] if sum(map(bool, options)) in (2, 3) else [],
    )
    for options in itertools.product(CLIPS, DECAYS, AVERAGES, WINDOWS)
]


@pytest.mark.fast_every(6)
@pytest.mark.parametrize("options", TOGETHER)
def test_every_combination_of_options_works_as_in_keras(options):
    all_grads = random_grads(14, bad=(1, 4, 5, 9))
    oracle = Oracle(PARAMS, options)
    states = list(run(make(**options), all_grads))
    for grads, (params, _) in zip(all_grads, states, strict=True):
        oracle.step(grads)
        for key, param in params.items():
            np.testing.assert_allclose(param, oracle.params[key], rtol=2e-6, atol=1e-6)
    opt_state = states[-1][1]
    if options.get("use_ema"):
        for key, average in ols.ema_params(opt_state).items():
            np.testing.assert_allclose(
                average, oracle.average[key], rtol=2e-6, atol=1e-6
            )


def test_the_scale_is_that_of_the_keras_preset():
    options = {"dynamic_growth_steps": 2, "gradient_accumulation_steps": 3}
    all_grads = random_grads(8, bad=(2, 3))
    rule = ols.presets.keras(64.0, 2)
    state = rule.init()
    for grads, (_, opt_state) in zip(
        all_grads, run(make(**options), all_grads), strict=True
    ):
        state = rule.adjust(state, bool(np.isfinite(grads["b"]).all()))
        assert_same_bits(ols.find_loss_scale_state(opt_state), state)


ACCUMULATE_3 = make(gradient_accumulation_steps=3)


@given(st.sets(st.integers(0, 11), max_size=8))
def test_only_the_nonfinite_micro_batch_is_dropped(bad):
    all_grads = random_grads(12, bad=bad)
    *_, (params, _) = run(ACCUMULATE_3, all_grads)
    good = [grads for i, grads in enumerate(all_grads) if i not in bad]
    windows = [good[i : i + 3] for i in range(0, len(good) - 2, 3)]
    for key, param in params.items():
        expected = PARAMS[key] - RATE * sum(
            (np.mean([grads[key] for grads in window], axis=0) for window in windows),
            start=np.zeros_like(PARAMS[key]),
        )
        np.testing.assert_allclose(param, expected, rtol=1e-5, atol=1e-6)


def test_nothing_advances_on_a_skipped_step():
    # tf.keras would count an iteration.
    options = {
        "weight_decay": 0.1,
        "learning_rate": rate_at,
        "use_ema": True,
        "ema_overwrite_frequency": 2,
        "gradient_accumulation_steps": 2,
    }
    inner = optax.adam(optax.linear_schedule(0.1, 0.0, 10))
    (params, before), (after_params, after) = list(
        run(make(inner, **options), random_grads(4, bad=(3,)))
    )[-2:]
    assert_same_bits(after_params, params)
    assert_same_bits(after.inner_state, before.inner_state)


def test_the_inner_optimizer_reads_decayed_parameters():
    seen = []

    def record(updates, state, params):
        seen.append(params)
        return updates, state

    inner = optax.GradientTransformation(lambda params: (), record)
    tx = ols.loss_scale_optimizer(inner, weight_decay=0.5, learning_rate=1.0)
    params = jnp.asarray([2.0])
    updates, _ = tx.update(jnp.zeros(1), tx.init(params), params)
    assert (seen[0], updates) == (1.0, -1.0)


def test_overwriting_replaces_the_parameters_by_their_average():
    options = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 3}
    for i, (params, opt_state) in enumerate(
        run(make(**options), random_grads(6)), start=1
    ):
        average = ols.ema_params(opt_state)
        close = [
            np.allclose(params[key], average[key], rtol=1e-6, atol=1e-7)
            for key in params
        ]
        assert all(close) == (i in (1, 3, 6))


def test_until_the_first_update_the_average_equals_the_initial_parameters():
    tx = ols.loss_scale_optimizer(optax.sgd(0.1), use_ema=True)
    params = jax.tree.map(jnp.asarray, PARAMS)
    opt_state = tx.init(params)
    assert_same_bits(ols.ema_params(opt_state), params)
    assert_same_bits(ols.finalize_params(params, opt_state), params)


ALL = {
    "clipnorm": 1.0,
    "weight_decay": 0.1,
    "learning_rate": rate_at,
    "use_ema": True,
    "ema_overwrite_frequency": 2,
    "gradient_accumulation_steps": 2,
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_state_and_parameters_keep_their_types_under_scan_and_donation(dtype):
    tx = lenient(ols.loss_scale_optimizer(optax.adam(0.1), **ALL))
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
    abstract = jax.eval_shape(tx.init, params)
    assert jax.tree.structure(abstract) == jax.tree.structure(opt_state)
    made = tx.init(
        jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    )
    assert types(made) == types(opt_state)


def test_absent_and_integer_leaves_are_not_changed():
    tx = lenient(ols.loss_scale_optimizer(optax.sgd(1.0), **ALL, initial_scale=1.0))
    params = {"w": jnp.ones(2), "none": None, "steps": jnp.asarray(3)}
    grads = {"w": jnp.ones(2), "none": None, "steps": jnp.asarray(0)}
    opt_state = tx.init(params)
    for _ in range(2):
        updates, opt_state = tx.update(grads, opt_state, params)
    assert updates["none"] is None
    assert ols.ema_params(opt_state)["none"] is None
    assert ols.ema_params(opt_state)["steps"] == 3


def test_a_parameter_without_gradient_is_not_decayed_but_averaged():
    # As Keras does with variables whose gradient is None.
    tx = ols.loss_scale_optimizer(
        optax.sgd(1.0), weight_decay=0.5, learning_rate=1.0, use_ema=True
    )
    params = {"used": jnp.ones(1), "unused": jnp.ones(1)}
    updates, opt_state = tx.update(
        {"used": jnp.zeros(1), "unused": None}, tx.init(params), params
    )
    assert updates["unused"] is None
    assert updates["used"] == -0.5
    assert ols.ema_params(opt_state) == {"used": 0.5, "unused": 1.0}


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
    updates, opt_state = tx.update(
        jnp.asarray([8.0, jnp.nan]), tx.init(jnp.ones(2)), jnp.ones(2)
    )
    assert ols.get_loss_scale(opt_state) == 8.0
    assert updates[0] == -1.0
    assert np.isnan(updates[1])


def test_the_average_of_a_constant_parameter_is_that_parameter_to_the_bit():
    # 0.99 * p + 0.01 * p rounds to its neighbour for some of these.
    params = jnp.asarray(np.random.default_rng(0).normal(size=100), jnp.float32)
    tx = make(optax.set_to_zero(), use_ema=True, ema_overwrite_frequency=1)
    opt_state = tx.init(params)
    for _ in range(5):
        updates, opt_state = tx.update(params, opt_state, params)
        assert not updates.any()
    assert_same_bits(ols.ema_params(opt_state), params)


def test_the_optimizer_works_inside_an_nnx_optimizer():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    before = model.kernel[...]
    tx = lenient(ols.loss_scale_optimizer(optax.sgd(0.5), use_ema=True))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    grads = nnx.grad(lambda model: ols.scale(model.kernel[...].sum(), optimizer))(model)
    optimizer.update(model, grads)
    np.testing.assert_allclose(model.kernel[...], before - 0.5, rtol=1e-6)
    average = jax.tree.leaves(ols.ema_params(optimizer.opt_state))
    assert all(isinstance(leaf, jax.Array) for leaf in average)
    assert any(np.array_equal(leaf, model.kernel[...]) for leaf in average)


def test_scale_and_growth_steps_can_be_given_by_position_as_in_keras():
    tx = ols.loss_scale_optimizer(optax.sgd(0.1), 1024.0, 2)
    opt_state = tx.init(jnp.ones(1))
    assert ols.get_loss_scale(opt_state) == 1024.0
    for expected in (1024.0, 2048.0):
        _, opt_state = tx.update(jnp.ones(1), opt_state)
        assert ols.get_loss_scale(opt_state) == expected


def test_every_other_setting_needs_its_name():
    with pytest.raises(TypeError, match="takes from 1 to 3 positional arguments"):
        ols.loss_scale_optimizer(optax.sgd(0.1), 1024.0, 2, True)


R_DEFAULTS = {
    "weight_decay": None,
    "clipnorm": None,
    "clipvalue": None,
    "global_clipnorm": None,
    "use_ema": None,
    "ema_momentum": None,
    "ema_overwrite_frequency": None,
    "loss_scale_factor": None,
    "gradient_accumulation_steps": None,
}


def test_the_nulls_of_the_r_page_are_the_defaults():
    ours = ols.loss_scale_optimizer(optax.sgd(RATE), 32768, 2000, **R_DEFAULTS)
    plain = ols.loss_scale_optimizer(optax.sgd(RATE))
    states = [list(run(lenient(tx), random_grads(3, bad=(1,)))) for tx in (ours, plain)]
    assert_same_bits(*states)


def test_a_momentum_of_none_is_that_of_keras():
    options = {"use_ema": True, "ema_momentum": None}
    averages = [
        ols.ema_params(list(run(make(**options | more), random_grads(3)))[-1][1])
        for more in ({}, {"ema_momentum": 0.99})
    ]
    assert_same_bits(*averages)


@pytest.mark.parametrize("rule", [ols.presets.keras(), ols.presets.keras])
def test_a_rule_in_place_of_the_scale_gets_a_hint(rule):
    with pytest.raises(TypeError, match=r"`initial_scale` .*`loss_scaled\(inner_opt"):
        ols.loss_scale_optimizer(optax.sgd(0.1), rule)


@pytest.mark.parametrize("dynamic", [True, False])
def test_the_argument_order_of_tf_keras_gets_a_hint(dynamic):
    with pytest.raises(TypeError, match=f"`initial_scale` .*`dynamic={dynamic}`"):
        ols.loss_scale_optimizer(optax.sgd(0.1), dynamic, 1024)


def test_an_optimizer_in_second_place_is_named_as_the_mistake():
    with pytest.raises(TypeError, match="`inner_optimizer` must be an optimizer"):
        ols.loss_scale_optimizer(1024.0, optax.sgd(0.1))


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices, as on CPU")
def test_with_an_axis_name_all_devices_skip_together():
    tx = lenient(ols.loss_scale_optimizer(optax.sgd(1.0), axis_name="data", **ALL))
    params = jnp.ones((8, 1))
    opt_state = jax.pmap(tx.init, axis_name="data")(params)
    grads = jnp.ones((8, 1)).at[3].set(jnp.nan)
    step = jax.pmap(tx.update, axis_name="data")
    updates, opt_state = step(grads, opt_state, params)
    assert not updates.any()
    assert not ols.find_loss_scale_state(opt_state).last_finite.any()


REFUSED = [
    (
        {"clipnorm": 1.0, "clipvalue": 1.0},
        "at most one of .*, got `clipnorm` and `clipvalue`",
    ),
    ({"clipvalue": 1.0, "global_clipnorm": 1.0}, "at most one of"),
    ({"clipnorm": 1.0, "global_clipnorm": 1.0}, "at most one of"),
    ({"clipnorm": 0.0}, "`clipnorm` must be finite, at least"),
    ({"clipvalue": -1.0}, "`clipvalue` must be finite, at least"),
    ({"global_clipnorm": np.nan}, "`global_clipnorm` must be finite"),
    ({"weight_decay": 0.1}, "`learning_rate` must be given with `weight_decay`"),
    ({"weight_decay": -0.1, "learning_rate": 0.1}, "`weight_decay` must be finite"),
    ({"learning_rate": -0.1}, "`learning_rate` must be finite, at least 0"),
    ({"dynamic": False}, "`initial_scale` must be given with `dynamic=False`"),
    (
        {"dynamic": False, "initial_scale": 2.0, "dynamic_growth_steps": 5},
        "`dynamic_growth_steps` must be None with `dynamic=False`, got 5",
    ),
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
    ({"dynamic_growth_steps": 0}, "`dynamic_growth_steps` must be at least 1"),
    (
        {"gradient_accumulation_steps": 0},
        "`gradient_accumulation_steps` must be at least 1",
    ),
    ({"ema_overwrite_frequency": 0}, "`ema_overwrite_frequency` must be at least 1"),
    ({"ema_momentum": 1.01}, "`ema_momentum` must be .* at most 1, got 1.01"),
    ({"ema_momentum": -0.01}, "`ema_momentum` must be .* at least 0"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_settings_that_keras_refuses_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ols.loss_scale_optimizer(optax.sgd(0.1), **options)


@pytest.mark.parametrize(
    "options",
    [
        {"dynamic": 1},
        {"use_ema": "yes"},
        {"gradient_accumulation_steps": 2.0},
        {"clipnorm": "1"},
        {"learning_rate": "0.1"},
        {"dynamic_growth_steps": 2000.0},
        {"ema_momentum": "0.9"},
    ],
)
def test_a_setting_of_the_wrong_type_raises_a_type_error(options):
    (name,) = options
    with pytest.raises(TypeError, match=f"`{name}` must be"):
        ols.loss_scale_optimizer(optax.sgd(0.1), **options)


def test_an_inner_optimizer_of_the_wrong_type_is_refused():
    with pytest.raises(TypeError, match="`inner_optimizer` must be an optimizer"):
        ols.loss_scale_optimizer(optax.sgd)


@pytest.mark.parametrize(
    "options", [{"use_ema": True}, {"weight_decay": 0.1, "learning_rate": 0.1}]
)
def test_missing_params_are_named(options):
    tx = ols.loss_scale_optimizer(optax.sgd(0.1), **options)
    (name, *_) = options
    with pytest.raises(ValueError, match=f"`params` must be given.*`{name}`"):
        tx.update(jnp.ones(1), tx.init(jnp.ones(1)))


def test_without_an_average_ema_params_says_what_to_pass():
    tx = ols.loss_scale_optimizer(optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"got 0.*use_ema=True"):
        ols.ema_params(tx.init(jnp.ones(1)))
    tx = ols.loss_scale_optimizer(optax.sgd(0.1), use_ema=True)


def several_averages():
    """Parameters and states of two optimizers with averages, and one without."""
    averaging = ols.loss_scale_optimizer(
        optax.sgd(1.0), 1.0, use_ema=True, ema_momentum=0.5
    )
    optimizers = {
        "generator": averaging,
        "critic": averaging,
        "encoder": ols.loss_scale_optimizer(optax.sgd(1.0), 1.0),
    }
    tx = optax.partition(optimizers, {name: name for name in optimizers})
    params = {name: jnp.ones(1) for name in optimizers}
    opt_state = tx.init(params)
    for _ in range(2):
        updates, opt_state = tx.update(params, opt_state, params)
        params = optax.apply_updates(params, updates)
    return params, opt_state


def test_of_several_averages_one_is_picked_by_its_path():
    _, opt_state = several_averages()
    for name in ("generator", "critic"):
        # The parameter goes from 1 to 0 to 0, and is averaged from 0 on.
        average = ols.ema_params(opt_state, path=f"inner_states/{name}")
        assert average[name] == 0.0
        assert jax.tree.leaves(average) == [0.0]


def test_several_averages_name_the_path_that_picks_one():
    _, opt_state = several_averages()
    with pytest.raises(ValueError, match=r"got 2, at `.inner_states\['critic") as error:
        ols.ema_params(opt_state)
    (path,) = re.findall("path='(.*)'", str(error.value))
    assert ols.ema_params(opt_state, path=path)["critic"] == 0.0


def test_a_path_without_an_average_names_those_that_have_one():
    _, opt_state = several_averages()
    for path in ("inner_states/encoder", "elsewhere"):
        with pytest.raises(ValueError, match=r"got none there, but some at `.inn"):
            ols.ema_params(opt_state, path=path)


def test_several_averages_are_finalized_one_after_the_other():
    params, opt_state = several_averages()
    start = params = jax.tree.map(lambda p: p + 7.0, params)
    for name in params:
        params = ols.finalize_params(params, opt_state, path=f"inner_states/{name}")
    assert params == {"generator": 0.0, "critic": 0.0, "encoder": start["encoder"]}


def test_finalize_params_refuses_a_path_to_nothing():
    params, opt_state = several_averages()
    with pytest.raises(ValueError, match="elsewhere"):
        ols.finalize_params(params, opt_state, path="elsewhere")
    with pytest.raises(ValueError, match="got 2, at"):
        ols.finalize_params(params, opt_state)
    with pytest.raises(TypeError, match="`path` must be a string"):
        ols.ema_params(opt_state, path=0)


def test_without_an_average_finalize_params_returns_the_parameters():
    params = {"w": jnp.ones(2)}
    opt_state = ols.loss_scale_optimizer(optax.sgd(0.1)).init(params)
    assert ols.finalize_params(params, opt_state) is params


def test_the_learning_rate_can_be_a_function_without_a_signature():
    # max(0.25, step): 0.25 at step 0, later the step.
    rate = functools.partial(max, 0.25)
    with pytest.raises(ValueError, match="signature"):
        inspect.signature(rate)
    tx = ols.loss_scale_optimizer(
        lenient(optax.sgd(1.0)), weight_decay=0.5, learning_rate=rate
    )
    params = jnp.ones(1)
    opt_state = tx.init(params)
    grads = ols.scale(jnp.zeros(1), opt_state)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = tx.update(grads, opt_state, params)
    assert updates.tolist() == [-0.125]


def test_finalize_params_refuses_a_tree_without_an_optimizer_state():
    with pytest.raises(ValueError, match="must hold a LossScaleState"):
        ols.finalize_params(jnp.ones(1), jnp.ones(1))


def test_parameters_frozen_by_partition_keep_their_value():
    tx = optax.partition(
        {
            "train": ols.loss_scale_optimizer(
                optax.sgd(1.0), use_ema=True, weight_decay=0.5, learning_rate=1.0
            ),
            "freeze": optax.set_to_zero(),
        },
        {"w": "train", "frozen": "freeze"},
    )
    params = {"w": jnp.ones(1), "frozen": jnp.full(1, 7.0)}
    opt_state = tx.init(params)
    updates, opt_state = tx.update(
        jax.tree.map(jnp.zeros_like, params), opt_state, params
    )
    assert updates == {"w": -0.5, "frozen": 0.0}
    assert ols.finalize_params(params, opt_state) == {"w": 0.5, "frozen": 7.0}


def test_finalize_params_refuses_parameters_of_another_structure_or_shape():
    tx = ols.loss_scale_optimizer(optax.sgd(0.1), use_ema=True)
    opt_state = tx.init(jnp.ones(2))
    with pytest.raises(ValueError, match="`params` must have the tree structure of"):
        ols.finalize_params({"a": jnp.ones(2)}, opt_state)
    with pytest.raises(ValueError, match=r"got shape \(5,\) for \(2,\)"):
        ols.finalize_params(jnp.ones(5), opt_state)


def test_a_gradient_can_be_missing_under_accumulation():
    # optax.MultiSteps itself fails on it.
    tx = lenient(ols.loss_scale_optimizer(optax.sgd(1.0), **ALL, initial_scale=1.0))
    params = {"used": jnp.ones(1), "unused": jnp.ones(1)}
    opt_state = tx.init(params)
    before = types(opt_state)
    for _ in range(2):
        grads = {"used": jnp.ones(1), "unused": None}
        updates, opt_state = tx.update(grads, opt_state, params)
    assert updates["unused"] is None
    assert updates["used"] < -1.0
    assert types(opt_state) == before


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


def test_a_traced_setting_other_than_the_learning_rate_is_refused_by_name():
    @jax.jit
    def build(limit):
        ols.loss_scale_optimizer(optax.sgd(0.1), clipnorm=limit)

    with pytest.raises(TypeError, match="`clipnorm` must be a concrete number"):
        build(1.0)


def test_a_schedule_without_an_argument_is_refused():
    with pytest.raises(
        TypeError, match=r"`learning_rate` must be .* function of the s"
    ):
        ols.loss_scale_optimizer(optax.sgd(0.1), learning_rate=lambda: 0.1)


def test_finalized_parameters_of_an_nnx_model_go_back_by_nnx_update():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    tx = ols.loss_scale_optimizer(optax.sgd(0.1), use_ema=True, ema_momentum=0.5)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for _ in range(2):
        grads = ols.scaled_grad(lambda m: jnp.sum(m.bias[...]), optimizer)(model)
        optimizer.update(model, grads)
    params = nnx.state(model, nnx.Param)
    final = ols.finalize_params(params, optimizer)
    assert jax.tree.structure(final) == jax.tree.structure(params)
    nnx.update(model, final)
    np.testing.assert_allclose(model.bias[...], [-0.15], rtol=1e-6)


def test_averages_whose_paths_read_the_same_are_several():
    tx = ols.loss_scale_optimizer(optax.sgd(0.1), use_ema=True)
    trees = {"a/b": tx.init(jnp.ones(1)), "a": {"b": tx.init(jnp.zeros(1))}}
    with pytest.raises(ValueError, match="got 2, at"):
        ols.ema_params(trees)
    assert ols.ema_params(trees, path="a") == 0
    assert ols.ema_params(trees, path="['a/b']") == 1


def test_an_average_that_was_restored_as_numbers_is_finalized():
    tx = ols.loss_scale_optimizer(optax.sgd(0.1), use_ema=True)
    params = {"scalar": jnp.float32(1.0)}
    opt_state = jax.tree.map(lambda leaf: leaf.tolist(), tx.init(params))
    final = ols.finalize_params(params, opt_state)["scalar"]
    assert (final, final.dtype) == (1.0, jnp.float32)
