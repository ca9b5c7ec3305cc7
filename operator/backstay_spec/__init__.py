"""The TrainingJob: types, rules, pod manifests, plan and status. Pure."""
