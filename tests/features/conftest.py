"""Where the catalogues of features' tests are, for those that say so."""

from tests.catalogues import engine, open_here, pytest_generate_tests  # noqa: F401
