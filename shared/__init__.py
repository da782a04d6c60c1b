"""Code that several services share."""
