"""The host's serving classes and adapters with ours in their place, and its fixes."""
