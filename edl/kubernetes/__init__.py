# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes API, for the master and for the command line.

kubeconfig   the cluster to use, and the credentials
exec_plugin  tokens from a kubeconfig's plugin
client       requests, watches and logs over HTTP, with rate limits
rate_limit   pauses after failures, and the budget of writes
timing       all durations and rates towards the API
informer     a cache of selected objects, kept up to date
texts        texts that fit into an object
names        names of the objects of a release
pods         the labels and the status of a worker's pod
overrides    manual requests to a release
"""
