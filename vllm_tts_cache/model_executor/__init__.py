"""What runs inside vLLM-Omni's workers and engine cores."""
