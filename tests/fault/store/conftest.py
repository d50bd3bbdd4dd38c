from tests.catalogues import (  # noqa: F401  fixtures and a hook of all that follow
    engine,
    pytest_generate_tests,
)
