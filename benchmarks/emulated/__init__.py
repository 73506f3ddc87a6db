"""Pipeline devices that sleep instead of computing, and the runtimes that drive them."""
