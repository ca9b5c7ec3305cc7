"""The `backstay` command, which tries a TrainingJob on this machine as it would run on a cluster."""

from backstay_cli import interrupts

interrupts.end_imports_quietly()
