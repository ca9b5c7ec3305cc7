"""A Kubernetes that fits in one process tree: an API server in memory and a kubelet that runs pods as processes.

It exists so that the operator has one way of working: on a laptop it talks to this cluster, elsewhere to a real one.
Nothing in here knows what a TrainingJob is.
"""
