"""The Kubernetes API, for the master and for the command line.

api       requests and watches over HTTP, with good manners
watch     a part of its objects, kept up to date
"""
