"""A Keras 3 model that Keras's `fit` trains. Install keras."""

import os

os.environ["KERAS_BACKEND"] = "jax"
import keras
import numpy as np
from keras import layers

import optax_lossscale as ols

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        layers.Conv2D(16, 3, padding="same", use_bias=False),
        layers.BatchNormalization(),
        layers.ReLU(),
        layers.GlobalAveragePooling2D(),
        layers.Dense(2),
    ]
)
model.stateless_call = ols.autocast(model.stateless_call)

adam = keras.optimizers.Adam(1e-2)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.LossScaleOptimizer(adam), loss)
labels = np.arange(512) % 2
images = np.random.default_rng(0).normal(labels, size=(1, 8, 8, 512)).T
losses = model.fit(images, labels, batch_size=32, epochs=5, verbose=0).history["loss"]
print(f"loss {losses[-1]:.2f}, scale {float(model.optimizer.dynamic_scale):.0f}")
# loss 0.01, scale 32768
