# SPDX-License-Identifier: Apache-2.0
"""Ray's TensorflowTrainer with two workers, as Ray's guide has it: the strategy's scope in each of them."""

import ray
from ray.train import ScalingConfig
from ray.train.tensorflow import TensorflowTrainer


def train() -> None:
    import tensorflow as tf
    from the_model import BATCH, EPOCHS, data, model

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        built = model()
    built.fit(*data("train"), batch_size=BATCH, epochs=EPOCHS, verbose=0)


ray.init("local", num_cpus=3, include_dashboard=False)
TensorflowTrainer(train, scaling_config=ScalingConfig(num_workers=2)).fit()
print("trained")
