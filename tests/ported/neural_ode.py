"""An ordinary differential equation with a network as its right side, in Equinox.

The public program is Diffrax's `examples/neural_ode.ipynb` in patrick-kidger/diffrax.
As there, a network of Equinox is fitted to trajectories of a nonlinear oscillator, by
an adaptive Runge-Kutta method of order 5 that saves the solution at given times, and
AdaBelief. Here the trajectories are shorter, so it fits them as a whole from the start.

Two settings matter in float16. With `throw=False`, a solution that is not finite makes
the loss infinite, and the step is skipped; by default Diffrax raises an error. And the
relative tolerance, 1e-3 as there, must be above float16's rounding error of 2**-11: at
a smaller one, the solver sees rounding as its own error and takes many more steps.
"""

import functools

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

TIMES = jnp.linspace(0.0, 3.0, 31)
WIDTH, BATCH, STEPS = 32, 16, 120
FALLS_TO = 0.25
LOW_SHARE = 0.4  # Diffrax asks for the highest precision in its own products.
OPTIMIZER = optax.adabelief(1e-2)


class Field(eqx.Module):
    """The right side f in dy/dt = f(y)."""

    network: eqx.nn.MLP

    def __init__(self, key):
        self.network = eqx.nn.MLP(2, 2, WIDTH, 2, jax.nn.softplus, key=key)

    def __call__(self, time, y, args):
        return self.network(y)


def solve(field, y0):
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        diffrax.Tsit5(),
        t0=TIMES[0],
        t1=TIMES[-1],
        dt0=TIMES[1] - TIMES[0],
        y0=y0,
        saveat=diffrax.SaveAt(ts=TIMES),
        stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-6),
        max_steps=64,
        throw=False,
    )
    return solution.ys


def oscillator(time, y, args):
    x = y / (1 + y)
    return jnp.stack([x[1], -x[0]])


@functools.cache
def trajectories():
    starts = jax.random.uniform(jax.random.key(0), (256, 2), minval=-0.6, maxval=1.0)
    return np.asarray(jax.jit(jax.vmap(functools.partial(solve, oscillator)))(starts))


def init(key):
    return eqx.filter(Field(key), eqx.is_array)


def loss_fn(params, key, batch):
    static = eqx.filter(Field(jax.random.key(0)), eqx.is_array, inverse=True)
    field = eqx.combine(params, static)
    solutions = jax.vmap(solve, in_axes=(None, 0))(field, batch[:, 0])
    return jnp.mean((solutions - batch) ** 2)


def batches(seed):
    rng = np.random.default_rng(seed)
    rows = [rng.choice(256, BATCH, replace=False) for _ in range(STEPS)]
    return [trajectories()[row] for row in rows]
