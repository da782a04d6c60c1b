"""Support for tests of the webhook."""
