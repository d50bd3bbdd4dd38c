"""The registry: who is registered under which name, and with which audio."""
