"""Names, units, errors, devices, requests, leases and events; standard library only."""
