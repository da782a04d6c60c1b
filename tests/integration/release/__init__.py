"""Tests of the files of a release, and of what a dry run does."""
