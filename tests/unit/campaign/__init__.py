"""The campaign's schedule, readers and judge."""
