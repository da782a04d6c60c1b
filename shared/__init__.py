"""What the services agree on."""
