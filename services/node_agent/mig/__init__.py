"""MIG: layouts, instances and the partitioner."""
