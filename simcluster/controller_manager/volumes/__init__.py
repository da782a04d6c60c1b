"""Storage: the controllers of claims and volumes, and a provisioner; no volume holds data."""
