# SPDX-License-Identifier: Apache-2.0
"""The names of ElasticDL's flags, by what edl does with them. `elasticdl_flags` translates their values."""

from __future__ import annotations

# Names of the years before, and today's.
OLDER = {
    "--num_epoch": "--num_epochs",
    "--num_worker": "--num_workers",
    "--train_data_dir": "--training_data",
    "--training_data_dir": "--training_data",
    "--evaluation_data_dir": "--validation_data",
    "--dataset_fn": "--feed",
    "--records_per_task": "--num_minibatches_per_task",
    "--record_per_task": "--num_minibatches_per_task",
    "--codec_type": "--codec_type",
    "--image_base": "--image_base",
}
VALUES = {  # the value that a flag sets, as it is
    "--validation_data": "data.validation",
    "--prediction_data": "data.predict",
    "--training_data": "data.train",
    "--evaluation_steps": "evaluation.steps",
    "--checkpoint_dir": "checkpoint.dir",
    "--checkpoint_steps": "checkpoint.steps",
    "--keep_checkpoint_max": "checkpoint.keep",
    "--checkpoint_dir_for_init": "initFrom.path",
    "--get_model_steps": "ps.pullSteps",
    "--lr_staleness_modulation": "ps.scaleRateByStaleness",
    "--image_pull_policy": "image.pullPolicy",
    "--master_pod_priority": "master.priorityClassName",
    "--ps_pod_priority": "ps.priorityClassName",
    "--relaunch_on_worker_failure": "elastic.maxFailures",
}
FUNCTIONS = {  # a name in the user's module, and ElasticDL's default
    "feed": "feed",
    "loss": "loss",
    "optimizer": "optimizer",
    "callbacks": "callbacks",
    "eval_metrics_fn": "eval_metrics_fn",
    "custom_data_reader": "custom_data_reader",
    "prediction_outputs_processor": "PredictionOutputsProcessor",
}
NO_MEANING = {
    "--num_minibatches_per_task": "workers share each step; no tasks are handed out",
    "--codec_type": "feed() of the model parses the records",
    "--log_loss_steps": "the loss is in the status and in the log at all times",
    "--relaunch_timeout_worker": "a worker that hangs is always replaced (elastic.stepTimeoutSeconds)",
    "--force_use_kube_config_file": "Helm reads the kubeconfig",
    "--extra_pypi_index": "packages are installed by `edl elasticdl zoo build`",
    "--worker_id": "the master numbers its workers",
    "--job_type": "the subcommand says it: train, evaluate or predict",
}
ONLY = {  # flags that mean nothing with this value, and are refused with a different one
    "--restart_policy": ("never", "the master replaces workers itself"),
    "--task_fault_tolerance": ("true", "the records of a lost worker are always trained by the others"),
    "--need_elasticdl_job_service": (
        "true",
        "for your own training loop: edl run --script (docs/custom-loops.md)",
    ),
    "--need_pod_manager": ("true", "the master always manages the workers"),
    "--need_task_manager": ("true", "the master always divides the records"),
    "--need_tf_config": ("false", "edl does not use TensorFlow's own parameter servers"),
}
REFUSED = {
    "--job_command": "for your own script: edl horovod (docs/coming-from-horovod.md) or edl run --script",
    "--populate_env_names": "name the variables: --envs, or --set with worker.envFrom",
    "--log_file_path": "read the logs with edl logs --follow, or kubectl logs",
    "--max_step": "edl trains whole epochs: --num_epochs",
    "--aux_params": "edl always replaces lost workers",
    "--master_addr": "a worker by itself: edl worker --master HOST:PORT (its master: edl master)",
    "--port": "a master by itself: edl master --listen HOST:PORT",
    "--ps_id": "the chart starts parameter servers: --num_ps_pods",
}
PODS = ("master", "worker", "ps")
OTHERS = [
    "--job_name",
    "--namespace",
    "--image_name",
    "--worker_image",
    "--image_base",
    "--docker_image_prefix",
    "--repository",
    "--model_zoo",
    "--model_def",
    "--model_file",
    "--data_reader_params",
    "--num_epochs",
    "--minibatch_size",
    "--num_workers",
    "--grads_to_wait",
    "--use_async",
    "--sync_version_tolerance",
    "--num_ps_pods",
    "--distribution_strategy",
    "--output",
    "--volume",
    "--worker_pod_priority",
    "--envs",
    "--cluster_spec",
    "--cluster_spec_json",
    "--yaml",
    "--log_level",
]
RESOURCES = [f"--{pod}_resource_{kind}" for pod in PODS for kind in ("request", "limit")]
OLD_RESOURCES = [
    f"--{pod}_{what}_{kind}" for pod in PODS for what in ("cpu", "memory") for kind in ("request", "limit")
]
KNOWN = sorted(
    {*OLDER, *OLDER.values(), *VALUES, *NO_MEANING, *ONLY, *REFUSED, *OTHERS, *RESOURCES, *OLD_RESOURCES}
    | {f"--{name}" for name in FUNCTIONS}
)
