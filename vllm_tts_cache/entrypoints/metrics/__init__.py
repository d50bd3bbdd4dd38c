"""What an API process shows to Prometheus, at the host's own ``/metrics``."""
