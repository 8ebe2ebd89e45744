"""Several devices: all skip together, and they exchange nothing but the verdict."""

import contextlib
import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from helpers.compare import assert_same_bits, types
from helpers.compiled import collectives_of
from helpers.inner import adam, lenient
from helpers.programs import equations_of
from optax_lossscale.compat.flax import DynamicScale

pytestmark = pytest.mark.several_devices

AXIS_TYPES = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
CHECK_VMA = pytest.mark.parametrize("check_vma", [True, False])

SCALE = 2.0**10
RULE = ols.dynamic_loss_scale(SCALE)
PARAMS = {"w": jnp.linspace(-1.0, 1.0, 16).reshape(8, 2), "b": jnp.asarray([0.5, -0.0])}
BATCH = jnp.linspace(-1.0, 1.0, 64).reshape(8, 8)
BAD_BATCH = BATCH.at[5, 0].set(jnp.nan)  # One device of eight sees it.
BATCHES = [BATCH, BAD_BATCH, 2 * BATCH]
TWO_AXES = {
    "a": P("data"),
    "b": P(None, "model"),
    "c": P("data", "model"),
    "d": P(("data", "model")),
    "e": P(),
}


def make_mesh(axis_type=AxisType.Auto, shape=(8,)):
    names = ("data", "model")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(shape))


def over_devices(fun, in_specs, out_specs, *, shape=(8,), check_vma=True):
    """A function under `shard_map` and `jit`."""
    over = {"mesh": make_mesh(shape=shape), "check_vma": check_vma}
    return jax.jit(jax.shard_map(fun, in_specs=in_specs, out_specs=out_specs, **over))


def on_mesh(mesh, specs, tree):
    """A tree with the sharding of each of its parts."""
    return {
        name: jax.device_put(tree[name], NamedSharding(mesh, spec))
        for name, spec in specs.items()
    }


def matrices(mesh, specs):
    return on_mesh(mesh, specs, dict.fromkeys(specs, jnp.ones((16, 16))))


def state_specs(state, specs):
    """Moments are sharded as their parameters are; everything else is replicated."""
    return optax.tree.set(jax.tree.map(lambda _: P(), state), mu=specs, nu=specs)


def replicated(tree):
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (8, *x.shape)), tree)


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"] + params["b"][None]) ** 2)


def mean_loss(params, batch):
    return jax.lax.pmean(loss_fn(params, batch), "data")


def train_step(tx, loss=loss_fn, mean_grads=False):
    """A data-parallel step on a device's share of the batch."""

    def step(params, state, batch):
        grads = ols.scaled_grad(loss, state)(params, batch)
        grads = jax.lax.pmean(grads, "data") if mean_grads else grads
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def train(step, params, state, batches):
    for batch in batches:
        params, state = step(params, state, batch)
    return params, state


@functools.cache
def on_one_device():
    tx = ols.loss_scaled(adam(), RULE)
    return train(jax.jit(train_step(tx)), PARAMS, tx.init(PARAMS), BATCHES)


def assert_close(actual, expected):
    """Values agree up to the order in which devices are summed."""
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6),
        actual,
        expected,
    )


# --- Every way of running ---------------------------------------------------------


def test_pmap_equals_one_device_and_all_devices_skip_together():
    tx = ols.loss_scaled(adam(), RULE, axis_name="data")
    step = jax.pmap(train_step(tx, mean_grads=True), axis_name="data")
    first = replicated((PARAMS, tx.init(PARAMS)))
    params, state = train(step, *first, [batch[:, None] for batch in BATCHES])
    for device in range(8):
        ours = jax.tree.map(lambda x, d=device: x[d], (params, state))
        assert_close(ours, on_one_device())
    assert state.loss_scale_state.total_notfinite.tolist() == [1] * 8


@CHECK_VMA
def test_shard_map_equals_one_device_and_all_devices_skip_together(check_vma):
    tx = ols.loss_scaled(adam(), RULE, axis_name="data")
    # With the check, shard_map sums gradients of replicated parameters.
    loss = mean_loss if check_vma else loss_fn
    step = over_devices(
        train_step(tx, loss, mean_grads=not check_vma),
        (P(), P(), P("data")),
        P(),
        check_vma=check_vma,
    )
    params, state = train(step, PARAMS, tx.init(PARAMS), BATCHES)
    assert_close((params, state), on_one_device())
    assert state.loss_scale_state.total_notfinite == 1


@pytest.mark.slow
def test_a_tensor_parallel_shard_map_equals_one_device():
    tx = ols.loss_scaled(adam(), RULE, axis_name=("data", "model"))

    def loss(params, batch):
        out = jax.lax.psum(batch @ params["w"], "model") + params["b"][None]
        return jax.lax.pmean(jnp.mean(out**2), "data")

    state = tx.init(PARAMS)
    specs = {"w": P("model"), "b": P()}  # Rows of the matrix by device.
    specs = specs, state_specs(state, specs)
    in_specs = (*specs, P("data", "model"))
    step = over_devices(train_step(tx, loss), in_specs, specs, shape=(4, 2))
    assert_close(train(step, PARAMS, state, BATCHES), on_one_device())


@pytest.mark.slow
def test_fully_sharded_parameters_and_moments_equal_one_device():
    mesh = make_mesh()
    tx = ols.loss_scaled(adam(), RULE)
    specs = {"w": P("data"), "b": P()}
    params = on_mesh(mesh, specs, jax.tree.map(jnp.copy, PARAMS))
    specs = state_specs(jax.eval_shape(tx.init, params), specs)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    state = jax.jit(tx.init, out_shardings=shardings)(params)
    step = jax.jit(train_step(tx), donate_argnums=(0, 1))
    batches = [jax.device_put(x, NamedSharding(mesh, P("data"))) for x in BATCHES]
    params, state = train(step, params, state, batches)
    assert_close((params, state), on_one_device())
    assert step._cache_size() == 1
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == shardings
    assert len(state.inner_state[0].mu["w"].sharding.device_set) == 8


@AXIS_TYPES
def test_under_sharded_jit_all_devices_skip_and_every_type_is_kept(axis_type):
    mesh = make_mesh(axis_type)
    tx = ols.loss_scaled(adam(), RULE)
    update = jax.jit(tx.update)
    with jax.set_mesh(mesh):
        params = on_mesh(mesh, {"w": P("data"), "b": P()}, PARAMS)
        state = jax.jit(tx.init)(params)
        good = jax.tree.map(lambda p: p * SCALE, params)
        _, after = update(good, state, params)
        assert types(after) == types(state)
        poisoned = np.asarray(good["w"]).copy()
        poisoned[5, 0] = np.nan  # On one device of eight.
        bad = {**good, "w": jax.device_put(poisoned, good["w"].sharding)}
        # The first step can be skipped, with a state that was made eagerly.
        for before in (after, tx.init(params)):
            updates, skipped = update(bad, before, params)
            assert_same_bits(optax.apply_updates(params, updates), params)
            assert_same_bits(skipped.inner_state, before.inner_state)
            assert skipped.loss_scale_state.total_notfinite == 1
            assert types(skipped) == types(state)
            assert skipped.loss_scale_state.loss_scale.sharding.is_fully_replicated


MICRO_BATCHES = jnp.stack([BATCH, BAD_BATCH, 2 * BATCH, -BATCH, 0.5 * BATCH])


def accumulate(tx, mean_grads=False):
    """Micro-steps under `lax.scan`, as a pipeline has them."""
    step = train_step(tx, mean_grads=mean_grads)

    def run(params, state, batches):
        def micro_step(carry, batch):
            return step(*carry, batch), None

        return jax.lax.scan(micro_step, (params, state), batches)[0]

    return run


@pytest.mark.slow
def test_accumulation_under_scan_drops_a_bad_micro_batch_on_all_devices():
    def make(axis_name):
        inner = optax.MultiSteps(optax.adam(0.1), 2)
        return lenient(ols.loss_scaled(inner, RULE, axis_name=axis_name))

    alone, split = make(None), P(None, "data")
    first = PARAMS, alone.init(PARAMS)
    expected, _ = accumulate(alone)(*first, jnp.delete(MICRO_BATCHES, 1, axis=0))
    run = accumulate(make("data"), mean_grads=True)
    run = over_devices(run, (P(), P(), split), P(), check_vma=False)
    params, state = run(*first, MICRO_BATCHES)
    assert_close(params, expected)
    assert state.loss_scale_state.total_notfinite == 1
    assert optax.tree.get(state, "gradient_step") == 2


@pytest.mark.slow
def test_the_update_can_be_lowered_for_every_accelerator():
    platforms = ("tpu", "cuda", "rocm")
    tx = ols.loss_scaled(adam(), RULE)
    export = jax.export.export(jax.jit(tx.update), platforms=platforms)
    assert export(PARAMS, tx.init(PARAMS), PARAMS).platforms == platforms
    mesh = make_mesh(AxisType.Explicit, (4, 2))
    params = matrices(mesh, TWO_AXES)
    with jax.set_mesh(mesh):
        state = jax.jit(tx.init)(params)
        assert export(params, state, params).nr_devices == 8


# --- What devices exchange --------------------------------------------------------


def collectives(function, *args):
    return collectives_of(jax.jit(function).lower(*args).compile())


BY_COLUMNS = {"a": P("data"), "b": P(None, "data"), "c": P("data"), "d": P()}
BY_MAXIMUM = ols.headroom_loss_scale(SCALE)


@pytest.mark.parametrize(
    ("axis_type", "specs", "rule", "scalar", "most"),
    [
        (None, BY_COLUMNS, RULE, "pred[]", 1),  # The mesh is not set.
        (AxisType.Auto, BY_COLUMNS, RULE, "pred[]", 1),
        (AxisType.Auto, BY_COLUMNS, BY_MAXIMUM, "f32[]", 1),
        (AxisType.Explicit, BY_COLUMNS, BY_MAXIMUM, "f32[]", 1),
        # XLA cannot merge reductions over different devices, and while tracing the
        # shardings are unknown. Still only scalars cross, and nothing is gathered.
        (AxisType.Auto, TWO_AXES, RULE, "pred[]", 3),
    ],
)
def test_the_check_needs_few_collectives_that_carry_only_scalars(
    axis_type, specs, rule, scalar, most
):
    mesh = make_mesh(axis_type or AxisType.Auto, (4, 2))
    params = matrices(mesh, specs)
    tx = ols.loss_scaled(adam(), rule)
    with jax.set_mesh(mesh) if axis_type else contextlib.nullcontext():
        # XLA packs the leaves' scalars into one operation.
        found = collectives(tx.update, params, jax.jit(tx.init)(params), params)
    assert 1 <= len(found) <= most
    for result, kind in found:
        assert kind == "all-reduce"
        assert set(result) == {scalar}


@pytest.mark.slow
@pytest.mark.parametrize("specs", [TWO_AXES, {"a": P("data"), "c": P(None, "model")}])
def test_on_an_explicit_mesh_the_check_needs_one_collective_for_any_axes(specs):
    mesh = make_mesh(AxisType.Explicit, (4, 2))
    params = matrices(mesh, specs)
    tx = ols.loss_scaled(adam(), RULE)
    with jax.set_mesh(mesh):
        state = jax.jit(tx.init)(params)
        update = jax.jit(tx.update)
        found = collectives_of(update.lower(params, state, params).compile())
        _, after = update(params, state, params)
        bad = {**params, "c": params["c"] * jnp.nan}
        _, skipped = update(bad, state, params)
    assert found == [(["pred[]"], "all-reduce")]
    assert types(after) == types(skipped) == types(state)
    assert after.loss_scale_state.last_finite
    assert not skipped.loss_scale_state.last_finite


def test_the_check_leaves_an_automatic_axis_beside_explicit_ones_alone():
    names, types = ("data", "model", "pipe"), (*[AxisType.Explicit] * 2, AxisType.Auto)
    mesh = jax.make_mesh((2, 2, 2), names, axis_types=types)
    params = matrices(mesh, {"a": P("data"), "b": P("model")})
    program = jax.make_jaxpr(ols.all_finite)(params)
    (mapped,) = (
        equation.params
        for equation in equations_of(program)
        if equation.primitive.name == "shard_map"
    )
    name = "newly_manual_axes" if "newly_manual_axes" in mapped else "manual_axes"
    assert set(mapped[name]) == {"data", "model"}


def test_in_shard_map_the_largest_magnitude_may_vary_over_one_axis_of_two():
    tx = ols.loss_scaled(adam(), BY_MAXIMUM, axis_name=("data", "model"))
    spec = {"c": P(None, "model")}
    params = {"c": jnp.ones((4, 4))}
    state = tx.init(params)
    specs = spec, state_specs(state, spec)
    step = over_devices(tx.update, (*specs, spec), specs, shape=(4, 2))
    for value, finite in ((1.0, True), (jnp.nan, False)):
        grads = {"c": params["c"].at[0, 3].set(value)}
        _, after = step(grads, state, params)
        assert after.loss_scale_state.last_finite == finite


@AXIS_TYPES
def test_the_norm_of_sharded_gradients_gathers_nothing(axis_type):
    mesh = make_mesh(axis_type)
    params = matrices(mesh, {"b": P(None, "data")})
    state = ols.loss_scaled(adam(), RULE).init(PARAMS)
    norm = lambda grads: ols.loss_scale_metrics(state, grads=grads)  # noqa: E731
    found = collectives(norm, params)
    assert {(*result, kind) for result, kind in found} == {("f32[]", "all-reduce")}


def test_on_an_explicit_mesh_a_constant_changes_no_collective():
    mesh = make_mesh(AxisType.Explicit, (4, 2))
    params = matrices(mesh, TWO_AXES)
    for constant in (np.ones(3, np.float32), jnp.ones(3)):
        check = functools.partial(lambda c, p: ols.all_finite([c, p]), constant)
        assert collectives(check, params) == [(["pred[]"], "all-reduce")]


@pytest.mark.parametrize("axes", [("data", "model"), ("model", "data")])
def test_on_an_explicit_mesh_every_process_names_the_axes_in_one_order(axes):
    """That of the arrays. A set of names has another order in each process."""
    params = matrices(make_mesh(AxisType.Explicit, (4, 2)), {"a": P(*axes)})
    program = jax.make_jaxpr(ols.all_finite)(params)
    (reduce,) = (
        equation.params["axes"]
        for equation in equations_of(program)
        if equation.primitive.name == "pmin"
    )
    assert reduce == axes


@pytest.mark.parametrize(
    ("axis_name", "check_vma", "check_updates"),
    [
        ("data", True, False),
        (("data", "model"), True, True),
        (["data", "model"], False, False),
    ],
)
def test_in_shard_map_each_check_needs_one_collective(
    axis_name, check_vma, check_updates
):
    specs = TWO_AXES if axis_name != "data" else dict.fromkeys(TWO_AXES, P())
    params = matrices(make_mesh(shape=(4, 2)), specs)
    tx = ols.loss_scaled(adam(), RULE, axis_name=axis_name, check_updates=check_updates)
    state = tx.init(params)
    specs = specs, state_specs(state, specs)
    update = over_devices(
        tx.update, (*specs, specs[0]), specs, shape=(4, 2), check_vma=check_vma
    )
    found = collectives(update, params, state, params)
    assert found.count((["pred[]"], "all-reduce")) == 1 + check_updates


@CHECK_VMA
def test_in_shard_map_the_largest_magnitude_needs_one_collective(check_vma):
    tx = ols.loss_scaled(adam(), ols.headroom_loss_scale(), axis_name="data")
    update = over_devices(tx.update, P(), P(), check_vma=check_vma)
    found = collectives(update, PARAMS, tx.init(PARAMS), PARAMS)
    assert found == [(["f32[]"], "all-reduce")]


@CHECK_VMA
def test_in_shard_map_grads_finite_needs_no_collective_of_its_own(check_vma):
    tx = ols.loss_scaled(adam(), RULE, axis_name="data")
    state, losses = tx.init(PARAMS), jnp.ones(8)

    def update(grads, state, losses):
        return tx.update(grads, state, grads, grads_finite=losses[0] < 3.0)

    update = over_devices(update, (P(), P(), P("data")), P(), check_vma=check_vma)
    assert collectives(update, PARAMS, state, losses) == [(["pred[]"], "all-reduce")]


def test_on_an_explicit_mesh_leaves_of_one_shape_are_reduced_together():
    mesh = make_mesh(AxisType.Explicit, (4, 2))
    sharding = NamedSharding(mesh, P("data", "model"))
    leaves = [jax.device_put(jnp.ones((1024, 200)), sharding)] * 12
    text = jax.jit(lambda leaves: ols.all_finite(leaves)).lower(leaves).as_text()
    assert text.count("stablehlo.reduce(") == 2  # Of the entries, and of 12 scalars.


@CHECK_VMA
def test_in_shard_map_statistics_of_a_skipped_step_are_kept(check_vma):
    tx = ols.loss_scaled(optax.sgd(0.1), RULE, axis_name="data")

    def step(grad, means, old_means):
        _, state = tx.update(grad, tx.init(grad))
        return ols.where_applied(state, {"mean": means}, {"mean": old_means})

    step = over_devices(step, P("data"), P("data"), check_vma=check_vma)
    new, old = jnp.ones((8, 3)), jnp.zeros((8, 3))
    kept = step(jnp.ones(8), new, old)["mean"]
    assert_same_bits(np.asarray(kept), np.asarray(new))
    kept = step(jnp.ones(8).at[5].set(jnp.nan), new, old)["mean"]
    assert_same_bits(np.asarray(kept), np.asarray(old))


@CHECK_VMA
def test_in_shard_map_a_nan_on_one_device_makes_all_devices_of_two_axes_skip(check_vma):
    # A device sees only its shard, so the verdict must span both axes.
    over = {"shape": (4, 2), "check_vma": check_vma}
    params, spec = {"c": jnp.ones((16, 16))}, {"c": P("data", "model")}
    tx = ols.loss_scaled(adam(), RULE, axis_name=("data", "model"))
    state = tx.init(params)
    specs = spec, state_specs(state, spec)
    step = over_devices(tx.update, (*specs, spec), specs, **over)
    # `optax.apply_if_finite` fails if gradients and parameters differ in dtype.
    grads = {"c": params["c"].astype(jnp.float16)}
    bad = {"c": grads["c"].at[15, 15].set(jnp.nan)}  # Only on the last device.
    updates, skipped = step(bad, state, params)
    assert not updates["c"].any()
    assert_same_bits(skipped.inner_state, state.inner_state)
    updates, after = step(grads, state, params)
    assert updates["c"].all()
    assert types((updates, after)) == types((params, state))


@CHECK_VMA
@pytest.mark.parametrize(
    ("rule", "verdict"),
    [
        (RULE, "accept"),
        (RULE, "grads_finite"),
        (ols.headroom_loss_scale(), "accept"),
        (ols.headroom_loss_scale(), "grads_finite"),
        (ols.static_loss_scale(SCALE, skip_nonfinite=False), "accept"),
        (ols.no_loss_scale(), "accept"),
    ],
    ids=lambda each: repr(each).split("(")[0],
)
def test_in_shard_map_a_verdict_of_one_row_of_devices_is_that_of_all_devices(
    rule, verdict, check_vma
):
    tx = ols.loss_scaled(adam(), rule, axis_name=["data", "model"])
    state = tx.init(PARAMS)

    def step(params, state, losses):
        return tx.update(params, state, params, **{verdict: losses[0] < 3.0})

    step = over_devices(
        step, (P(), P(), P("data")), P(), shape=(4, 2), check_vma=check_vma
    )
    for losses, total in (([1.0, 2.0, 3.0, 1.0], 1), ([1.0] * 4, 0)):
        _, after = step(PARAMS, state, jnp.asarray(losses))
        assert after.loss_scale_state.total_notfinite == total


@CHECK_VMA
@pytest.mark.parametrize("spec", [P("data"), P()])
def test_the_verdict_is_the_same_for_varying_and_invariant_gradients(spec, check_vma):
    # A psum of an invariant flag would count the flag eight times.
    check = functools.partial(ols.all_finite, axis_name="data")
    finite = over_devices(check, spec, P(), check_vma=check_vma)
    assert finite(jnp.ones(8))
    assert not finite(jnp.ones(8).at[3].set(jnp.inf))
    assert not finite(jnp.ones(8).at[3].set(jnp.nan))


def test_an_empty_tuple_of_axis_names_means_no_axis():
    def verdict(grads):
        return ols.all_finite(grads, axis_name=()).reshape(1)

    grads = jnp.ones(8).at[3].set(jnp.nan)
    of_each_device = over_devices(verdict, P("data"), P("data"))(grads)
    assert of_each_device.tolist() == [True] * 3 + [False] + [True] * 4
    assert not over_devices(verdict, P(), P())(grads)


def test_an_unbound_axis_name_raises_the_error_of_jax_with_a_hint():
    update = ols.loss_scaled(adam(), RULE, axis_name="batch").update
    state = ols.loss_scaled(adam(), RULE).init(PARAMS)
    grad_fn = DynamicScale().value_and_grad(abs, axis_name="batch")
    for function, args in ((update, (PARAMS, state, PARAMS)), (grad_fn, (2.0,))):
        with pytest.raises(NameError, match="unbound axis name: batch") as caught:
            function(*args)
        notes = "".join(caught.value.__notes__)
        assert "`axis_name` must name axes of the `pmap`" in notes


@CHECK_VMA
def test_a_misspelt_axis_name_in_shard_map_raises_an_error_with_a_hint(check_vma):
    check = functools.partial(ols.all_finite, axis_name="dta")
    with pytest.raises((NameError, AssertionError, KeyError)) as caught:
        over_devices(check, P("data"), P(), check_vma=check_vma)(jnp.ones(8))
    assert "`axis_name` must name axes" in "".join(caught.value.__notes__)


@pytest.mark.slow
def test_on_an_explicit_mesh_other_leaves_can_be_outside_the_mesh():
    mesh = make_mesh(AxisType.Explicit, (4, 2))
    params = matrices(mesh, TWO_AXES)
    trees = {"0": np.ones(3, np.float32), "1": 1.0, **params}
    assert jax.jit(ols.all_finite)(trees)  # Without `set_mesh`, too.
    with jax.set_mesh(mesh):
        assert jax.jit(ols.all_finite)(trees)
        assert not jax.jit(ols.all_finite)({**trees, "1": np.nan})
        assert jax.jit(ols.max_magnitude)(params) == 1.0
        # A step whose rule needs max_magnitude can be differentiated; the gradient of
        # max_magnitude is zero.
        largest = jax.grad(lambda c: ols.max_magnitude({**params, "c": c}))
        assert not jax.jit(largest)(params["c"]).any()
        # Nor is the mesh that of the first leaf.
        largest = jax.grad(lambda c: ols.max_magnitude({**trees, "c": c}))
        assert not jax.jit(largest)(params["c"]).any()


@pytest.mark.slow
def test_on_an_explicit_mesh_state_and_gradients_can_be_sharded_differently():
    mesh = make_mesh(AxisType.Explicit)
    params = matrices(mesh, {"a": P()})
    tx = ols.loss_scaled(adam(), RULE)
    with jax.set_mesh(mesh):
        state = jax.jit(tx.init)(params)
        grads = jax.device_put(params, NamedSharding(mesh, P("data")))
        bare = jax.jit(adam().update)(grads, state.inner_state, params)[1]
        update = jax.jit(tx.update)
        for poison, finite in ((1.0, True), (jnp.nan, False)):
            _, after = update({"a": grads["a"] * poison}, state, params)
            assert types(after.inner_state) == types(bare)
            assert after.loss_scale_state.last_finite == finite


@pytest.mark.parametrize("check_updates", [True, False])
@pytest.mark.parametrize("rule", [RULE, ols.headroom_loss_scale()])
def test_the_update_never_branches_on_the_verdict_of_one_device(rule, check_updates):
    # jax #40823: under shard_map the branches of a cond diverge silently.
    tx = ols.loss_scaled(adam(), rule, check_updates=check_updates)
    update = functools.partial(tx.update, accept=jnp.asarray(True))
    program = jax.make_jaxpr(update)(PARAMS, tx.init(PARAMS), PARAMS)
    names = {equation.primitive.name for equation in equations_of(program)}
    assert "cond" not in names
    assert "select_n" in names

    def local_verdict(grad):
        return tx.update({"w": grad}, tx.init({"w": grad}))[1].loss_scale_state

    with pytest.raises(ValueError, match="out_specs"):
        over_devices(local_verdict, P("data"), P())(jnp.ones(8))


@CHECK_VMA
@pytest.mark.parametrize(("axis_name", "spec"), [(None, P("data")), ("data", P())])
def test_in_shard_map_a_stall_is_warned_of(axis_name, spec, check_vma):
    tx = ols.loss_scaled(optax.sgd(0.1), RULE, warn_after=1, axis_name=axis_name)

    def scales(grad):
        _, state = tx.update(grad, tx.init(grad))
        return ols.get_loss_scale(state)[None]

    step = over_devices(scales, P("data"), spec, check_vma=check_vma)
    with pytest.warns(RuntimeWarning, match="the last 1 steps were skipped"):
        after = step(jnp.ones(8).at[3].set(jnp.nan)).tolist()
    own = [SCALE] * 3 + [SCALE / 2] + [SCALE] * 4
    assert after == (own if axis_name is None else [SCALE / 2])


def test_a_stall_is_warned_of_on_any_device():
    tx = ols.loss_scaled(optax.sgd(0.1), RULE, warn_after=1)
    grad = jax.device_put(jnp.full(2, jnp.nan), jax.devices()[1])
    with pytest.warns(RuntimeWarning, match="the last 1 steps were skipped"):
        jax.block_until_ready(jax.jit(lambda g: tx.update(g, tx.init(g)))(grad))


def test_a_state_whose_scale_was_set_goes_to_the_devices_of_the_parameters():
    tx = ols.loss_scaled(adam(), RULE)
    params = jax.device_put(PARAMS, jax.devices()[1])
    state = ols.set_loss_scale(tx.init(PARAMS), 8.0)
    updates, _ = jax.jit(tx.update)(params, state, params)
    assert updates["w"].devices() == {jax.devices()[1]}


@pytest.mark.parametrize(("inner", "sign"), [(None, 1), (optax.sgd(1.0), -1)])
def test_gradients_are_never_reduced_over_devices(inner, sign):
    # flax's DynamicScale(axis_name=...) gives N times the gradient under check_vma.
    tx = ols.loss_scaled(inner, RULE, axis_name="data")

    def update(grads):
        return tx.update(grads, tx.init(grads))[0]

    grads = jnp.arange(24.0)
    updates = over_devices(update, P("data"), P("data"))(grads * SCALE)
    assert_same_bits(updates, sign * grads)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_a_float16_mean_over_devices_can_overflow_and_a_float32_mean_does_not(dtype):
    # The gradients are finite on every device, but their float16 sum is infinite. So
    # the check comes after the reduction; a reduction in float32 does not overflow.
    tx = ols.loss_scaled(None, RULE, axis_name="data")

    def step(grads):
        grads = jax.lax.pmean(grads.astype(dtype), "data")
        return tx.update(grads, tx.init(grads))[1].loss_scale_state.last_finite

    grads = jnp.full(8, 60000.0, jnp.float16)
    is_finite = over_devices(step, P("data"), P())(grads)
    assert is_finite == (dtype == jnp.float32)


# --- Rules that need the largest magnitude ----------------------------------------


@AXIS_TYPES
def test_the_headroom_rule_sees_a_nan_on_any_shard(axis_type):
    # XLA's maximum over devices drops a NaN.
    mesh = make_mesh(axis_type)
    tx = ols.loss_scaled(adam(), ols.headroom_loss_scale())
    update = jax.jit(tx.update)
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P("data"))
        params = jax.device_put(jnp.ones((8, 2)), sharding)
        state = tx.init(params)
        for shard in (0, 3, 7):
            grads = np.ones((8, 2), np.float32)
            grads[shard, 1] = jnp.nan
            _, after = update(jax.device_put(grads, sharding), state, params)
            assert not ols.find_loss_scale_state(after).last_finite, shard


@pytest.mark.slow
def test_all_devices_of_pmap_have_the_same_headroom_scale():
    tx = ols.loss_scaled(adam(), ols.headroom_loss_scale(), axis_name="data")
    params = jnp.ones(2)
    update = jax.pmap(tx.update, axis_name="data", in_axes=(0, 0, None))
    for shard in (0, 3, 7):
        grads = jnp.ones((8, 2)).at[shard].set(2.0**7)
        _, after = update(grads, replicated(tx.init(params)), params)
        # The largest unscaled gradient is 2**7 / 2**15 = 2**-8, and the margin is 0.75
        # bits: 65504 * 2**-0.75 / 2**-8 is about 2**23.25.
        assert set(after.loss_scale_state.loss_scale.tolist()) == {2.0**23}
        _, after = update(grads.at[shard, 0].set(jnp.nan), after, params)
        # A nonfinite step counts as a gradient twice as large, so it costs one bit.
        assert set(after.loss_scale_state.loss_scale.tolist()) == {2.0**22}
