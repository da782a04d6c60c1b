"""The kubelet's interface to plugins that it finds by their registration sockets, v1."""
