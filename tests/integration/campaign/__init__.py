"""The campaign's proxies and clocks, on real sockets and processes."""
