"""Scripts for jmp with one changed import: the module `optax_lossscale.compat.jmp`.

Expected values are those of trajectories recorded from jmp (see data/README.md), or are
derived by hand from jmp's rule:

    finite:     c = c + 1;  if c == period: s = s * factor, c = 0
    nonfinite:  s = max(s / factor, min_loss_scale);  c = 0
"""

import dataclasses
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from helpers.compare import assert_same_bits
from helpers.compat import enable_x64
from optax_lossscale.compat import jmp

DATA = pathlib.Path(__file__).parent / "data"
TRACES = json.loads((DATA / "jmp_scale.json").read_text())["traces"]
BOTH = pytest.mark.parametrize("cls", [jmp.StaticLossScale, jmp.DynamicLossScale])


def dynamic(scale, *args, **settings):
    """A dynamic scale whose leaves are arrays, as in a loop."""
    return jmp.DynamicLossScale(jnp.float32(scale), *args, **settings)


def after(loss_scale, history):
    """The loss scale after a history of finite and nonfinite steps."""
    for finite in history:
        loss_scale = loss_scale.adjust(finite)
    return loss_scale


def scanned(loss_scale, history):
    """The last loss scale, and the scales and counters after each step."""

    def step(loss_scale, finite):
        loss_scale = loss_scale.adjust(finite)
        return loss_scale, (loss_scale.loss_scale, loss_scale.counter)

    return jax.lax.scan(step, loss_scale, jnp.asarray(history, bool))


# The rule.


@pytest.mark.parametrize("trace", TRACES, ids=range(len(TRACES)))
def test_the_dynamic_scale_follows_what_was_recorded_from_jmp(trace):
    config = dict(trace["config"])
    first = jnp.float32(config.pop("loss_scale"))
    _, (scales, counters) = scanned(
        jmp.DynamicLossScale(first, **config), trace["finite"]
    )
    real = np.asarray([float(scale) for scale in trace["scale"]])
    usable = (real > 2.0**-126) & (real < 2.0**126)  # jmp goes on to 2**127.
    steps = len(real) if usable.all() else int(np.argmin(usable))
    assert steps >= 5
    np.testing.assert_allclose(scales[:steps], real[:steps], rtol=1e-5)
    if np.frexp(config["factor"])[0] == 0.5:
        assert scales[:steps].tolist() == real[:steps].tolist()
    assert counters[:steps].tolist() == trace["counter"][:steps]


def test_a_verdict_that_is_no_scalar_is_refused_as_jmp_refuses_it():
    with pytest.raises(AssertionError, match="Expected boolean scalar"):
        dynamic(8.0).adjust(jnp.ones(2, bool))


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"factor": 1}, ValueError, "`factor` must be strictly between 1"),
        ({"period": 0}, ValueError, "`period` must be at least 1"),
        ({"period": 2.5}, TypeError, "`period` must be an integer"),
        ({"min_loss_scale": np.nan}, ValueError, "`min_loss_scale` must be positive"),
    ],
)
def test_settings_without_a_meaning_are_refused_when_the_scale_is_adjusted(
    settings, error, message
):
    with pytest.raises(error, match=message):
        dynamic(8.0, **settings).adjust(True)


# Trees.


def test_the_leaves_of_a_dynamic_scale_are_the_scale_and_the_counter():
    scale, counter = jnp.float32(8.0), jnp.int32(1)
    leaves = jax.tree.leaves_with_path(jmp.DynamicLossScale(scale, counter))
    # Checkpoints name leaves by these paths, and jmp's have no names.
    assert [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves] == [
        ("[<flat index 0>]", scale),
        ("[<flat index 1>]", counter),
    ]


@pytest.mark.parametrize(
    "loss_scale",
    [
        jmp.NoOpLossScale(),
        jmp.StaticLossScale(2),
        jmp.StaticLossScale(jnp.float32(2.0)),
        jmp.StaticLossScale(np.asarray(2.0)),
    ],
)
def test_other_loss_scales_have_no_leaves_and_pass_through_jit(loss_scale):
    # In jmp a `StaticLossScale` of an array cannot be hashed.
    assert jax.tree.leaves(loss_scale) == []
    double = jax.jit(lambda loss_scale, x: (loss_scale, loss_scale.scale(x)))
    same, scaled = double(loss_scale, jnp.ones(2))
    assert same == loss_scale
    assert scaled.tolist() == [loss_scale.loss_scale] * 2


def stacked(tree):
    return jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), tree)


def first_of(tree):
    return jax.tree.map(lambda leaf: leaf[0], tree)


REBUILD = {
    "tree.map": lambda tree: jax.tree.map(lambda leaf: leaf, tree),
    "jit": jax.jit(lambda tree: tree),
    "scan": lambda tree: scanned(tree, [True])[0],
    "vmap": lambda tree: first_of(jax.vmap(lambda tree: tree)(stacked(tree))),
    "pmap": lambda tree: first_of(jax.pmap(lambda tree: tree)(stacked(tree))),
}


@pytest.mark.slow
@pytest.mark.several_devices
@pytest.mark.parametrize(
    "floor",
    [0.1, np.float32(0.25), np.asarray(0.25), jnp.float32(0.25)],
    ids=["rounded", "scalar", "numpy", "jax"],
)
def test_the_floor_survives_when_the_tree_is_rebuilt(floor):
    # jmp's pull request 44: there the floor is 1 from then on.
    loss_scale = dynamic(1.0, min_loss_scale=floor)
    for rebuild in REBUILD.values():
        rebuilt = rebuild(loss_scale)
        assert rebuilt.min_loss_scale == np.float32(floor)
        assert jax.tree.structure(rebuilt) == jax.tree.structure(loss_scale)
    assert after(rebuilt, [False] * 4).loss_scale == np.float32(floor)


def test_a_traced_floor_is_refused():
    # jmp would silently go on with 1.
    make = jax.jit(lambda x: jmp.DynamicLossScale(jnp.float32(1.0), min_loss_scale=x))
    with pytest.raises(TypeError, match=r"`min_loss_scale` .* Give a Python number"):
        make(0.25)


@pytest.mark.parametrize(
    "leaf", [object(), None, True, 3, jax.ShapeDtypeStruct((), jnp.float32)]
)
def test_a_tree_takes_any_leaves_without_a_warning(leaf):
    # JAX puts objects, None, axes, masks and shardings in the place of arrays.
    structure = jax.tree.structure(dynamic(8.0, period=5))
    rebuilt = jax.tree.unflatten(structure, [leaf, leaf])
    assert (rebuilt.loss_scale, rebuilt.counter, rebuilt.period) == (leaf, leaf, 5)


NUMBER, NUMPY = 0, np.zeros((), np.int32)


@pytest.mark.parametrize(
    ("first", "counter", "traces"),
    [
        (2.0**15, NUMBER, 2),
        (np.asarray(2.0**15), NUMPY, 1),
        (jnp.asarray(2.0**15), NUMPY, 2),
        (jnp.float16(2.0**15), NUMPY, 1),
        (jnp.bfloat16(2.0**15), NUMPY, 1),
        (jnp.float32(2.0**15), NUMBER, 1),
    ],
    ids=["number", "numpy", "weak", "float16", "bfloat16", "float32"],
)
def test_dtypes_stay_so_that_a_step_is_traced_once(first, counter, traces):
    # A weakly typed scale becomes strong in the first step, and is traced once more.
    traced = []

    @jax.jit
    def adjust(loss_scale, finite):
        traced.append(finite)
        return loss_scale.adjust(finite)

    loss_scale = jmp.DynamicLossScale(first, counter, period=2)
    for finite in [True, False, True]:
        loss_scale = adjust(loss_scale, jnp.bool_(finite))
        assert loss_scale.loss_scale.dtype == jnp.asarray(first).dtype
        assert not loss_scale.loss_scale.weak_type
        assert loss_scale.counter.dtype == jnp.int32
    assert len(traced) == traces
    assert loss_scale.loss_scale == 2.0**14


@pytest.mark.slow
def test_a_scale_with_an_axis_of_devices_is_adjusted_outside_pmap_too():
    loss_scale = stacked(dynamic(8.0, jnp.int32(0), period=1))
    assert loss_scale.adjust(True).loss_scale.tolist() == [16.0, 16.0]


# Scales out of range.


def dynamic_float16(scale, **settings):
    return jmp.DynamicLossScale(jnp.float16(scale), **settings)


FLOORLESS = {"min_loss_scale": 0.0}
LAST_SCALES = {
    # jmp goes to 2**127, whose reciprocal is flushed to zero.
    "largest": (dynamic(2.0**125, period=1), [True] * 3, 2.0**126),
    "smallest": (dynamic(2.0**-124, **FLOORLESS), [False] * 5, 2.0**-126),
    "zero": (dynamic(0.0, **FLOORLESS), [False], 2.0**-126),
    "zero, floor": (dynamic(0.0, min_loss_scale=0.5), [False], 0.5),
    # jmp's issue 47: `adjust` raises a TypeError. 2**16 is infinity in float16.
    "float16, largest": (dynamic_float16(2.0**14, period=1), [True] * 3, 2.0**15),
    "float16, smallest": (
        dynamic_float16(2.0**-23, **FLOORLESS),
        [False] * 3,
        2.0**-24,
    ),
    "a restored counter beyond the period": (
        dynamic(8.0, jnp.int32(7), period=5),
        [True],
        16.0,
    ),
    "whole numbers as floats": (dynamic(8.0, period=1.0, factor=2.0), [True], 16.0),
}


@pytest.mark.parametrize(
    ("loss_scale", "history", "last"), LAST_SCALES.values(), ids=LAST_SCALES
)
def test_the_scale_stays_where_its_reciprocal_is_normal(loss_scale, history, last):
    assert after(loss_scale, history).loss_scale == last


@pytest.mark.parametrize("damaged", [np.inf, np.nan, 2.0**127])
def test_a_scale_above_the_range_comes_back(damaged):
    loss_scale = dynamic(damaged)
    assert after(loss_scale, [False]).loss_scale == 2.0**125
    assert loss_scale.to_state().loss_scale == 2.0**126


@BOTH
def test_what_was_multiplied_by_a_scale_above_the_range_is_divided_again(cls):
    # The reciprocal of 2**127 is flushed to zero.
    x = jnp.asarray([0.25, 1.0, -0.5])
    for scale in (2.0**127, np.float32(2.0**127)):
        there_and_back = lambda s, x: s.unscale(s.scale(x))  # noqa: E731
        assert_same_bits(there_and_back(cls(scale), x), x)
        assert_same_bits(jax.jit(there_and_back)(cls(scale), x), x)


# Trees of gradients.


@BOTH
def test_floating_leaves_are_multiplied_and_divided_by_the_scale(cls):
    tree = {"a": jnp.asarray([3.0, -0.5]), "b": None, "c": jnp.complex64(1 + 2j)}
    scaled = cls(jnp.float32(8.0)).scale(tree)
    assert scaled["a"].tolist() == [24.0, -4.0]
    assert (scaled["b"], scaled["c"]) == (None, 8 + 16j)
    assert_same_bits(cls(jnp.float32(8.0)).unscale(scaled), tree)


@pytest.mark.parametrize("first", [2.0**15, jnp.asarray(2.0**15)], ids=["py", "weak"])
@BOTH
def test_half_precision_neither_overflows_nor_underflows(cls, first):
    # jmp stays in float16 here: infinity, and zero.
    loss_scale = cls(first)
    scaled = loss_scale.scale(jnp.float16(3.0))
    unscaled = loss_scale.unscale(jnp.float16(2.0**-10))
    assert (scaled, scaled.dtype) == (3 * 2.0**15, jnp.float32)
    assert (unscaled, unscaled.dtype) == (2.0**-25, jnp.float32)


@pytest.mark.parametrize("method", ["scale", "unscale"])
def test_leaves_that_cannot_be_gradients_are_unchanged(method):
    tree = {
        "integer": jnp.arange(3),
        "bool": np.asarray([True]),
        "float0": np.zeros(2, jax.dtypes.float0),
        "name": "conv",
    }
    result = getattr(dynamic(8.0), method)(tree)
    assert all(result[name] is leaf for name, leaf in tree.items())


@pytest.mark.slow
def test_float64_stays_and_is_scaled_in_float64():
    with enable_x64(True):
        loss_scale = jmp.DynamicLossScale(jnp.float64(8.0), jnp.int64(0), period=1)
        x = jnp.float64(1 / 3)
        assert_same_bits(loss_scale.unscale(loss_scale.scale(x)), x)
        adjusted = loss_scale.adjust(True)
        assert_same_bits(jax.tree.leaves(adjusted), [jnp.float64(16.0), jnp.int64(0)])


def test_static_and_no_loss_scales_never_change():
    loss_scale, tree = jmp.NoOpLossScale(), {"a": jnp.ones(2)}
    assert loss_scale.scale(tree) is loss_scale.unscale(tree) is tree
    assert loss_scale.loss_scale == 1
    for loss_scale in (jmp.NoOpLossScale(), jmp.StaticLossScale(8.0)):
        assert loss_scale.adjust(False) is loss_scale


def test_select_tree_takes_one_tree_or_the_other():
    a, b = {"x": jnp.ones(2), "y": None}, {"x": jnp.zeros(2), "y": None}
    assert_same_bits(jmp.select_tree(jnp.bool_(True), a, b), a)
    assert_same_bits(jmp.select_tree(False, a, b), b)


def test_state_in_float16_stays_it_although_unscaled_gradients_are_float32():
    new = {"w": jnp.ones(2, jnp.float32), "n": jnp.int32(1)}
    old = {"w": jnp.zeros(2, jnp.float16), "n": jnp.int32(0)}
    selected = jmp.select_tree(jnp.bool_(True), new, old)
    assert_same_bits(selected, {"w": jnp.ones(2, jnp.float16), "n": jnp.int32(1)})


@pytest.mark.parametrize(
    ("pred", "new", "error", "message"),
    [
        (jnp.ones(1, bool), 2.0, AssertionError, "expected boolean scalar"),
        (jnp.int32(1), 2.0, AssertionError, "expected boolean scalar"),
        (1.0, 2.0, AssertionError, "expected boolean scalar"),
        (True, jnp.int32(1), TypeError, "dtype"),
    ],
)
def test_select_tree_refuses_a_wrong_verdict_or_dtype(pred, new, error, message):
    with pytest.raises(error, match=message):
        jmp.select_tree(pred, jnp.float32(1.0), new)


# Warnings.


@pytest.mark.parametrize("value", [1, np.int32(1), jnp.int32(1)])
def test_an_integer_scale_or_floor_warns_in_the_callers_file(value):
    with pytest.warns(UserWarning, match="type for loss_scale, got int32") as caught:
        loss_scale = jmp.DynamicLossScale(value, min_loss_scale=0.25)
    assert caught[0].filename == __file__
    adjusted = loss_scale.adjust(False).loss_scale
    assert (adjusted, adjusted.dtype) == (0.5, jnp.float32)
    with pytest.warns(UserWarning, match="floating type for min_loss_scale, got int32"):
        jmp.DynamicLossScale(8.0, min_loss_scale=value)


def test_an_object_that_stands_for_an_array_does_not_warn():
    assert jmp.DynamicLossScale(object()).period == 2000


# Policies.


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("full", "p=full,c=full,o=full"),
        ("float16", "p=f16,c=f16,o=f16"),
        ("c=f16", "p=full,c=f16,o=f16"),
        ("p=bf16", "p=bf16,c=bf16,o=bf16"),
        ("p=f16,c=bfloat16", "p=f16,c=bf16,o=bf16"),
        ("o=f32,c=f16", "p=full,c=f16,o=full"),
        ("params=float32,compute=float16,output=float64", "p=full,c=f16,o=f64"),
    ],
)
def test_a_policy_is_read_and_printed_as_jmp_does(name, printed):
    policy = jmp.get_policy(name)
    assert str(policy) == printed
    assert jmp.get_policy(printed) == policy


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("f8", "Unknown dtype 'f8'"),
        ("c=F16", "Unknown dtype 'F16'"),
        ("k=f16", "Unknown key 'k'"),
        ("p=f32, c=f16", "Unknown key ' c'"),
        ("p=f32,", "must be a list of key=dtype, got ''"),
        ("p=f32=f16", "must be a list of key=dtype, got 'p=f32=f16'"),
    ],
)
def test_a_name_that_is_no_policy_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        jmp.get_policy(name)


def test_half_is_the_dtype_of_the_device():
    half = jmp.half_dtype()
    assert half in (jnp.float16, jnp.bfloat16)
    assert jmp.get_policy("half") == jmp.Policy(half, half, half)
    assert half(2.0**15) == 2.0**15  # It can be called, as in jmp's README.


def test_policies_with_equal_dtypes_are_equal_and_hash_alike():
    a = jmp.Policy(jnp.float32, jnp.float16, np.float32)
    b = jmp.get_policy("c=f16,o=f32")
    assert a == b
    assert hash(a) == hash(b)
    assert a.with_output_dtype(jnp.float16) == jmp.get_policy("c=f16") != b
    with pytest.raises(dataclasses.FrozenInstanceError, match="param_dtype"):
        a.param_dtype = jnp.float16


def test_a_policy_with_any_dtype_can_be_printed():
    # jmp raises a KeyError.
    policy = jmp.Policy("float32", jnp.dtype(jnp.bfloat16), jnp.float8_e4m3fn)
    assert str(policy) == "p=full,c=bf16,o=float8_e4m3fn"


def test_a_policy_casts_floating_arrays_and_nothing_else():
    kept = {
        "number": 1.0,
        "scalar": np.float32(1.0),
        "integer": jnp.arange(2),
        "complex": jnp.ones(2, jnp.complex64),
        "object": object(),
        "key": jax.random.key(0),
    }
    tree = {"numpy": np.ones(2), "jax": jnp.ones(2, jnp.bfloat16), **kept}
    policy = jmp.Policy(jnp.float32, jnp.float16, jnp.bfloat16)
    for cast, dtype in [
        (policy.cast_to_param, jnp.float32),
        (policy.cast_to_compute, jnp.float16),
        (policy.cast_to_output, jnp.bfloat16),
        (jmp.cast_to_full, jnp.float32),
        (jmp.cast_to_half, jmp.half_dtype()),
    ]:
        result = cast(tree)
        assert result["numpy"].dtype == result["jax"].dtype == dtype
        assert isinstance(result["numpy"], np.ndarray)
        assert all(result[name] is leaf for name, leaf in kept.items())


# To other forms, and what is refused.


def test_static_and_no_loss_scale_are_carried_over_too():
    state = jmp.StaticLossScale(8).to_state()
    assert_same_bits(state, ols.static_loss_scale(8.0).init())
    assert jmp.StaticLossScale.from_state(state) == jmp.StaticLossScale(8.0)
    state = jmp.NoOpLossScale().to_state()
    assert_same_bits(state, ols.no_loss_scale().init())
    assert jmp.NoOpLossScale.from_state(state) == jmp.NoOpLossScale()
    with pytest.raises(ValueError, match="`state` must hold a state of no_loss_scale"):
        jmp.NoOpLossScale.from_state(ols.static_loss_scale(8.0).init())


def test_a_static_scale_that_no_rule_can_have_is_refused():
    with pytest.raises(ValueError, match="`scale` must be positive"):
        jmp.StaticLossScale(0).to_state()


@pytest.mark.slow
def test_the_module_needs_no_jmp_and_is_loaded_on_demand():
    code = (
        "import sys, optax_lossscale; "
        "assert 'optax_lossscale.compat.jmp' not in sys.modules;"
        "import optax_lossscale.compat.jmp as jmp; "
        "assert 'jmp' not in sys.modules and 'flax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_leaves_of_jmps_own_tree_make_an_object():
    rebuilt = jmp.DynamicLossScale.tree_unflatten((7, 4), (8.0, 3))
    assert (rebuilt.period, rebuilt.factor, rebuilt.min_loss_scale) == (7, 4, 1.0)


def test_a_static_scale_is_not_made_of_a_traced_state():
    state = ols.static_loss_scale(8.0).init()
    with pytest.raises(TypeError, match="`state` must hold arrays with values"):
        jax.jit(jmp.StaticLossScale.from_state)(state)
