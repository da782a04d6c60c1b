"""What the ledger stores and its scripts answer, as bytes and arrays: encoding and decoding."""
