"""What pods request, by which claims, and where it would be placed."""
