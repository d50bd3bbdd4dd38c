"""Test equipment: tiny random checkpoints, and a real server to run them in."""
