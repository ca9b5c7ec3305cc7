"""The computation of a worker between a pull and a push: loss and gradient of a batch, on the process's devices."""
