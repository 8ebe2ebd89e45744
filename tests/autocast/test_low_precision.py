"""`low_precision` casts the inputs of a function before it is traced."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import export, lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType, PartitionSpec

import optax_lossscale as ols
from helpers.compat import enable_x64
from helpers.programs import dtypes_of, equations_of
from helpers.under_autocast import HALF, W, X, assert_close

HALVES = (jnp.float16, jnp.bfloat16)


def kernel(x):
    """Doubles what is not float32, as a fused kernel that refuses float32 would."""
    if x.dtype == jnp.float32:
        raise TypeError("this kernel takes no float32")
    return x + x


def double(x):
    """What the kernel does, for any dtype."""
    return x + x


low_kernel = ols.low_precision(kernel)


def casts_of(fun, *args):
    """The dtypes from and to which a traced function casts arrays of two axes."""
    program = jax.make_jaxpr(fun)(*args)
    return [
        (str(equation.invars[0].aval.dtype), str(equation.params["new_dtype"]))
        for equation in equations_of(program)
        if equation.primitive.name == "convert_element_type"
        and equation.invars[0].aval.ndim == 2
    ]


def pass_on(*args, **kwargs):
    return args, kwargs


def dtypes_inside(*args, level="O1", dtype=jnp.float16, **kwargs):
    """What a marked function gets of these arguments, and the dtypes of its arrays."""
    seen = []
    mark = ols.low_precision(lambda *args, **kwargs: seen.append((args, kwargs)))
    ols.autocast(lambda: mark(*args, **kwargs), dtype, level=level)()
    return jax.tree.map(lambda x: getattr(x, "dtype", x), seen[-1])


# What is an input.


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("dtype", HALVES)
def test_float32_inputs_are_cast_to_the_low_dtype_before_tracing(level, dtype):
    args, _ = dtypes_inside(X, level=level, dtype=dtype)
    assert args == (dtype,)
    cast = ols.autocast(lambda x: low_kernel(x), dtype, level=level)
    assert_close(cast(X), 2 * X)


def test_at_o0_and_outside_autocast_nothing_happens():
    assert dtypes_inside(X, level="O0") == ((jnp.float32,), {})
    plain, marked = jax.make_jaxpr(double)(X), jax.make_jaxpr(ols.low_precision(double))
    assert str(plain) == str(marked(X))
    with pytest.raises(TypeError, match="takes no float32"):
        low_kernel(X)
    with pytest.raises(TypeError, match="takes no float32"):
        jax.jit(low_kernel)(X)


def test_inputs_may_be_in_pytrees_and_given_by_keyword():
    args, kwargs = dtypes_inside({"a": [X, None]}, (X,), bias=X, rest={"b": X})
    assert args == ({"a": [jnp.float16, None]}, (jnp.float16,))
    assert kwargs == {"bias": jnp.float16, "rest": {"b": jnp.float16}}


def test_what_is_not_float32_passes_through():
    half, number = X.astype(jnp.bfloat16), 0.5
    settings, name = {"axis": 1, "names": {"a"}}, "same"
    args, _ = dtypes_inside(half, jnp.arange(3), X > 0, None, number, name, settings)
    assert args == (jnp.bfloat16, jnp.int32, jnp.bool_, None, number, name, settings)
    key = jax.random.key(0)
    assert dtypes_inside(key)[0] == (key.dtype,)
    with enable_x64(True):
        assert dtypes_inside(jnp.float64(1))[0] == (jnp.float64,)


def test_an_argument_without_float32_stays_the_same_object():
    settings = ["same"]

    def fun(x, given):
        assert given is settings
        return x

    marked = ols.low_precision(fun)
    ols.autocast(lambda x: marked(x, settings))(X)


def test_arrays_of_numpy_are_cast_and_stay_arrays_of_numpy():
    def fun(array, scalar):
        assert type(array) is np.ndarray
        assert array.dtype == scalar.dtype == np.float16
        return jnp.asarray(array * scalar)

    marked, large = ols.low_precision(fun), np.float32([1e9, -1e9, np.inf, 1.0])
    result = ols.autocast(lambda: marked(large, np.float32(0.5)))()
    # Finite numbers beyond the range become the largest ones, 65504.
    np.testing.assert_array_equal(result, [32752.0, -32752.0, np.inf, 0.5])


def test_what_a_function_closes_over_is_no_input():
    def outer(x, y):
        return ols.low_precision(lambda x: (x, lax.full_like(x, y.dtype.itemsize)))(x)

    _, itemsize = ols.autocast(outer)(X, X)
    assert itemsize[0, 0] == 4


# What is a result.


def test_a_result_counts_as_float32_and_the_next_product_reads_it_without_a_cast():
    def fun(x):
        y = low_kernel(x @ W)
        assert y.dtype == jnp.float32
        return y @ W

    low, wide = ("float32", "float16"), ("float16", "float32")
    # Both arguments are cast, and the result of the whole function.
    assert casts_of(ols.autocast(fun), X) == [low] * 2 + [wide]
    grad = jax.grad(lambda x: jnp.sum(fun(x)))
    assert set(dtypes_of(ols.autocast(grad), X)) == {HALF}
    # The sum reads float32, and the gradient is float32; between them nothing is.
    assert casts_of(ols.autocast(grad), X).count(wide) == 2
    assert_close(ols.autocast(grad)(X), jnp.ones((3, 4)) @ (2 * W @ W).T)


def test_results_of_other_dtypes_keep_them():
    def fun(x):
        return x, jnp.sum(x.astype(jnp.float32)), jnp.argmax(x), x > 0

    results = ols.autocast(lambda x: ols.low_precision(fun)(x))(X)
    dtypes = [result.dtype for result in results]
    assert dtypes == [jnp.float32, jnp.float32, jnp.int32, jnp.bool_]


def test_results_keep_their_dtype_if_no_input_was_cast():
    half = X.astype(jnp.float16)
    assert ols.autocast(lambda x: low_kernel(x))(half).dtype == jnp.float16


def test_the_gradient_of_a_float32_argument_is_float32_and_right():
    def loss(w, x, f):
        return jnp.mean(f(jnp.tanh(f(w) @ x.T)) ** 2)

    exact = jax.grad(loss)(W, X, double)
    marked = functools.partial(loss, f=low_kernel)
    assert_close(jax.grad(ols.autocast(marked))(W, X), exact)
    assert_close(ols.autocast(jax.grad(marked))(W, X), exact)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_masks_stay_finite(level):
    def attend(bias):
        return jax.nn.softmax(bias.astype(jnp.float32), axis=-1)

    def fun(is_masked, bias):
        computed = jnp.where(is_masked, -1e9, 0.0)
        constant = np.full((2, 3), -1e9, np.float32)
        return [ols.low_precision(attend)(x) for x in (computed, bias, constant)]

    cast = ols.autocast(fun, level=level)
    # A row that is masked as a whole is uniform, as in float32.
    for result in cast(jnp.ones((2, 3), bool), jnp.full((2, 3), -1e9)):
        np.testing.assert_allclose(result, 1 / 3, rtol=1e-3)


# JAX remembers what it has traced.


def in_scan(fun):
    def body(carry, _):  # JAX remembers a loop by its body.
        return fun(carry), None

    return lambda x: lax.scan(body, x, length=1)[0]


REMEMBERED = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": in_scan,
    "cond": lambda f: lambda x: lax.cond(True, f, f, x),
    "jit of jit": lambda f: jax.jit(jax.jit(f)),
    "nnx.jit": nnx.jit,
}


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("name", REMEMBERED)
def test_a_trace_made_outside_autocast_is_not_used_inside_nor_the_reverse(
    name, is_first
):
    seen = []

    @ols.low_precision
    def fun(x):
        seen.append(x.dtype)
        return x * 2.0

    wrapped = REMEMBERED[name](fun)
    calls = {
        jnp.float32: wrapped,
        jnp.float16: ols.autocast(lambda x: wrapped(x)),
        jnp.bfloat16: ols.autocast(lambda x: wrapped(x), jnp.bfloat16),
    }
    for dtype in list(calls)[:: 1 if is_first else -1]:
        seen.clear()
        assert_close(calls[dtype](X), 2 * X)
        assert set(seen) == {jnp.dtype(dtype)}


def test_a_jitted_function_is_traced_once_for_each_dtype():
    seen = []

    @jax.jit
    @ols.low_precision
    def fun(x):
        seen.append(x.dtype)
        return x * 2

    for _ in range(3):
        ols.autocast(lambda x: fun(fun(x)))(X)
        fun(X)
    assert seen == [jnp.float16, jnp.float32]


def test_calls_outside_jit_are_compiled_once():
    seen = []

    @ols.autocast
    def fun(x):
        return low_kernel(x)

    @ols.low_precision
    def counted(x):
        seen.append(x.dtype)
        return x

    for _ in range(3):
        assert_close(fun(X), 2 * X)
    counting = ols.autocast(counted, jnp.bfloat16)
    assert_close(counting(X), X)
    assert_close(ols.autocast(counted)(X), X)
    assert set(seen) == set(map(jnp.dtype, HALVES))


# Other transformations.


def with_vjp(fun, fwd, bwd):
    fun = jax.custom_vjp(fun)
    fun.defvjp(fwd, bwd)
    return fun


def with_jvp(fun, rule):
    fun = jax.custom_jvp(fun)
    fun.defjvp(rule)
    return fun


def in_shard_map(fun):
    def sharded(x):
        mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
        spec = PartitionSpec("i")
        return jax.shard_map(fun, mesh=mesh, in_specs=spec, out_specs=spec)(x[:2])

    return sharded


def ways_to_call(kernel, low):
    """Functions that call a kernel; `low` marks a function."""
    called = low(kernel)
    own = with_vjp(kernel, lambda x: (kernel(x), None), lambda _, ct: (kernel(ct),))
    return {
        "jit inside": low(jax.jit(kernel)),
        "checkpoint inside": low(jax.checkpoint(kernel)),
        "checkpoint": jax.checkpoint(called),
        "custom_vjp inside": low(own),
        "jit of custom_vjp inside": jax.jit(low(own)),
        "custom_vjp": with_vjp(
            called, lambda x: (called(x), None), lambda _, ct: (called(ct),)
        ),
        "custom_jvp": with_jvp(
            lambda x: called(x) @ W, lambda x, t: (called(*x) @ W, called(*t) @ W)
        ),
        "scan inside": low(lambda x: lax.map(kernel, x)),
        "scan": lambda x: lax.scan(lambda c, _: (called(c) / 2, called(c)), x, X),
        "fori_loop": lambda x: lax.fori_loop(0, 3, lambda _, x: called(x), x),
        "cond inside": low(lambda x: lax.cond(True, kernel, kernel, x)),
        "cond": lambda x: lax.cond(True, called, lambda x: x, x),
        "vmap": jax.vmap(called),
        "shard_map": in_shard_map(called),
        "shard_map inside": low(in_shard_map(kernel)),
        "grad": jax.grad(lambda x: jnp.sum(called(x) ** 2)),
        "jvp": lambda x: jax.jvp(called, (x,), (x,)),
    }


LOW_CALLS = ways_to_call(kernel, ols.low_precision)
FLOAT32_CALLS = ways_to_call(double, lambda fun: fun)


@pytest.mark.parametrize("name", LOW_CALLS)
def test_it_works_under_and_over_transformations(name):
    def loss(x, fun):
        outputs = jax.tree.leaves(fun(jnp.tanh(x)))
        return sum(jnp.mean((output @ W) ** 2) for output in outputs)

    exact = functools.partial(loss, fun=FLOAT32_CALLS[name])
    low = functools.partial(loss, fun=LOW_CALLS[name])
    cast = ols.autocast(low)
    results = [
        jax.jit(jax.value_and_grad(cast))(X),
        jax.jit(ols.autocast(jax.value_and_grad(low)))(X),
    ]
    if "shard_map" not in name:
        mapped = jax.vmap(jax.value_and_grad(jax.checkpoint(cast)))
        results.append(jax.tree.map(lambda x: x[0], jax.jit(mapped)(X[None])))
    assert_close(results, [jax.jit(jax.value_and_grad(exact))(X)] * len(results))


def test_a_program_with_it_can_be_exported():
    fun = jax.jit(jax.grad(ols.autocast(lambda x: jnp.sum(low_kernel(x) ** 2))))
    exported = export.export(fun, platforms=["cpu", "cuda"])(X)
    assert_close(exported.call(X), 8 * X)
    # JAX 0.7 knows by an attribute of operations whether autocast traces them.
    assert "frontend_attributes" not in exported.mlir_module()


# Markers inside markers.


def sums_of(fun):
    """The dtypes of the sums that a traced function computes."""
    program = jax.make_jaxpr(fun)(X)
    sums = [e for e in equations_of(program) if e.primitive.name == "add"]
    return [str(e.outvars[0].aval.dtype) for e in sums]


def test_a_marker_inside_another_does_nothing():
    marked = ols.low_precision(double)

    def in_low(x):
        # This sum is written for float32, and stays in float32.
        return marked(x.astype(jnp.float32)), ols.full_precision(double)(x)

    @ols.autocast
    def fun(x):
        x = x @ W
        return ols.full_precision(marked)(x), ols.low_precision(in_low)(x)

    assert sums_of(fun) == ["float32", "float32", "float16"]


def test_a_derivative_rule_inside_a_marker_is_left_as_written():
    @jax.custom_vjp
    def fun(x):
        return x + x

    marked = ols.low_precision(double)
    fun.defvjp(lambda x: (marked(x), None), lambda _, ct: (marked(ct),))

    def loss(x):
        return jnp.sum(ols.full_precision(fun)(x))

    for grad in (ols.autocast(jax.grad(loss)), jax.grad(ols.autocast(loss))):
        assert "f16" not in str(jax.make_jaxpr(grad)(X))


def test_autocast_inside_a_marker_or_autocast_casts_to_its_own_dtype():
    inner = ols.autocast(lambda x: low_kernel(x @ W), jnp.bfloat16)

    @ols.autocast
    def outer(x):
        return low_kernel(ols.full_precision(inner)(inner(x)) @ W)

    assert sums_of(outer) == ["bfloat16", "bfloat16", "float16"]
    assert_close(outer(X), 8 * X @ W @ W @ W, rtol=0.05)


# What it marks.


class EquinoxLayer(eqx.Module):
    w: jax.Array

    def attend(self, x):
        return kernel(x)

    @ols.low_precision
    def with_parameters(self, x):
        return kernel(x @ self.w)


class NnxLayer(nnx.Module):
    def __init__(self):
        self.w, self.count = nnx.Param(W), nnx.BatchStat(jnp.zeros(()))

    def attend(self, x):
        self.count[...] += 1
        return kernel(x)

    with_parameters = ols.low_precision(attend)


class LinenLayer(nn.Module):
    def attend(self, x):
        return kernel(x)

    with_parameters = ols.low_precision(attend)


@pytest.mark.parametrize("make", [lambda: EquinoxLayer(W), NnxLayer, LinenLayer])
def test_methods_of_modules_can_be_marked(make):
    def fun(layer, x):
        return ols.low_precision(layer.attend)(x), layer.with_parameters(x)

    layer = make()
    called, decorated = ols.autocast(fun)(layer, X)
    assert_close(called, 2 * X)
    assert_close(decorated, 2 * X @ W if isinstance(layer, EquinoxLayer) else 2 * X)
    if isinstance(layer, NnxLayer):
        assert layer.count[...] == 2  # What the method changed.
        assert layer.w[...].dtype == jnp.float32


def test_a_variable_of_nnx_is_an_input():
    layer = NnxLayer()

    def fun(x):
        return ols.low_precision(lambda x, w: x @ w[...])(x, layer.w)

    assert_close(ols.autocast(fun)(X), X @ W)


@pytest.mark.parametrize("mark", [ols.low_precision, ols.full_precision])
def test_static_and_class_methods_can_be_marked(mark):
    class Layer:
        @mark
        @staticmethod
        def static(x):
            return x

        @mark
        @classmethod
        def of_class(cls, x):
            assert cls is Layer
            return x

    assert_close(ols.autocast(lambda x: Layer.static(Layer.of_class(x)))(X), X)


def test_low_precision_refuses_what_is_not_a_function():
    with pytest.raises(TypeError, match="`fun` must be a function, got None"):
        ols.low_precision(None)


def test_a_linen_module_can_be_initialized_under_autocast():
    class Model(nn.Module):
        @ols.autocast
        @nn.compact
        def __call__(self, x):
            return low_kernel(nn.Dense(4)(x))

    variables = Model().init(jax.random.key(0), X)
    params = variables["params"]["Dense_0"]
    assert_close(Model().apply(variables, X), 2 * (X @ params["kernel"]))


def test_the_report_says_where_it_applied(capsys):
    ols.autocast_report(lambda x: low_kernel(x) @ W, X)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    by_name = {row[1]: row for row in rows}
    assert by_name["add"][2:5] == ["float16", "float16", "low_precision"]
    casts = [row for row in rows if row[1] == "convert_element_type"]
    assert [row[4] for row in casts] == ["low_precision"] * len(casts)
    assert all("test_low_precision.py" in row[5] for row in [by_name["add"], *casts])


# Kernels.


CASES = [(None, jnp.bfloat16), ("xla", jnp.float16)]


@pytest.mark.parametrize(("implementation", "dtype"), CASES)
@jax.numpy_dtype_promotion("standard")  # JAX's attention needs it.
def test_attention_of_jax_runs_with_low_operands(implementation, dtype):
    attention = functools.partial(
        jax.nn.dot_product_attention, is_causal=True, implementation=implementation
    )

    def loss(x, attention):
        q = (x @ W).reshape(1, 3, 2, 2)
        return jnp.sum(jnp.sin(attention(q, q, q).reshape(3, 4) @ W))

    exact = functools.partial(loss, attention=attention)
    low = functools.partial(loss, attention=ols.low_precision(attention))
    cast = ols.autocast(low, dtype)
    assert set(dtypes_of(cast, X)) == {(jnp.dtype(dtype).name,) * 2}
    results = [jax.jit(jax.value_and_grad(f))(X) for f in (cast, exact)]
    assert_close(*results, rtol=0.05)


def test_an_algorithm_that_a_cpu_does_not_have_is_kept_for_other_platforms():
    def product(x):
        return jnp.dot(x, x.T, precision=lax.DotAlgorithmPreset.F16_F16_F32)

    fun = jax.jit(ols.autocast(ols.low_precision(product)))
    assert_close(fun(X), X @ X.T)
    exported = export.export(fun, platforms=["cuda"])(X)
    assert "accumulation_type = f32" in exported.mlir_module()


def test_attention_of_cudnn_gets_low_operands(monkeypatch):
    module = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(module, "check_cudnn_version", lambda: 91000)
    fused = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")

    def loss(x, attention):
        q = jnp.reshape(x, (1, 8, 2, 64))
        return jnp.sum(attention(q, q, q))

    x = jnp.ones((8, 128))
    cast = ols.autocast(functools.partial(loss, attention=ols.low_precision(fused)))
    lowered = jax.jit(jax.grad(cast)).trace(x).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count("@__cudnn$fmhaSoftmax(") == 1
    assert text.count("@__cudnn$fmhaSoftmaxBackward(") == 1
    with pytest.raises(NotImplementedError, match="float32"):
        jax.eval_shape(ols.autocast(functools.partial(loss, attention=fused)), x)


def test_a_kernel_of_pallas_gets_low_operands():
    def body(x_ref, out_ref):
        assert x_ref.dtype == out_ref.dtype == jnp.float16
        out_ref[...] = x_ref[...] * 2

    @ols.low_precision
    def doubled(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(body, out_shape=shape, interpret=True)(x)

    assert_close(jax.jit(ols.autocast(lambda x: doubled(x @ W) @ W))(X), 2 * X @ W @ W)


def test_a_call_of_the_host_gets_low_operands():
    def on_host(x):
        assert x.dtype == np.float16
        return x * 2

    @ols.low_precision
    def doubled(x):
        return jax.pure_callback(on_host, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    assert_close(jax.jit(ols.autocast(lambda x: doubled(x @ W) @ W))(X), 2 * X @ W @ W)
