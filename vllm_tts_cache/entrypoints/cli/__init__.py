"""The command line: ``vllm-tts-cache``."""
