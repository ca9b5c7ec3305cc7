"""A worker that pushes half of a gradient and then waits to be killed: run as a separate process."""

from __future__ import annotations

import sys

import numpy as np
from certificates import credentials_of

from backstay._transport import frames
from backstay._transport._streams._tcp import ClientStream
from backstay_rpc.control_pb2 import Frame, GradientId, Hello, Part, PushBegin

address, token, certificates, hello_hex, gradient_hex, size = sys.argv[1:]
nbytes = int(size)
stream = ClientStream(address, Hello.FromString(bytes.fromhex(hello_hex)), credentials_of(token, certificates))
# As a real worker does.
stream.write(frames.pull(0))
while True:
    received = stream.read()
    assert received is not None
    if frames.kind_of(received[0]) in {"end", "params_begin"} and (
        frames.kind_of(received[0]) == "end" or received[0].params_begin.whole
    ):
        break
gradient = GradientId.FromString(bytes.fromhex(gradient_hex))
stream.write(Frame(push_begin=PushBegin(part=Part(contribution=gradient), bytes=nbytes)))
data = np.ones(nbytes, np.uint8)
for frame, (_, start, stop) in frames.first_chunks([nbytes], nbytes // 4)[:2]:
    stream.write(frame, data[start:stop])
print("half", flush=True)
sys.stdin.read()
