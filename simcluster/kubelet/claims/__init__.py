"""Dynamic resource allocation: drivers, prepared ResourceClaims, and what they give containers."""
