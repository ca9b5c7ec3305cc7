"""The client for programs without an event loop, and for notebooks, which have one that must not be blocked."""
