"""Read a row of digits with convolutions, two LSTMs and the CTC loss, in Haiku.

After `examples/vision/captcha_ocr.py` of keras-team/keras-io, with rows of two to four
digits of scikit-learn as captchas, one bidirectional layer, and Optax's `ctc_loss`.
That function needs `full_precision`: it writes log(0) as -100000, and picks the results
with a matrix product, where -100000 would be minus infinity in float16.
"""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import optax_lossscale as ols

LONGEST, WIDTH, BLANK = 4, 8, 0  # Zero is the blank of `optax.ctc_loss`.
BATCH, STEPS = 32, 200
FALLS_TO, LOW_SHARE = 0.4, 0.5
OPTIMIZER = optax.adam(5e-3)


@hk.transform
def network(images):
    features = images[..., None]
    for channels in (16, 32):
        features = jax.nn.relu(hk.Conv2D(channels, 3)(features))
        features = hk.max_pool(features, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    columns = features.transpose(2, 0, 1, 3)  # Time comes first.
    columns = columns.reshape(*columns.shape[:2], -1)
    columns = hk.dropout(hk.next_rng_key(), 0.2, jax.nn.relu(hk.Linear(32)(columns)))
    both = []
    for reverse in (False, True):
        lstm = hk.LSTM(32)
        start = lstm.initial_state(columns.shape[1])
        both.append(hk.dynamic_unroll(lstm, columns, start, reverse=reverse)[0])
    return hk.Linear(11)(jnp.concatenate(both, axis=-1)).swapaxes(0, 1)


def loss_fn(params, key, batch):
    logits = network.apply(params, key, batch["images"])
    columns = jnp.arange(logits.shape[1])
    used = batch["lengths"][:, None] * logits.shape[1] // LONGEST
    logit_paddings = jnp.where(columns < used, 0.0, 1.0)
    label_paddings = jnp.where(batch["labels"] == BLANK, 1.0, 0.0)
    ctc_loss = ols.full_precision(optax.ctc_loss)
    return ctc_loss(logits, logit_paddings, batch["labels"], label_paddings).mean()


def init(key):
    return jax.jit(network.init)(key, jnp.zeros((1, 8, LONGEST * WIDTH)))


def batches(seed):
    rng = np.random.default_rng(seed)
    drawn, values = load_digits(return_X_y=True)
    drawn, values = np.float32(drawn / 16).reshape(-1, 8, 8), np.int32(values)

    def batch():
        lengths = rng.integers(2, LONGEST + 1, size=BATCH)
        rows = rng.integers(len(drawn), size=(BATCH, LONGEST))
        used = np.arange(LONGEST) < lengths[:, None]
        images = np.where(used[..., None, None], drawn[rows], 0)
        images = images.swapaxes(1, 2).reshape(BATCH, 8, LONGEST * WIDTH)
        labels = np.where(used, values[rows] + 1, BLANK)
        return {"images": images, "labels": labels, "lengths": lengths}

    return [batch() for _ in range(STEPS)]
