"""How many steps adaptive ODE solvers take under autocast. Install diffrax."""

from functools import partial

import diffrax
import jax
import jax.numpy as jnp
from jax.experimental import ode

import optax_lossscale as ols

calls = []


def field(t, y, weights):
    jax.debug.callback(lambda: calls.append("a call"))
    return weights[1] @ jnp.tanh(weights[0] @ y)


def by_diffrax(tolerance, field, weights):
    return diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        diffrax.Tsit5(),
        t0=0,
        t1=1,
        dt0=None,
        y0=y0,
        args=weights,
        stepsize_controller=diffrax.PIDController(rtol=tolerance, atol=tolerance),
    ).ys


def by_odeint(tolerance, field, weights):
    def swapped(y, t, weights):
        return field(t, y, weights)

    times = jnp.array([0.0, 1.0])
    return ode.odeint(swapped, y0, times, weights, rtol=tolerance, atol=tolerance)


def steps(solve):
    calls.clear()
    jax.block_until_ready(jax.jit(solve)(weights))
    jax.effects_barrier()
    return len(calls) // 6  # Both methods call the field six times in a step.


y0 = jnp.linspace(-1, 1, 64)
keys = jax.random.split(jax.random.key(0), 2)
weights = [jax.random.normal(key, (64, 64)) / 8 for key in keys]
default = 1.4e-8  # Of odeint.
for by, tolerance in ((by_diffrax, 1e-3), (by_diffrax, 1e-5), (by_odeint, default)):
    counts = [
        steps(partial(by, tolerance, field)),
        steps(ols.autocast(partial(by, tolerance, field))),
        steps(ols.autocast(partial(by, tolerance, ols.full_precision(field)))),
    ]
    text = "{} at {}: {} steps in float32, {} under autocast, {} with full_precision"
    print(text.format(by.__name__, tolerance, *counts))
# by_diffrax at 0.001: 3 steps in float32, 6 under autocast, 3 with full_precision
# by_diffrax at 1e-05: 5 steps in float32, 22 under autocast, 5 with full_precision
# by_odeint at 1.4e-08: 9 steps in float32, 471 under autocast, 9 with full_precision
