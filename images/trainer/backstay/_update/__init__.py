"""An update, computed: trees of parameters, partition into shards and blocks, update rules, kernels, engine."""
