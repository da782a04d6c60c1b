"""Tools for development; nothing here is installed."""
