"""Several threads use autocast at once, each with other settings."""

import collections
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

import optax_lossscale as ols
from helpers.under_autocast import W, X
from optax_lossscale._autocast import report
from optax_lossscale.diagnostics import trace_operations

SETTINGS = [
    {"dtype": dtype, "high": high}
    for dtype in ("float16", "bfloat16")
    for high in ((), ("Net/",))
]
THREADS, ROUNDS = 8, 4


def make_loss():
    """A loss with a jitted layer and a kernel, none of which JAX has traced yet."""

    @ols.low_precision
    def kernel(x):
        return jnp.tanh(x)

    @jax.jit
    def layer(w, x):
        return kernel(x @ w)

    def loss(w, x):
        with jax.named_scope("Net"):
            return jnp.mean(layer(w, x))

    return loss


@pytest.mark.slow
def test_eight_threads_at_once_get_what_each_gets_alone(monkeypatch):
    printed = collections.defaultdict(list)
    barrier = threading.Barrier(THREADS, timeout=100)  # In case that one of them fails.

    def print_here(text):
        printed[threading.get_ident()].append(text)

    def run(losses, settings, wait):
        """All that autocast makes of some losses: programs, reports and numbers."""
        seen = []
        for loss in losses:
            wait()
            cast = ols.autocast(loss, **settings)
            seen.append(str(jax.make_jaxpr(jax.value_and_grad(cast))(W, X)))
            ols.autocast_report(cast, W, X)
            seen.append(float(cast(W, X)))
        seen += printed.pop(threading.get_ident())
        return seen, trace_operations(cast, W, X)

    monkeypatch.setattr(report, "print", print_here, raising=False)
    shared = [make_loss() for _ in range(ROUNDS)]
    with ThreadPoolExecutor(THREADS) as pool:
        threads = [
            pool.submit(run, shared, settings, barrier.wait)
            for settings in SETTINGS * (THREADS // len(SETTINGS))
        ]
    alone = [
        run([make_loss() for _ in range(ROUNDS)], settings, lambda: None)
        for settings in SETTINGS
    ]
    for i, thread in enumerate(threads):
        assert thread.result() == alone[i % len(SETTINGS)]
    assert len({str(seen) for seen, _ in alone}) == len(SETTINGS)
