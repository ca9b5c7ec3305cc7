"""How tensors travel between workers and servers: the transport seam, the rules of a stream, and Arrow Flight under it.

Nothing here imports pyarrow until a stream is opened, so that pure modules may import `seam`.
"""
