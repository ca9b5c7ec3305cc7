"""The tests of the embedded cluster are a package, so that no test imports the folder `operator` above it."""
