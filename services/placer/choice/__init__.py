"""Which devices of one node a pod gets, or why they do not fit."""
