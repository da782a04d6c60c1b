"""The index of nodes by free capacity: kept up to date, queried per request."""
