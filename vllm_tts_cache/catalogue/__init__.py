"""The catalogue: SQL rows of speakers, stored files, deletions and participants."""
