"""The watcher: what the API server says, as events."""
