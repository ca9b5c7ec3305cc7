"""A pod's process: its environment, log lines, exit, and its sockets at the level of the operating system."""
