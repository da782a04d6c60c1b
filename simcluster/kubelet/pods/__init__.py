"""The pods of one kubelet: admission, workers, statuses, events."""
