# SPDX-License-Identifier: Apache-2.0
"""The command lines in ElasticDL's documents, and the cluster_spec of the one for clusters on premises."""

PUBLIC_CLOUD = """
  --image_name=gcr.io/project/elasticdl:mnist
  --model_zoo=model_zoo
  --model_def=mnist_functional_api.mnist_functional_api.custom_model
  --training_data=/data/mnist/train
  --validation_data=/data/mnist/test
  --num_epochs=5
  --master_resource_request="cpu=2,memory=2048Mi"
  --master_resource_limit="cpu=2,memory=2048Mi"
  --master_pod_priority=high
  --worker_resource_request="cpu=2,memory=2048Mi"
  --worker_resource_limit="cpu=2,memory=2048Mi"
  --worker_pod_priority=low
  --ps_resource_request="cpu=2,memory=2048Mi"
  --ps_resource_limit="cpu=2,memory=2048Mi"
  --ps_pod_priority=high
  --minibatch_size=64
  --num_minibatches_per_task=64
  --num_ps_pods=2
  --num_workers=4
  --evaluation_steps=200
  --grads_to_wait=1
  --job_name=test-mnist
  --log_level=INFO
  --image_pull_policy=Always
  --volume="mount_path=/data,claim_name=fileserver-claim"
  --distribution_strategy=ParameterServerStrategy
"""
ON_PREM_JOB = """
 --model_def=mnist_functional_api.mnist_functional_api.custom_model
 --training_data=/data/mnist/train
 --validation_data=/data/mnist/test
 --num_epochs=2
 --master_resource_request="cpu=1,memory=2048Mi,ephemeral-storage=5000Mi"
 --worker_resource_request="cpu=1,memory=2048Mi,ephemeral-storage=5000Mi"
 --minibatch_size=64
 --num_minibatches_per_task=2
 --num_workers=2
 --checkpoint_steps=10
 --grads_to_wait=2
 --job_name=test-mnist
 --log_level=INFO
 --image_pull_policy=Always
 --namespace=kubemaker
"""
ON_PREM = (
    "--image_base=elasticdl:ci --docker_image_prefix=reg.docker.com/user/ --model_zoo=./model_zoo"
    + ON_PREM_JOB
)
PREBUILT = "--image_base=reg.docker.com/user/elasticdl:mnist --model_zoo=/model_zoo" + ON_PREM_JOB
GKE = """
    --job_name={priority}-prio-job
    --model_file=elasticdl/python/examples/mnist_functional_api.py
    --train_data_dir=/data/mnist/train
    --master_pod_priority=high-priority
    --worker_pod_priority={priority}-priority
    --num_epoch=1
    --minibatch_size=10
    --record_per_task=100
    --num_worker={workers}
    --master_cpu_request=1000m
    --master_cpu_limit=1000m
    --master_memory_request=1024Mi
    --master_memory_limit=1024Mi
    --worker_cpu_request=3000m
    --worker_cpu_limit=3000m
    --worker_memory_request=4096Mi
    --worker_memory_limit=4096Mi
    --grads_to_wait=2
    --codec_type=bytes
    --repository=gcr.io
    --image_base=gcr.io/elasticdl/elasticdl:dev
"""
DEVELOPMENT = """
          --model_file=elasticdl/python/examples/mnist_functional_api.py
          --job_name=test
          --training_data_dir=/data/mnist/train
          --evaluation_data_dir=/data/mnist/test
          --records_per_task=100
          --num_epochs=2
          --codec_type=tf_example
          --grads_to_wait=2
          --minibatch_size=10
          --log_level=INFO
"""
SPEC = """
from kubernetes import client

class MyCluster:
    def __init__(self):
        self._pool = "elasticdl"
        self._app_name = "elasticdl"

    def with_pod(self, pod):
        pod.metadata.labels["my_app"] = self._app_name
        tolerations = [
            client.V1Toleration(
                effect="NoSchedule",
                key="mycluster.com/app-pool",
                operator="Equal",
                value=self._pool ,
            ),
        ]
        pod.spec.tolerations = tolerations
        return pod

    def with_service(self, service):
        service.spec.type = "ClusterIP"
        service.spec.cluster_ip = "None"
        return service

cluster = MyCluster()
"""
