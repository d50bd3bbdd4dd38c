"""The CPU platform that vLLM-Omni itself does not ship."""
