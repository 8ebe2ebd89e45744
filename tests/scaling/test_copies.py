"""Everything public can be copied and pickled, and then does the same."""

import copy

import cloudpickle
import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols
from helpers.compare import assert_same_bits
from optax_lossscale.compat import flax as flax_compat
from optax_lossscale.compat import jmp as jmp_compat

# Optax's optimizers need it.
pytestmark = pytest.mark.usefixtures("standard_promotion")
COPIES = {
    "deepcopy": copy.deepcopy,
    "cloudpickle": lambda each: cloudpickle.loads(cloudpickle.dumps(each)),
}
copies = pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
PARAMS = {"w": jnp.ones(2, jnp.float16), "b": jnp.ones(1)}
GRADS = jax.tree.map(lambda x: x * 2.0**10, PARAMS)
RULES = {
    "default": None,
    "dynamic": ols.dynamic_loss_scale(2.0**10, min_scale=optax.constant_schedule(1.0)),
    "headroom": ols.headroom_loss_scale(),
    "static": ols.static_loss_scale(2.0**10),
    "none": ols.no_loss_scale(),
    "own": ols.LossScale(*ols.static_loss_scale(2.0**10)),
    **{
        name: getattr(ols.presets, name)()
        for name in ols.presets.__all__
        if "state_dict" not in name and name != "mindspore_fixed"
    },
    "mindspore_fixed": ols.presets.mindspore_fixed(2.0**10),
}
OPTIMIZERS = {
    **{name: ols.loss_scaled(optax.adam(0.1), rule) for name, rule in RULES.items()},
    "masters": ols.loss_scaled(ols.master_weights(optax.sgd(0.1))),
    "compact": ols.master_weights(ols.loss_scaled(optax.sgd(0.1)), compact=True),
    "keras": ols.loss_scale_optimizer(
        optax.adam(0.1), use_ema=True, weight_decay=0.1, learning_rate=0.1
    ),
}


@pytest.mark.slow
@copies
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_copied_optimizer_takes_the_same_steps(name, copied):
    one, other = OPTIMIZERS[name], copied(OPTIMIZERS[name])
    state = one.init(PARAMS)
    assert_same_bits(other.init(PARAMS), state)
    for grads in (GRADS, {**GRADS, "b": jnp.full(1, jnp.nan)}):
        results = one.update(grads, state, PARAMS)
        assert_same_bits(other.update(grads, state, PARAMS), results)
        assert_same_bits(other.update(grads, copied(state), PARAMS), results)


def loss_fn(w, x):
    return jnp.mean(jnp.tanh(x @ w))


STATE = ols.static_loss_scale(2.0**10).init()
FUNCTIONS = {
    "autocast": ols.autocast(loss_fn),
    "O2": ols.autocast(loss_fn, jnp.bfloat16, level="O2"),
    "full_precision": ols.autocast(ols.full_precision(loss_fn)),
    "low_precision": ols.autocast(ols.low_precision(loss_fn)),
    "gradient": ols.scaled_value_and_grad(loss_fn, STATE),
    "policy": jmp_compat.get_policy("half").cast_to_compute,
}
ARGUMENTS = {"policy": (jnp.ones(3),)}


@copies
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_copied_function_computes_the_same(name, copied):
    args = ARGUMENTS.get(name, (jnp.ones((3, 2)), jnp.ones((4, 3))))
    assert_same_bits(copied(FUNCTIONS[name])(*args), FUNCTIONS[name](*args))


@copies
@pytest.mark.parametrize(
    "each",
    [
        flax_compat.DynamicScale(),
        jmp_compat.DynamicLossScale(jnp.float32(8.0)),
        STATE,
        ols.loss_scaled(optax.adam(0.1)).init(PARAMS),
        ols.headroom_loss_scale().init(),
        ols.master_weights(optax.adam(0.1), compact=True).init(PARAMS),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_copied_object_is_the_same(each, copied):
    other = copied(each)
    assert type(other) is type(each)
    assert_same_bits(other, each)


@copies
@pytest.mark.parametrize("name", ols.__all__)
def test_every_public_name_is_its_own_copy(name, copied):
    each = getattr(ols, name)
    if not isinstance(each, type(ols)):  # Python copies no modules.
        assert copied(each) is each
