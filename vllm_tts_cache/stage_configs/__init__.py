"""Deploy configurations, each with the reason for every value that is not a default."""
