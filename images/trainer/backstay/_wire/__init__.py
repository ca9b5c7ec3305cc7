"""Tensors between workers and servers: the transport interface, the rules of a stream, and Arrow Flight as transport.

Nothing here imports pyarrow until a stream is opened, so that pure modules may import `seam`.
"""
