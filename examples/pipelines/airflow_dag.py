# SPDX-License-Identifier: Apache-2.0
"""Train a model as a task of Airflow 3, which runs in a pod of the cluster."""

from datetime import timedelta

from airflow.providers.cncf.kubernetes.operators.pod import KubernetesPodOperator
from airflow.sdk import DAG

POD = {
    "image": "registry.example.org/team/edl-steps:1",  # edl, Helm, the AWS CLI, and the chart in /chart
    "namespace": "team",
    "service_account_name": "edl-pipeline",  # with the ClusterRole admin in this namespace
}
STEPS = """
helm install nightly /chart --set priorityClass.create=false,workers=4
edl wait --release nightly
edl model get --release nightly model.keras
edl audit --release nightly
aws s3 cp model.keras s3://my-bucket/models/nightly.keras
"""

with DAG("edl", schedule="@daily", catchup=False):
    train = KubernetesPodOperator(
        task_id="train", cmds=["sh", "-euc", STEPS], execution_timeout=timedelta(hours=2), **POD
    )
    remove = KubernetesPodOperator(
        task_id="remove",
        cmds=["helm", "uninstall", "nightly", "--ignore-not-found"],
        trigger_rule="all_done",
        **POD,
    )
    train >> remove
