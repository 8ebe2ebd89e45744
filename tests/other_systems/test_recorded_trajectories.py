"""Replays every recorded trajectory of the real systems; see data/README.md."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from helpers.history import assert_scales_agree, states_after
from helpers.inner import lenient

DATA = pathlib.Path(__file__).parent / "data"
PRESETS = {
    "apex": ols.presets.apex,
    "deepspeed": ols.presets.deepspeed,
    "fairseq": ols.presets.fairseq,
    "flax": ols.presets.flax,
    "jmp": ols.presets.jmp,
    "keras": ols.presets.keras,
    "megatron": ols.presets.megatron,
    "mindspore": ols.presets.mindspore_dynamic,
    "tf_keras": ols.presets.tf_keras,
    "torch": ols.presets.torch,
}
# Options of the recording that are not settings of the rule.
NO_SETTING = {"apex": ["loss_scale"], "deepspeed": ["raise_error_at_min_scale"]}
SCALES = {"mindspore": ["manager_scale", "amp_scale", "cell_scale"]}
# The system's counter of finite steps, where it counts as `growth_count` does.
COUNTERS = {
    "apex": "unskipped",
    "flax": "counter",
    "jmp": "counter",
    "keras": "counter",
    "megatron": "growth_tracker",
    "mindspore": "amp_counter",
    "tf_keras": "counter",
    "torch": "counter",
}


def read(name):
    return json.loads((DATA / f"{name}.json").read_text())


def assert_follows(system, trace):
    """Scales, and counts of finite steps, while they are usable in float32."""
    config = dict(trace["config"])
    for name in NO_SETTING.get(system, []):
        del config[name]
    states = states_after(PRESETS[system](**config), trace["finite"])
    for key in SCALES.get(system, ["scale"]):
        real = np.asarray([float(scale) for scale in trace[key]])
        inside = (real > 2.0**-126) & (real < 2.0**126)
        steps = len(real) if inside.all() else int(np.argmin(inside))
        assert steps >= 5
        ours = np.asarray(states.loss_scale)[:steps]
        assert_scales_agree(ours, real[:steps], config)
    if system in COUNTERS:
        count = states.rule_state.growth_count
        assert count[:steps].tolist() == trace[COUNTERS[system]][:steps]


TRACES = {system: read(f"{system}_scale")["traces"] for system in PRESETS}


def test_every_preset_follows_its_system_through_bursts_of_nonfinite_steps():
    for system, traces in TRACES.items():
        for trace in traces[3:5]:  # Bursts, and one in every second step.
            assert_follows(system, trace)


@pytest.mark.slow
@pytest.mark.parametrize("system", TRACES)
def test_the_scale_of_a_preset_follows_its_system(system):
    for trace in TRACES[system]:
        assert_follows(system, trace)


INNER = {
    "sgd": optax.sgd,
    "sgd_momentum": optax.sgd,
    # Keras's epsilon. The systems add it in different places, so results agree only to
    # about 1e-5.
    "adam": functools.partial(optax.adam, eps=1e-7),
    "adamw": optax.adamw,
}


def clipped(inner, max_norm):
    if max_norm is None:
        return inner
    return optax.chain(optax.clip_by_global_norm(max_norm), inner)


def trajectories(system):
    return [
        pytest.param(
            trajectory,
            id="-".join([str(i), trajectory["inner"], *trajectory["options"]]),
        )
        for i, trajectory in enumerate(read(f"{system}_optimizer")["trajectories"])
    ]


def arrays(lists, shapes):
    return [
        np.asarray([float(entry) for entry in entries], np.float32).reshape(shape)
        for entries, shape in zip(lists, shapes, strict=True)
    ]


class Run:
    """Replays a recorded trajectory with an optimizer of this package."""

    def __init__(self, trajectory, tx):
        self.shapes = trajectory["shapes"]
        self.grads = [arrays(grads, self.shapes) for grads in trajectory["grads"]]
        self.real = [arrays(params, self.shapes) for params in trajectory["params"]]
        self.real_scale = trajectory["scale"]
        self.tx = lenient(tx)
        first = arrays(trajectory["init_params"], self.shapes)
        self.params = [jnp.asarray(array) for array in first]
        self.opt_state = self.tx.init(self.params)
        self.update = jax.jit(self._update)

    def _update(self, grads, opt_state, params):
        grads = ols.scale(grads, opt_state)
        updates, opt_state = self.tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def step(self, grads):
        self.params, self.opt_state = self.update(grads, self.opt_state, self.params)

    def assert_params_after(self, i):
        for ours, real in zip(self.params, self.real[i], strict=True):
            np.testing.assert_allclose(ours, real, rtol=1e-5, atol=1e-5)

    def assert_scale_after(self, i):
        assert ols.get_loss_scale(self.opt_state) == self.real_scale[i]

    def steps(self):
        """Makes and checks every step; yields its number."""
        for i, grads in enumerate(self.grads):
            self.step(grads)
            self.assert_params_after(i)
            self.assert_scale_after(i)
            yield i


@pytest.mark.parametrize("trajectory", trajectories("keras"))
def test_loss_scale_optimizer_follows_keras(trajectory):
    options, kwargs = trajectory["options"], trajectory["inner_kwargs"]
    tx = ols.loss_scale_optimizer(
        INNER[trajectory["inner"]](**kwargs),
        initial_scale=trajectory["initial_scale"],
        dynamic_growth_steps=trajectory["dynamic_growth_steps"],
        learning_rate=kwargs["learning_rate"],
        **options,
    )
    run = Run(trajectory, tx)
    window = options.get("gradient_accumulation_steps", 1)
    for i in run.steps():
        state = ols.find_loss_scale_state(run.opt_state)
        finite_steps = state.step_count - state.total_notfinite
        assert finite_steps // window == trajectory["iterations"][i]
    finalized = ols.finalize_params(run.params, run.opt_state)
    if "ema" not in trajectory:
        assert finalized is run.params
        return
    real = trajectory["ema"], trajectory["finalized_params"]
    ours = ols.ema_params(run.opt_state), finalized
    for average, expected in zip(ours, real, strict=True):
        for one, other in zip(average, arrays(expected, run.shapes), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("trajectory", read("keras_schedules")["trajectories"])
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
    tx = ols.loss_scale_optimizer(
        inner,
        trajectory["initial_scale"],
        trajectory["dynamic_growth_steps"],
        **options,
    )
    run = Run(trajectory, tx)
    assert list(run.steps()) == list(range(len(run.grads)))


@pytest.mark.parametrize("trajectory", trajectories("tf_keras"))
def test_parameters_and_scale_follow_tf_keras(trajectory):
    inner = INNER[trajectory["inner"]](**trajectory["inner_kwargs"])
    inner = clipped(inner, trajectory["options"].get("global_clipnorm"))
    rule = ols.presets.tf_keras(**trajectory["config"])
    run = Run(trajectory, ols.loss_scaled(inner, rule))
    skipped = False
    for i, grads in enumerate(run.grads):
        run.step(grads)
        run.assert_scale_after(i)
        skipped |= not trajectory["finite"][i]
        # tf.keras counts an iteration on a skipped step, and Adam's bias correction
        # with it; here nothing advances.
        if trajectory["inner"] != "adam" or not skipped:
            run.assert_params_after(i)
        step_count = ols.find_loss_scale_state(run.opt_state).step_count
        assert step_count == trajectory["iterations"][i] == i + 1


def torch_inner(trajectory):
    kwargs = dict(trajectory["inner_kwargs"])
    kwargs["learning_rate"] = kwargs.pop("lr")
    inner = {"sgd": optax.sgd, "adam": optax.adam, "adamw": optax.adamw}
    inner = inner[trajectory["inner"]](**kwargs)
    return clipped(inner, trajectory["options"].get("clip_grad_norm"))


SHARED = [t for t in trajectories("torch") if "two_optimizers" in t.id]
ALONE = [t for t in trajectories("torch") if t not in SHARED]


@pytest.mark.parametrize("trajectory", ALONE)
def test_parameters_and_scale_follow_torch(trajectory):
    rule = ols.presets.torch(**trajectory["config"])
    run = Run(trajectory, ols.loss_scaled(torch_inner(trajectory), rule))
    window = trajectory["options"].get("accumulate", 1)
    total = [0.0, 0.0]
    for i, grads in enumerate(run.grads):
        # As in torch: scaled gradients are summed, and one NaN spoils the window.
        total = [part + grad / window for part, grad in zip(total, grads, strict=True)]
        if (i + 1) % window == 0:
            run.step(total)
            total = [0.0, 0.0]
        run.assert_params_after(i)
        run.assert_scale_after(i)
        rule_state = ols.find_loss_scale_state(run.opt_state).rule_state
        assert rule_state.growth_count == trajectory["growth_tracker"][i]


@pytest.mark.parametrize("trajectory", SHARED)
def test_two_optimizers_under_one_scale_follow_torch(trajectory):
    # The recipe in docs/migration/pytorch.md: each skips alone, as Optax lets it.
    rule = ols.presets.torch(**trajectory["config"])
    shared = rule.init()
    tx = lenient(optax.apply_if_finite(torch_inner(trajectory), 2**31 - 1))
    update = jax.jit(tx.update)
    run = Run(trajectory, ols.loss_scaled(tx, ols.no_loss_scale()))
    opt_states = [tx.init(param) for param in run.params]
    for i, grads in enumerate(run.grads):
        scaled = ols.scale([jnp.asarray(grad) for grad in grads], shared)
        unscaled = ols.unscale(scaled, shared)
        for j in range(2):
            updates, opt_states[j] = update(unscaled[j], opt_states[j], run.params[j])
            run.params[j] = optax.apply_updates(run.params[j], updates)
        shared = rule.adjust(shared, ols.all_finite(unscaled))
        run.assert_params_after(i)
        assert shared.loss_scale == trajectory["scale"][i]
        assert shared.rule_state.growth_count == trajectory["growth_tracker"][i]
