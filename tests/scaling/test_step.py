"""A step is that of plain Python, for any combination of settings and leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import optax_lossscale as ols
from helpers.compare import assert_same_bits, types
from helpers.compat import enable_x64

pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),  # Optax's optimizers need it.
    pytest.mark.filterwarnings("ignore:.*master_weights"),
]

RULES = {
    "dynamic": ols.dynamic_loss_scale(8.0, growth_interval=2, hysteresis=2),
    "headroom": ols.headroom_loss_scale(8.0, history=4, recent=3),
    "static": ols.static_loss_scale(8.0),
    "unchecked": ols.static_loss_scale(8.0, skip_nonfinite=False),
    "none": ols.no_loss_scale(),
}
# Every number is a sum of few powers of two, so that all programs have the same bits.
OPTIMIZERS = {
    "sgd": optax.sgd(0.5),
    "momentum": optax.sgd(0.5, momentum=0.5),
    "decay": optax.chain(optax.add_decayed_weights(0.5), optax.sgd(0.5)),
}
FLOATS = {
    "float32": jnp.float32,
    "float64": jnp.float64,
    "float16": jnp.float16,
    "bfloat16": jnp.bfloat16,
    "complex": jnp.complex64,
}
OTHERS = {  # Parameter and gradient.
    "integers": (jnp.arange(2), np.zeros(2, jax.dtypes.float0)),
    "integers without a gradient": (jnp.arange(2), None),
    "absent": (None, None),
}


def array_of(kind, value):
    return jnp.asarray([value, 0.25], FLOATS[kind])


def wide(leaf):
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return None
    return leaf.astype(jnp.float32) if leaf.dtype.itemsize < 4 else leaf


def divided(leaf, divisor):
    """By parts, because a complex division makes NaN of an infinity."""
    if not jnp.iscomplexobj(leaf):
        return leaf / jnp.asarray(divisor, leaf.dtype)
    return jax.lax.complex(leaf.real / divisor, leaf.imag / divisor)


def are_finite(leaves):
    return all(np.isfinite(leaf).all() for leaf in leaves)


def step_in_python(rule, inner, options, grads, state, params, verdicts):
    """What `update` does, with `if` in place of masks. Updates are None if skipped."""
    old, is_bare = state.loss_scale_state, rule is RULES["none"]
    flags = options["unscale_mask"] or dict.fromkeys(params, True)
    divisor = 1.0 if options["grads_unscaled"] else old.loss_scale
    seen = {}
    for name, grad in grads.items():
        is_fixed = grad is None or not jnp.issubdtype(params[name].dtype, jnp.inexact)
        is_scaled = flags[name] and not is_bare
        seen[name] = None if is_fixed else grad
        if is_scaled and not is_fixed:
            seen[name] = divided(wide(grad), divisor)

    def scaled_ones(tree):
        return [x for name, x in tree.items() if flags[name] and x is not None]

    is_finite, new = True, old
    if rule.skips:
        is_finite = verdicts.get("grads_finite", True) and are_finite(scaled_ones(seen))
    if not is_bare:
        largest = ols.max_magnitude(scaled_ones(seen)) if is_finite else jnp.inf
        new = rule.adjust(old, is_finite, largest)
    see = params if is_bare else jax.tree.map(wide, params)
    see = {name: see[name] if name in FLOATS else None for name in params}
    updates, inner_state = inner.update(seen, state.inner_state, see)
    is_applied = is_finite
    if is_finite and options["check_updates"] and rule.skips:
        is_applied = are_finite(scaled_ones(updates))
    is_applied &= verdicts.get("accept", True)
    if is_finite and not is_applied:  # Rejected.
        new = old
    counted = ols.static_loss_scale(1.0).adjust(old, is_applied)
    keep = {"loss_scale": new.loss_scale, "rule_state": new.rule_state}
    new = counted._replace(**keep)
    if not is_applied:
        return None, ols.LossScaledState(new, state.inner_state)
    return updates, ols.LossScaledState(new, inner_state)


def on_two_devices(update, grads, verdicts):
    """The result of the second device, whose gradients and verdicts they are."""
    floats = {kind: grad for kind, grad in grads.items() if kind in FLOATS}
    good = {kind: array_of(kind, 0.25) for kind in floats}
    both = jax.tree.map(lambda *pair: jnp.stack(pair), good, floats)
    verdicts = {name: jnp.asarray([True, value]) for name, value in verdicts.items()}
    results = jax.vmap(
        lambda floats, verdicts: update({**grads, **floats}, verdicts), axis_name="i"
    )(both, verdicts)
    # The first has the same verdict, so no bit of its state moves either.
    return jax.tree.map(lambda leaf: leaf[1], results)


RUNS = {
    "eager": lambda update, grads, verdicts: update(grads, verdicts),
    "jit": lambda update, grads, verdicts: jax.jit(lambda: update(grads, verdicts))(),
    "two devices": on_two_devices,
}
VALUES = st.sampled_from([0.5, 0.5, -2.0, np.nan, np.inf])
VERDICTS = st.fixed_dictionaries(
    {}, optional={"accept": st.booleans(), "grads_finite": st.booleans()}
)


@settings(phases=[Phase.explicit, Phase.generate])  # To shrink one takes minutes.
@given(
    data=st.data(),
    rule=st.sampled_from(list(RULES)),
    optimizer=st.sampled_from(list(OPTIMIZERS)),
    kinds=st.builds(
        lambda one, others: dict.fromkeys([one, *others]),
        st.sampled_from(list(FLOATS)),
        st.lists(st.sampled_from([*FLOATS, *OTHERS]), max_size=3),
    ),
    run=st.sampled_from(list(RUNS)),
    check_updates=st.booleans(),
    grads_unscaled=st.booleans(),
)
def test_a_step_is_that_of_plain_python(
    data, rule, optimizer, kinds, run, check_updates, grads_unscaled
):
    rule, inner = RULES[rule], OPTIMIZERS[optimizer]
    masks = st.fixed_dictionaries({kind: st.booleans() for kind in kinds})
    options = {
        "unscale_mask": data.draw(st.none() | masks),
        "check_updates": check_updates,
        "grads_unscaled": grads_unscaled,
    }
    if rule is RULES["none"]:
        options["unscale_mask"] = None
    with enable_x64("float64" in kinds):
        tx = ols.loss_scaled(
            inner, rule, axis_name="i" if run == "two devices" else None, **options
        )
        params = {
            kind: array_of(kind, -0.0) if kind in FLOATS else OTHERS[kind][0]
            for kind in kinds
        }
        state = first = tx.init(params)
        for _ in range(2):
            value, verdicts = data.draw(VALUES), data.draw(VERDICTS)
            grads = {
                kind: array_of(kind, value) if kind in FLOATS else OTHERS[kind][1]
                for kind in kinds
            }
            expected, after = step_in_python(
                rule, inner, options, grads, state, params, verdicts
            )
            updates, state = RUNS[run](
                lambda grads, verdicts, given=state: tx.update(
                    grads, given, params, **verdicts
                ),
                grads,
                verdicts,
            )
            assert_same_bits(state, after)
            assert types(state) == types(first)
            updates = {kind: updates[kind] for kind in FLOATS.keys() & params.keys()}
            moving = {kind: params[kind] for kind in updates}
            moved = optax.apply_updates(moving, updates)
            assert types(moved) == types(moving)
            if expected is None:
                assert_same_bits(moved, moving)
            else:
                assert_same_bits(updates, {kind: expected[kind] for kind in updates})
