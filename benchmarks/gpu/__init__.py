"""The measurement of a machine with a GPU: `make gpu`, or `python -m benchmarks.gpu`."""
