"""What kubectl shows about pods and nodes: conditions and core/v1 Events."""
