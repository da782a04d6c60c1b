"""The REST interface of the timekeeper."""
