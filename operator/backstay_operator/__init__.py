"""The operator: watches TrainingJobs with Kopf, and makes the cluster look as `backstay_spec.plan` says it should.

Nothing here decides what a job needs; the pure planner does. This package is the adapter between that function and a
Kubernetes API server: what is observed goes in, what is planned comes out as API calls (promises O1-O8).
"""
