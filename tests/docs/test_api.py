"""The promised public names: signatures, defaults, fields, docstrings."""

import inspect
import types

import jax.numpy as jnp
import pytest

import optax_lossscale as ols

# Each name as one would write it after `def`.
SIGNATURES = {
    ols: """
adopt_inner_state(inner_state, loss_scale=None)
all_finite(tree, *, axis_name=None)
autocast(fun=None, dtype=float16, *, level="O1", high=(), recompute=True)
autocast_report(fun, *args, **kwargs)
cast_params(params, dtype=float16, *, keep=None)
dynamic_loss_scale(init_scale=2.0**15, *, growth_factor=2.0, backoff_factor=0.5,
    growth_interval=2000, min_scale=2.0**-24, max_scale=2.0**24, hysteresis=1,
    hysteresis_refill="finite")
ema_params(opt_state, *, path=None)
finalize_params(params, opt_state, *, path=None)
find_loss_scale_state(tree, *, path=None)
full_precision(fun)
get_loss_scale(tree)
headroom_loss_scale(init_scale=2.0**15, *, history=2400, recent=64, margin_bits=0.75,
    min_scale=2.0**-24, max_scale=2.0**24, dtype=float16)
loss_scale_metrics(tree, *, grads=None)
loss_scale_optimizer(inner_optimizer, initial_scale=None, dynamic_growth_steps=None, *,
    dynamic=True, weight_decay=None, weight_decay_mask=None, learning_rate=None,
    clipnorm=None, clipvalue=None, global_clipnorm=None, use_ema=False,
    ema_momentum=0.99, ema_overwrite_frequency=None, loss_scale_factor=None,
    gradient_accumulation_steps=None, axis_name=None)
loss_scaled(inner=None, loss_scale=None, *, axis_name=None, unscale_mask=None,
    check_updates=False, grads_unscaled=False)
low_precision(fun)
master_weights(inner)
max_magnitude(tree, *, axis_name=None)
no_loss_scale()
raise_if_stalled(tree, max_consecutive=50)
save_products(primitive, *avals, **params)
scale(tree, state)
scaled_backward(fun, loss_scale)
scaled_grad(fun, state, argnums=0, has_aux=False, **jax_kwargs)
scaled_value_and_grad(fun, state, argnums=0, has_aux=False, **jax_kwargs)
set_loss_scale(tree, value, *, path=None)
static_loss_scale(scale, *, skip_nonfinite=True)
unscale(tree, state, *, mask=None)
where_applied(state, new, old)
""",
    ols.presets: """
apex(init_scale=2.0**16, scale_window=2000, min_loss_scale=None, max_loss_scale=2.0**24)
deepspeed(init_scale=2.0**32, scale_window=1000, min_scale=1.0, delayed_shift=1,
    consecutive_hysteresis=False)
fairseq(init_scale=2.0**15, scale_factor=2.0, scale_window=2000, tolerance=0.0,
    threshold=None, min_loss_scale=1e-4)
flax(scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000,
    minimum_scale=float(finfo(float32).tiny))
from_torch_state_dict(state_dict)
jmp(loss_scale=2.0**15, period=2000, factor=2, min_loss_scale=1.0)
keras(initial_scale=2.0**15, dynamic_growth_steps=2000)
megatron(initial_scale=2.0**32, min_scale=1.0, growth_factor=2.0, backoff_factor=0.5,
    growth_interval=1000, hysteresis=2)
mindspore_dynamic(init_loss_scale=2.0**24, scale_factor=2, scale_window=2000)
mindspore_fixed(loss_scale=128.0, drop_overflow_update=True)
tf_keras(dynamic=True, initial_scale=None, dynamic_growth_steps=None)
to_torch_state_dict(state, *, growth_factor=2.0, backoff_factor=0.5,
    growth_interval=2000)
torch(init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000,
    enabled=True)
""",
    ols.diagnostics: """
exponent_histogram(tree, *, min_exponent=-40, max_exponent=20)
first_nonfinite(operations)
gradient_errors(fun, *args, dtype=float16, level='O1', loss_scale=1.0, argnums=0, \
reference=None)
headroom_bits(tree, *, scale=1.0, dtype=float16)
nonfinite_report(tree)
print_gradient_errors(errors, *, limit=20, file=None)
print_nonfinite_report(tree, *, file=None)
print_operation_report(operations, *, limit=20, file=None)
suggest_init_scale(tree, *, dtype=float16, margin_bits=2.0)
trace_operations(fun, *args, dtype=float16, level='O1', loss_scale=1.0, argnums=0)
underflow_fraction(tree, *, scale=1.0, dtype=float16)
""",
    ols.plotting: """
plot_exponent_histogram(histograms, *, dtype=float16, ax=None)
plot_loss_scale(history, *, init_scale=None, ax=None)
plot_operations(operations, *, dtype=float16, ax=None)
plot_training(losses, loss_scales, *, ax=None)
""",
}
# The fields of each public tuple, and the defaults of those that have one.
FIELDS = {
    ols.LossScale: "init adjust skips=True needs_grads_max=False",
    ols.LossScaleState: "loss_scale last_finite notfinite_count total_notfinite "
    "step_count rule_state",
    ols.LossScaledState: "loss_scale_state inner_state",
    ols.diagnostics.Operation: "primitive where scope is_backward dtype shape largest "
    "float32_largest nonfinite made_nonfinite cause underflow headroom_bits "
    "unscaled_headroom_bits error iteration order",
    ols.diagnostics.GradientError: "relative_error flushed nonfinite norm size",
    ols.diagnostics.ExponentHistogram: "exponents counts zero_count nonfinite_count",
}
EXPECTED = {
    (module, signature.partition("(")[0]): f"{signature})"
    for module, text in SIGNATURES.items()
    for signature in text.strip().removesuffix(")").split(")\n")
}


def parameters(function):
    """Name, kind, default and its type, of each parameter."""
    return [
        (p.name, p.kind, p.default, type(p.default))
        for p in inspect.signature(function).parameters.values()
    ]


def test_every_signature_is_as_promised():
    names = {"float16": jnp.float16, "float32": jnp.float32, "finfo": jnp.finfo}
    for (module, name), signature in EXPECTED.items():
        exec(f"def {signature}: ...", names)
        found, promised = getattr(module, name), names[name]
        assert parameters(found) == parameters(promised), signature


def test_every_public_function_can_be_read_in_help():
    for module, name in EXPECTED:
        function = getattr(module, name)
        assert ">>> " in inspect.getdoc(function), name
        assert inspect.getdoc(function).count("Guide: ") == 1, name
        # Expanded type aliases once made a signature of 917 characters.
        signature = inspect.signature(function)
        assert "jaxlib" not in str(signature), name
        assert all(len(str(x)) <= 80 for x in signature.parameters.values()), name


@pytest.mark.parametrize("module", SIGNATURES)
def test_no_other_function_is_public(module):
    promised = {name for owner, name in EXPECTED if owner is module}
    public = {name for name in dir(module) if not name.startswith("_")}
    if module in (ols, ols.presets):
        assert module.__all__ == sorted(module.__all__)
        public = {*module.__all__}
    of_module = {
        name
        for name in public
        if isinstance(value := getattr(module, name), types.FunctionType)
        and value.__module__.startswith("optax_lossscale")
    }
    assert of_module == promised


@pytest.mark.parametrize("kind", FIELDS)
def test_the_fields_of_tuples_and_their_defaults_are_as_promised(kind):
    defaults = kind._field_defaults
    written = [f"{x}={defaults[x]}" if x in defaults else x for x in kind._fields]
    assert " ".join(written) == FIELDS[kind]
