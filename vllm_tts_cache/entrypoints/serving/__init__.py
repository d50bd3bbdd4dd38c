"""Our serving classes and adapters, which replace the host's, and fixes of the host."""
