# SPDX-License-Identifier: Apache-2.0
"""A regression on a table: prices of houses from numbers and a category."""

import keras
import numpy as np
import pandas as pd

CITIES = ["Bergen", "Oslo", "Trondheim"]


def table(records: int, seed: int) -> pd.DataFrame:
    """Make a table. Replace it by yours: `pd.read_parquet("houses.parquet")`."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"rooms": rng.integers(1, 9, records), "age": rng.uniform(0, 80, records)})
    frame["city"] = rng.choice(CITIES, records)
    frame["price"] = frame["rooms"] - frame["age"] / 40 + 2 * (frame["city"] == "Oslo")
    return frame


def model() -> keras.Model:
    """Build and compile the model: one input for each column, by its name."""
    rooms = keras.Input((1,), name="rooms")
    age = keras.Input((1,), name="age")
    city = keras.Input((1,), name="city", dtype="int64")
    one_hot = keras.layers.CategoryEncoding(len(CITIES), output_mode="one_hot")(city)
    columns = keras.layers.concatenate([rooms, keras.layers.Rescaling(1 / 40)(age), one_hot])
    hidden = keras.layers.Dense(32, activation="relu")(columns)
    model = keras.Model({"rooms": rooms, "age": age, "city": city}, keras.layers.Dense(1)(hidden))
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"])
    return model


def data(split: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the columns, float32 or int64 [records, 1], and the prices, float32 [records, 1].

    Args:
        split: "train", or "validation" for the records that are held out.
    """
    frame = table(8_000, seed=0) if split == "train" else table(1_000, seed=1)
    frame["city"] = pd.Categorical(frame["city"], CITIES).codes
    kinds = {"rooms": "float32", "age": "float32", "city": "int64", "price": "float32"}
    columns = {name: frame[name].to_numpy(kind)[:, None] for name, kind in kinds.items()}
    return {name: columns[name] for name in ("rooms", "age", "city")}, columns["price"]
