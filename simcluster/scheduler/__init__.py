"""The default scheduler, for pods without devices."""
