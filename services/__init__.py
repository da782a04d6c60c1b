"""What runs: one folder per service."""
