"""Makes and publishes a release: `python -m tools.release --help`."""
