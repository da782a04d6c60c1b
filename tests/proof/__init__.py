"""The invariants, and the decoding of what they are judged by; for the model and the campaign."""
