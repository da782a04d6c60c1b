"""The copy of nodes, devices and leases that the placer decides on."""
