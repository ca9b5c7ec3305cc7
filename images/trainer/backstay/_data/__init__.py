"""The training data of workers: batch keys, data sets and iterators as functions of a key, prefetching."""
