"""Test equipment: tiny random checkpoints, clips, and a real server to run them in.

It ships with the package, so that the demo and the benchmarks need no download.
Nothing in here is a model.
"""
