"""Measures ours beside stock vLLM-Omni in one run: ``python -m benchmarks``."""
