"""Arguments that autocast refuses."""

import jax.numpy as jnp
import pytest

import optax_lossscale as ols
from helpers.under_autocast import X, dot_loss

FLOAT8 = {"dtype": jnp.float8_e4m3fn}


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"level": "O4"}, ValueError, r"`level` must be one of O0, O1, O2, O3"),
        ({"level": "02"}, ValueError, r"Did you mean 'O2'\?"),
        ({"level": "o1"}, ValueError, r"Did you mean 'O1'\?"),
        ({"dtype": jnp.int8}, TypeError, "`dtype` must be a floating dtype"),
        ({"dtype": jnp.complex64}, TypeError, "`dtype` must be a floating dtype"),
        ({"dtype": jnp.float32}, ValueError, "must be narrower than float32"),
        ({"dtype": "float64"}, ValueError, "must be narrower than float32"),
        ({"dtype": jnp.float8_e5m2}, ValueError, "must be float8_e4m3fn, float16"),
        ({"dtype": jnp.float8_e4m3fnuz}, ValueError, "must be float8_e4m3fn, float16"),
        ({"also": jnp.bfloat16}, ValueError, "`also` goes with float8 only"),
        ({**FLOAT8, "also": jnp.float32}, ValueError, "`also` must be bfloat16 or"),
        ({**FLOAT8, "also": jnp.int8}, TypeError, "`also` must be a floating dtype"),
        ({"keep": bool}, ValueError, "`keep` goes with float8 only"),
        ({**FLOAT8, "keep": "head"}, TypeError, "`keep` must be a function"),
        ({"low": ["expp"]}, ValueError, r"Did you mean 'exp'\?"),
        ({"low": ["matmul"]}, ValueError, r"Did you mean 'dot_general'\?"),
        ({"high": ["nothing_like_it"]}, ValueError, "got 'nothing_like_it'"),
        ({"low": "exp"}, TypeError, "must be a sequence of names"),
        ({"low": None}, TypeError, "must be a sequence of names"),
        ({"low": ["scan"]}, ValueError, "names of JAX primitives, got 'scan'"),
        ({"dtype": None}, TypeError, "`dtype` must be a floating dtype"),
        ({"low": [3]}, ValueError, "must hold names of JAX primitives, got 3"),
        ({"low": ["exp"], "high": ["exp"]}, ValueError, "must not share names"),
    ],
)
def test_bad_settings_are_refused_before_the_first_call(settings, error, text):
    with pytest.raises(error, match=text):
        ols.autocast(dot_loss, **settings)


def test_an_argument_that_is_not_a_function_is_refused():
    with pytest.raises(TypeError, match="`fun` must be a function"):
        ols.autocast(X)
