"""The client for programs with an event loop. `backstay_client.blocking` offers the same names to all others."""
