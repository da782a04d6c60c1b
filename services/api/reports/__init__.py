"""What is reported over time: histories, finished pods, costs and metrics."""
