"""The package `edl`. Tool configuration is in pyproject.toml, pinned versions in requirements.lock.

Horovod is not listed: scripts/setup builds it with our patches.
"""

from setuptools import find_packages, setup

setup(
    name="edl",
    version="0.2.0",
    description="Elastic training of Keras models on Horovod",
    license="Apache-2.0",
    python_requires=">=3.11,<3.14",
    classifiers=[f"Programming Language :: Python :: {version}" for version in ("3.11", "3.12", "3.13")],
    packages=find_packages(include=["edl", "edl.*"]),
    entry_points={"console_scripts": ["edl = edl.cli:main"]},
    # What the master and the command line need; an image of the master has no TensorFlow.
    install_requires=[
        "aiohttp>=3.13",
        "fsspec>=2026.9",
        "grpcio>=1.85",
        "httpx2>=2.16",
        "lightkube>=1.0.1",
        "prometheus-client>=0.26",
        "protobuf>=7.36",
        "psutil>=7",
        "pydantic>=2.14",
        "pyyaml>=6",
        "rich>=15",
        "structlog>=26",
        "typer>=0.29",
        "typing-extensions>=4.16",
    ],
    extras_require={
        "s3": ["s3fs>=2026.9"],  # for the commands about checkpoints at s3://...
        # The trained model as ONNX: export.formats and `edl export` (docs/export.md).
        "onnx": ["onnx>=1.23", "onnxruntime>=1.32", "tf2onnx>=1.17"],
        # Parameter servers, in the image of the master.
        "ps": ["numba>=0.62", "numpy>=2.4", "xxhash>=3.6"],
        "worker": [
            "cloudpickle>=3",  # Horovod imports it
            "keras>=3.15",
            "numpy>=2.4",
            "pyarrow>=26",
            "s3fs>=2026.9",  # checkpoints at s3://...
            "scikit-learn>=1.9",
            "tensorflow-cpu>=2.21",
            "xxhash>=3.6",
        ],
    },
)
