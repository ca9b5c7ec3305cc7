"""A Kubernetes cluster in one process tree, with an API server in memory and a kubelet that runs pods as processes.

With it, the operator works in one way only: on a laptop it uses this cluster, elsewhere a real one. This package does
not depend on TrainingJobs.
"""
