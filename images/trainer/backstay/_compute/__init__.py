"""What a worker computes between a pull and a push: loss and gradient of a batch, over the devices of its process."""
