"""From the loss scales of `compat.flax` and `compat.jmp` to `loss_scaled` and back."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from helpers.compare import assert_same_bits
from helpers.inner import lenient
from optax_lossscale.compat import flax, jmp


def flax_grads(dynamic_scale, loss_fn, *args):
    dynamic_scale, finite, _, grads = dynamic_scale.value_and_grad(loss_fn)(*args)
    return dynamic_scale, finite, grads


def jmp_grads(loss_scale, loss_fn, *args):
    scaled_loss = lambda *args: loss_scale.scale(loss_fn(*args))  # noqa: E731
    grads = loss_scale.unscale(jax.grad(scaled_loss)(*args))
    finite = jmp.all_finite(grads)
    return loss_scale.adjust(finite), finite, grads


class Peer(NamedTuple):
    """How the gradients of a step are computed with a class, and settings of it."""

    cls: Any
    grads: Callable
    scale: str
    count: str
    settings: dict

    def make(self, scale, count=0, **settings):
        fields = {self.scale: jnp.float32(scale), self.count: jnp.int32(count)}
        return self.cls(**fields, **settings)


FLAX_SETTINGS = {"growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3}
FLAX_SETTINGS["minimum_scale"] = 0.25
JMP_SETTINGS = {"period": 3, "factor": 4, "min_loss_scale": 0.25}
PEERS = {
    "flax": Peer(flax.DynamicScale, flax_grads, "scale", "fin_steps", FLAX_SETTINGS),
    "jmp": Peer(jmp.DynamicLossScale, jmp_grads, "loss_scale", "counter", JMP_SETTINGS),
}
EACH = pytest.mark.parametrize("peer", PEERS.values(), ids=PEERS)

FIRST_SCALE = 2.0**14
PARAMS = {"w": jnp.full((3, 2), 0.5), "v": jnp.asarray([1.0, -0.5])}
# Its products are exact, however XLA combines them with sums.
SGD = lenient(optax.sgd(2.0**-3, momentum=0.5))
STEPS = 16
BATCHES = np.random.default_rng(0).normal(size=(STEPS, 4, 3)).astype(np.float32)
BATCHES[[5, 6, 11], 0, 0] = 1e5  # Infinite in float16.


def loss_fn(params, x):
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), {"x": x, **params})
    return jnp.mean((jnp.tanh(low["x"] @ low["w"]) @ low["v"]).astype(jnp.float32) ** 2)


@functools.cache
def steps_of(cls):
    """A step in the form of a peer, and the same step in this package's own form."""
    (peer,) = [peer for peer in PEERS.values() if peer.cls is cls]
    tx = ols.loss_scaled(SGD, peer.make(FIRST_SCALE, **peer.settings).to_rule())

    @jax.jit
    def peer_step(params, inner_state, loss_scale, x):
        loss_scale, finite, grads = peer.grads(loss_scale, loss_fn, params, x)
        updates, new_state = SGD.update(grads, inner_state, params)
        new = optax.apply_updates(params, updates), new_state
        kept = optax.tree.where(finite, new, (params, inner_state))
        return *kept, loss_scale

    @jax.jit
    def own_step(params, opt_state, x):
        grads = ols.scaled_grad(loss_fn, opt_state)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return peer_step, own_step


@pytest.mark.slow
@EACH
@pytest.mark.parametrize(("there", "back"), [(0, 6), (4, 12), (6, STEPS)])
def test_a_run_carried_over_to_loss_scaled_and_back_keeps_every_bit(peer, there, back):
    peer_step, own_step = steps_of(peer.cls)
    first = peer.make(FIRST_SCALE, **peer.settings)
    history = [(PARAMS, SGD.init(PARAMS), first)]
    for x in BATCHES:
        history.append(peer_step(*history[-1], x))
    scales = [getattr(loss_scale, peer.scale) for *_, loss_scale in history]
    falls = {i for i in range(STEPS) if scales[i + 1] < scales[i]}
    assert falls == {5, 6, 11}
    assert max(scales) > FIRST_SCALE

    params, inner_state, loss_scale = history[there]
    opt_state = ols.LossScaledState(loss_scale.to_state(), inner_state)
    for x in BATCHES[there:back]:
        params, opt_state = own_step(params, opt_state, x)
    assert opt_state.loss_scale_state.step_count == back - there
    returned = peer.cls.from_state(opt_state, **peer.settings)
    carry = params, opt_state.inner_state, returned
    assert_same_bits(carry, history[back])
    for x, expected in zip(BATCHES[back:], history[back + 1 :], strict=True):
        carry = peer_step(*carry, x)
        assert_same_bits(carry, expected)


@EACH
def test_the_state_of_an_object_is_one_of_its_rule(peer):
    loss_scale = peer.make(8.0, 2, **peer.settings)
    first = loss_scale.to_rule().init()
    expected = first._replace(
        loss_scale=jnp.float32(8.0),
        rule_state=first.rule_state._replace(growth_count=jnp.int32(2)),
    )
    state = loss_scale.to_state()
    assert_same_bits(state, expected)
    assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, expected)


@EACH
def test_the_fields_of_a_state_have_buffers_of_their_own(peer):
    # Else a step that donates the state would delete the scale that it was made from.
    loss_scale = peer.make(8.0, 2)
    state = loss_scale.to_state()
    leaves = jax.tree.leaves((loss_scale, state, peer.cls.from_state(state)))
    pointers = {leaf.unsafe_buffer_pointer() for leaf in leaves}
    assert len(pointers) == len(leaves)


@EACH
def test_fields_with_an_axis_of_devices_become_a_state_with_that_axis(peer):
    one = peer.make(8.0, 2)
    several = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), one)
    state = several.to_state()
    assert {leaf.shape for leaf in jax.tree.leaves(state)} == {(2,)}
    assert_same_bits(peer.cls.from_state(state), several)


@EACH
def test_the_rule_has_the_settings_of_the_object(peer):
    rule = peer.make(8.0, **peer.settings).to_rule()
    shown = {name: rule.settings[name] for name in peer.settings}
    assert shown == peer.settings


OTHER_RULES = [ols.headroom_loss_scale(), ols.presets.deepspeed(), ols.no_loss_scale()]


@pytest.mark.parametrize("rule", OTHER_RULES, ids=["headroom", "deepspeed", "none"])
@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (flax.DynamicScale, "`tree` must hold the state of a rule that"),
        (jmp.DynamicLossScale, "got one of another rule"),
        (jmp.StaticLossScale, "got one of another rule"),
    ],
)
def test_a_state_of_another_rule_is_refused(cls, message, rule):
    with pytest.raises(ValueError, match=message):
        cls.from_state(rule.init())


@EACH
def test_a_tree_without_a_state_is_refused(peer):
    with pytest.raises(ValueError, match="the tree must hold a LossScaleState"):
        peer.cls.from_state({})
