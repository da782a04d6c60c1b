"""The program that runs the tests of `tests/hardware` on a real GPU."""
