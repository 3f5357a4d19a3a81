"""The Kubernetes API, for the master and for the command line.

kubeconfig   which cluster, and as whom
exec_plugin  tokens from a kubeconfig's plugin
client       requests, watches and logs over HTTP, with good manners
rate_limit   pauses after failures, and the budget of writes
timing       every span of time towards the API
informer     a part of its objects, kept up to date
texts        that fit into an object
names        of the objects of a release
pods         what a worker's pod says of itself
overrides    what people ask of a release by hand
"""
