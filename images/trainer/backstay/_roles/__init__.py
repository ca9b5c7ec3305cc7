"""The lifecycles of a pod: worker, parameter server, standby, evaluator; and training in one process."""
