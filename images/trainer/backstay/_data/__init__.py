"""What workers train on: the key of a batch, data sets and iterators as functions of it, batches prepared ahead."""
