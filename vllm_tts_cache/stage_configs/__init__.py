"""Deploy configurations, each with the reason for every value that is not a default."""

from pathlib import Path

FOLDER = Path(__file__).parent
