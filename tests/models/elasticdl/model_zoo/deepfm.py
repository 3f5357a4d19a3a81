# SPDX-License-Identifier: Apache-2.0
"""In the form of ElasticDL's deepfm_functional_api: operations of TensorFlow on symbolic tensors, outputs and
metrics by name, a learning rate by model version, a reader and a processor of its own."""

import tensorflow as tf
import tensorflow.keras.backend as K
from elasticdl.python.data.reader.data_reader import AbstractDataReader
from elasticdl.python.elasticdl.callbacks import LearningRateScheduler
from elasticdl.python.elasticdl.layers.embedding import Embedding
from elasticdl.python.worker.prediction_outputs_processor import BasePredictionOutputsProcessor
from tensorflow.keras.layers import Dense, Flatten, Layer, Multiply, Subtract


class ApplyMask(Layer):
    def __init__(self, **kwargs):
        self.supports_masking = True
        super().__init__(**kwargs)

    def compute_mask(self, input, input_mask=None):
        return None

    def call(self, x, mask=None):
        return Multiply()([x, tf.cast(K.expand_dims(mask, -1), tf.float32)])

    def compute_output_shape(self, input_shape):
        return input_shape


def custom_model(input_dim=20, embedding_dim=4, input_length=5):
    inputs = tf.keras.Input(shape=(input_length,))
    layer = Embedding(embedding_dim, input_dim=input_dim, mask_zero=True, input_length=input_length)
    embeddings = layer(inputs)
    embeddings = ApplyMask()(embeddings)
    emb_sum_square = K.square(K.sum(embeddings, axis=1))
    emb_square_sum = K.sum(K.square(embeddings), axis=1)
    second_order = K.sum(0.5 * Subtract()([emb_sum_square, emb_square_sum]), axis=1)
    deep = tf.reshape(Dense(1)(Flatten()(embeddings)), shape=(-1,))
    logits = tf.keras.layers.Add()([second_order, deep])
    probs = tf.reshape(tf.sigmoid(logits), shape=(-1, 1))
    return tf.keras.Model(inputs=inputs, outputs={"logits": logits, "probs": probs})


def loss(labels, predictions):
    labels = tf.cast(tf.reshape(labels, [-1]), tf.dtypes.float32)
    logits = tf.reshape(predictions["logits"], [-1])
    return tf.reduce_mean(input_tensor=tf.nn.sigmoid_cross_entropy_with_logits(logits=logits, labels=labels))


def optimizer(lr=0.1):
    return tf.optimizers.SGD(lr)


def feed(dataset, mode, metadata):
    names = metadata.column_names

    def _parse_data(*columns):
        row = dict(zip(names, columns, strict=True))
        features = {"feature": tf.cast(row["ids"], tf.float32)}
        return features if mode == "prediction" else (features, tf.cast(row["label"], tf.int32))

    return dataset.map(_parse_data)


def eval_metrics_fn():
    return {
        "logits": {
            "accuracy": lambda labels, predictions: tf.equal(
                tf.cast(tf.reshape(predictions, [-1]) > 0.0, tf.int32),
                tf.cast(tf.reshape(labels, [-1]), tf.int32),
            )
        },
        "probs": {"auc": tf.keras.metrics.AUC()},
    }


def callbacks():
    def _schedule(model_version):
        return 0.5 if model_version < 2 else 0.2

    return [LearningRateScheduler(_schedule)]


class Reader(AbstractDataReader):
    def __init__(self, data_origin, shards):
        super().__init__()
        with open(data_origin) as file:
            self.rows = [list(map(int, line.split(","))) for line in file]
        self.size = -(-len(self.rows) // shards)

    def create_shards(self):
        starts = range(0, len(self.rows), self.size)
        return [(f"from {start}", start, min(self.size, len(self.rows) - start)) for start in starts]

    def read_records(self, task):
        for *ids, label in self.rows[task.shard.start : task.shard.end]:
            yield ids, label

    @property
    def records_output_types(self):
        return tf.int64, tf.int64

    @property
    def metadata(self):
        from elasticdl.python.data.reader.data_reader import Metadata

        return Metadata(column_names=["ids", "label"])


def custom_data_reader(data_origin, records_per_task=None, **kwargs):
    return Reader(data_origin, **kwargs)


SEEN = []


class PredictionOutputsProcessor(BasePredictionOutputsProcessor):
    def __init__(self):
        self.seen = SEEN

    def process(self, predictions, worker_id):
        assert worker_id == 0
        self.seen += predictions["probs"].numpy().ravel().tolist()
