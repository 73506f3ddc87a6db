from browsers import browser  # noqa: F401 - a fixture
