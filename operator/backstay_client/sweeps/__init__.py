"""Searches for the best arguments by trials, which are ordinary TrainingJobs, with Optuna."""
