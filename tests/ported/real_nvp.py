"""A normalizing flow of images.

The public program is Distrax's `examples/flow.py` in google-deepmind/distrax. As there,
each coupling layer of Distrax has a network of Haiku that starts at zero, masks
alternate, and pixels get uniform noise. Here the layers are affine, as those of RealNVP
(Dinh et al., 2017), instead of splines, the images are scikit-learn's digits of 8 times
8 pixels with 17 levels, and the loss is in bits per pixel.
"""

import math

import distrax
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from helpers.ported import Ported, random_batches

IMAGES = load_digits().data.astype(np.float32)
PIXELS, LAYERS, WIDTH, BATCH, STEPS = 64, 4, 64, 64, 200


def affine(params):
    shift, log_scale = jnp.split(params, 2, axis=-1)
    return distrax.ScalarAffine(shift[..., 0], log_scale=jnp.tanh(log_scale[..., 0]))


def make_flow():
    layers = []
    for index in range(LAYERS):
        conditioner = hk.Sequential(
            [
                hk.nets.MLP([WIDTH, WIDTH], activate_final=True),
                hk.Linear(2 * PIXELS, w_init=jnp.zeros, b_init=jnp.zeros),
                hk.Reshape((PIXELS, 2)),
            ]
        )
        mask = jnp.arange(PIXELS) % 2 == index % 2
        layers.append(distrax.MaskedCoupling(mask, conditioner, affine))
    # From a pixel between 0 and 17 to about the range of the normal distribution.
    standardize = distrax.Block(distrax.ScalarAffine(-8.5 / 5, 1 / 5), 1)
    base = distrax.MultivariateNormalDiag(jnp.zeros(PIXELS), jnp.ones(PIXELS))
    return distrax.Transformed(
        base, distrax.Inverse(distrax.Chain([*layers, standardize]))
    )


@hk.without_apply_rng
@hk.transform
def log_prob(images):
    return make_flow().log_prob(images)


def loss_fn(params, key, images):
    images = images + jax.random.uniform(key, images.shape)
    return -jnp.mean(log_prob.apply(params, images)) / (PIXELS * math.log(2))


class Program(Ported):
    falls_to = 0.7

    def __init__(self, half):
        super().__init__(half)
        self.tx = self.loss_scaled(optax.adam(3e-3))
        self.loss_fn = self.autocast(loss_fn)

    def init(self, seed):
        key, init_key = jax.random.split(jax.random.key(seed))
        params = log_prob.init(init_key, IMAGES[:1])
        return {"params": params, "opt_state": self.tx.init(params), "key": key}

    def batches(self, seed):
        return random_batches(seed, STEPS, BATCH, IMAGES)
