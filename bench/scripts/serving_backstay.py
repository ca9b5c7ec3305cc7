"""A server of `backstay.serve` for bench/serve.py."""

import numpy as np
from serving_model import arguments, predict

import backstay

if __name__ == "__main__":
    folder, port, batch, width = arguments()
    example, ports = np.zeros(width, np.float32), backstay.ServingPorts(http=port, grpc=0)
    backstay.serve(predict, checkpoint=folder, example=example, batch=batch, ports=ports)
