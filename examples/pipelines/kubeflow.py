# SPDX-License-Identifier: Apache-2.0
"""Train a model as a component of Kubeflow Pipelines: `kfp dsl compile --py kubeflow.py --output x.yaml`."""

from kfp import dsl

IMAGE = "registry.example.org/team/edl-steps:1"  # edl, Helm, and the chart in /chart
STEPS = """
helm install "$0" /chart --set "$1"
edl wait --release "$0" --timeout 2h
mkdir -p "$(dirname "$2")"
edl model get --release "$0" "$2"
edl audit --release "$0"
"""


@dsl.container_component
def train(release: str, values: str, model: dsl.Output[dsl.Model]):
    return dsl.ContainerSpec(image=IMAGE, command=["sh", "-euc", STEPS], args=[release, values, model.path])


@dsl.container_component
def remove(release: str):
    return dsl.ContainerSpec(image=IMAGE, command=["helm", "uninstall"], args=[release, "--ignore-not-found"])


@dsl.pipeline(name="edl")
def pipeline(release: str = "nightly", values: str = "priorityClass.create=false,workers=4"):
    with dsl.ExitHandler(remove(release=release)):
        train(release=release, values=values)
