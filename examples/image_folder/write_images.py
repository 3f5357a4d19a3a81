# SPDX-License-Identifier: Apache-2.0
"""Write a folder of images for each class: scikit-learn's handwritten digits, enlarged, as PNG.

python write_images.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits

SIZE = 16  # pixels

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    images, labels = load_digits(return_X_y=True)
    for number, (pixels, label) in enumerate(zip(images, labels, strict=True)):
        image = Image.fromarray((pixels.reshape(8, 8) * 15.9).astype("uint8"))
        (folder / str(label)).mkdir(parents=True, exist_ok=True)
        image.resize((SIZE, SIZE)).save(folder / str(label) / f"{number}.png")
