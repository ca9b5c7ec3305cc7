"""Logs of pods, and the records that a job leaves: its history and its timeline."""
