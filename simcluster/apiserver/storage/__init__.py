"""The object store: versions, watches, write rules and persistence."""
