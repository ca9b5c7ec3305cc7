"""Defines the TrainingJob by types, rules, pod manifests, plan and status. Pure."""
