"""The Kubernetes API, for the master and for the command line.

config    which cluster, and as whom
api       requests, watches and logs over HTTP, with good manners
watch     a part of its objects, kept up to date
names     of a release's objects
pods      what a worker's pod says of itself
asked     what people ask of a release by hand
"""
