"""Parses requests and answers them: routes, forms, models, limits, callers."""
