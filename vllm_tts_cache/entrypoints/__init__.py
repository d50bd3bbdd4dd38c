"""What runs in the API process, and the command line."""
