# SPDX-License-Identifier: Apache-2.0
"""Programs beside the worker, which commands of edl start.

check_model        edl check: a trial of a model and its data
convert_data       edl data convert
export_checkpoint  edl model export: the model of a checkpoint
"""
