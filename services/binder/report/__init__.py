"""What pods and nodes show: conditions and core/v1 Events."""
