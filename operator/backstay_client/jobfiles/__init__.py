"""TrainingJobs from files, and from scripts with options; their errors."""
