"""MPS: a control daemon for each container whose shares it holds."""
