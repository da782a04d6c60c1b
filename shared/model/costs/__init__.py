"""What GPUs were used for, and what that cost."""
