"""Tensors between workers and servers: the transport interface, the rules of a stream, and TCP as transport."""
