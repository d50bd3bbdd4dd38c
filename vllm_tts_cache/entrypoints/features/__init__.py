"""What clients of other servers expect; each can be cut with its line in `attach`."""
