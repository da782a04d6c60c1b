"""The stages of admission, each from a pod to a denial, changes, or nothing; pure."""
