"""The leasehold command."""
