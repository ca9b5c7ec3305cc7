"""What a TrainingJob is, and what follows from one: types, rules, pod manifests, plan and status. Pure."""
