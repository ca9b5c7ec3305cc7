"""The state of a job at one moment, its reasons, and its pods."""
