"""MIG: instances, layouts, their reconciler, and the privileged partitioner with its protocol."""
