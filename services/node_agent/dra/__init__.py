"""The DRA driver: ResourceSlices of the node, and ResourceClaims that its pods use."""
