"""What the API returns and the commands read: the types of `/api/v1` and of `-o json`."""
