"""A pod's process: its environment, its log lines, how it ends, and its sockets as the operating system sees them."""
