"""Parameters and scales of trainings that were recorded in Keras, tf.keras and PyTorch.

Promised in docs/migration. `data/README.md` says how they were recorded.
"""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from helpers.inner import lenient

DATA = pathlib.Path(__file__).parent / "data"
INNER = {
    "sgd": optax.sgd,
    "sgd_momentum": optax.sgd,
    # Keras's epsilon. The systems add it in different places, so results agree only to
    # about 1e-5.
    "adam": functools.partial(optax.adam, eps=1e-7),
    "adamw": optax.adamw,
}


def trajectories(name):
    """Those of a file. The first, which the fast tests run, has the most options."""
    recorded = json.loads((DATA / f"{name}.json").read_text())["trajectories"]
    recorded.sort(key=lambda t: -len(t["options"]))
    return [
        pytest.param(
            t,
            id="-".join([str(i), t["inner"], *t["options"]]),
            marks=pytest.mark.slow if i else (),
        )
        for i, t in enumerate(recorded)
    ]


def arrays(lists, shapes):
    """The two arrays that a list of numbers and texts such as "nan" stands for."""
    return [
        np.asarray([float(entry) for entry in entries], np.float32).reshape(shape)
        for entries, shape in zip(lists, shapes, strict=True)
    ]


def recorded(trajectory, name):
    """What was recorded under a name, two arrays with an entry for each step."""
    steps = [arrays(lists, trajectory["shapes"]) for lists in trajectory[name]]
    return [np.stack(step) for step in zip(*steps, strict=True)]


def run(trajectory, tx, grads=None):
    """Parameters and states after each step with the recorded gradients, or others."""
    tx = lenient(tx)
    params = arrays(trajectory["init_params"], trajectory["shapes"])
    params = [jnp.asarray(array) for array in params]

    def step(carry, grads):
        params, opt_state = carry
        updates, opt_state = tx.update(ols.scale(grads, opt_state), opt_state, params)
        carry = optax.apply_updates(params, updates), opt_state
        return carry, carry

    grads = recorded(trajectory, "grads") if grads is None else grads
    train = jax.jit(lambda carry, grads: jax.lax.scan(step, carry, grads)[1])
    return train((params, tx.init(params)), grads)


def assert_close(ours, real):
    for one, other in zip(ours, real, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def scales_of(opt_states):
    return ols.find_loss_scale_state(opt_states).loss_scale.tolist()


@pytest.mark.parametrize("trajectory", trajectories("keras_optimizer"))
def test_loss_scale_optimizer_follows_keras(trajectory):
    options, kwargs = trajectory["options"], trajectory["inner_kwargs"]
    tx = ols.loss_scale_optimizer(
        INNER[trajectory["inner"]](**kwargs),
        initial_scale=trajectory["initial_scale"],
        dynamic_growth_steps=trajectory["dynamic_growth_steps"],
        learning_rate=kwargs["learning_rate"],
        **options,
    )
    params, opt_states = run(trajectory, tx)
    assert_close(params, recorded(trajectory, "params"))
    assert scales_of(opt_states) == trajectory["scale"]
    state = ols.find_loss_scale_state(opt_states)
    finite_steps = state.step_count - state.total_notfinite
    window = options.get("gradient_accumulation_steps", 1)
    assert (finite_steps // window).tolist() == trajectory["iterations"]
    last = jax.tree.map(lambda leaf: leaf[-1], (params, opt_states))
    finalized = ols.finalize_params(*last)
    if "ema" not in trajectory:
        assert finalized is last[0]
        return
    real = [
        arrays(trajectory[name], trajectory["shapes"])
        for name in ("ema", "finalized_params")
    ]
    assert_close(ols.ema_params(last[1]), real[0])
    assert_close(finalized, real[1])


@pytest.mark.parametrize("trajectory", trajectories("keras_schedules"))
def test_schedules_and_excluded_parameters_follow_keras(trajectory):
    first, steps, decay = trajectory["schedule"].values()

    def schedule(step):
        return first / (1 + decay * step / steps)

    inner = INNER[trajectory["inner"]](schedule)
    if trajectory["inner"] == "sgd_momentum":
        # Keras adds up steps, each with the learning rate of its time; Optax gradients.
        inner = optax.chain(inner, optax.trace(0.9))
    excluded, options = trajectory["exclude_from_weight_decay"], trajectory["options"]
    if excluded:  # Keras excludes a variable whose name contains one of the words.
        options = options | {
            "weight_decay_mask": [
                not any(word in name for word in excluded)
                for name in trajectory["names"]
            ],
            "learning_rate": schedule,
        }
    settings = trajectory["initial_scale"], trajectory["dynamic_growth_steps"]
    tx = ols.loss_scale_optimizer(inner, *settings, **options)
    params, opt_states = run(trajectory, tx)
    assert_close(params, recorded(trajectory, "params"))
    assert scales_of(opt_states) == trajectory["scale"]


@pytest.mark.parametrize("trajectory", trajectories("tf_keras_optimizer"))
def test_parameters_and_scale_follow_tf_keras(trajectory):
    inner = INNER[trajectory["inner"]](**trajectory["inner_kwargs"])
    if "global_clipnorm" in trajectory["options"]:
        clip = optax.clip_by_global_norm(trajectory["options"]["global_clipnorm"])
        inner = optax.chain(clip, inner)
    rule = ols.presets.tf_keras(**trajectory["config"])
    params, opt_states = run(trajectory, ols.loss_scaled(inner, rule))
    assert scales_of(opt_states) == trajectory["scale"]
    state = ols.find_loss_scale_state(opt_states)
    assert state.step_count.tolist() == trajectory["iterations"]
    # tf.keras counts an iteration on a skipped step, and Adam's bias correction with
    # it; here nothing advances.
    is_adam = trajectory["inner"] == "adam"
    alike = slice(trajectory["finite"].index(0) if is_adam else None)
    real = recorded(trajectory, "params")
    assert_close(*([array[alike] for array in side] for side in (params, real)))


def torch_inner(trajectory):
    kwargs = dict(trajectory["inner_kwargs"])
    kwargs["learning_rate"] = kwargs.pop("lr")
    makers = {"sgd": optax.sgd, "adam": optax.adam, "adamw": optax.adamw}
    inner = makers[trajectory["inner"]](**kwargs)
    max_norm = trajectory["options"].get("clip_grad_norm", np.inf)
    return optax.chain(optax.clip_by_global_norm(max_norm), inner)


TORCH = trajectories("torch_optimizer")
SHARED = [t for t in TORCH if "two_optimizers" in t.id]
ALONE = [t for t in TORCH if t not in SHARED]


@pytest.mark.parametrize("trajectory", ALONE)
def test_parameters_and_scale_follow_torch(trajectory):
    rule = ols.presets.torch(**trajectory["config"])
    # As in torch: scaled gradients are summed, and one NaN spoils the window.
    window = trajectory["options"].get("accumulate", 1)
    grads = [
        grad.reshape(-1, window, *grad.shape[1:]).mean(1)
        for grad in recorded(trajectory, "grads")
    ]
    tx = ols.loss_scaled(torch_inner(trajectory), rule)
    params, opt_states = run(trajectory, tx, grads)
    after_each = slice(window - 1, None, window)
    real = [array[after_each] for array in recorded(trajectory, "params")]
    assert_close(params, real)
    assert scales_of(opt_states) == trajectory["scale"][after_each]
    counts = ols.find_loss_scale_state(opt_states).rule_state.growth_count
    assert counts.tolist() == trajectory["growth_tracker"][after_each]


@pytest.mark.parametrize("trajectory", SHARED)
def test_two_optimizers_under_one_scale_follow_torch(trajectory):
    # docs/migration/pytorch.md, "Several optimizers".
    rule = ols.presets.torch(**trajectory["config"])
    skips_alone = lenient(optax.apply_if_finite(torch_inner(trajectory), 2**31 - 1))

    def step(carry, grads):
        players, opt_states, shared = carry
        grads = ols.unscale(ols.scale(grads, shared), shared)
        stepped = [
            skips_alone.update(*each)
            for each in zip(grads, opt_states, players, strict=True)
        ]
        updates, opt_states = ([each[i] for each in stepped] for i in range(2))
        players = optax.apply_updates(players, updates)
        shared = rule.adjust(shared, ols.all_finite(grads))
        return (players, opt_states, shared), (players, shared)

    players = arrays(trajectory["init_params"], trajectory["shapes"])
    players = [jnp.asarray(player) for player in players]
    start = players, [skips_alone.init(player) for player in players], rule.init()
    grads = recorded(trajectory, "grads")
    players, shared = jax.jit(lambda: jax.lax.scan(step, start, grads)[1])()
    assert_close(players, recorded(trajectory, "params"))
    assert shared.loss_scale.tolist() == trajectory["scale"]
    assert shared.rule_state.growth_count.tolist() == trajectory["growth_tracker"]
