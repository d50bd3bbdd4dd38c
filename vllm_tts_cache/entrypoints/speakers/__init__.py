"""Looks speakers up, registers, encodes and deletes them; warms their KV."""
