from tests.catalogues import engine, pytest_generate_tests  # noqa: F401
