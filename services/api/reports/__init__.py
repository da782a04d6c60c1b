"""What is reported over time."""
