"""A server with LitServe for bench/serve.py."""

import jax
import litserve
import numpy as np
from serving_model import arguments, predict

import backstay

folder, port, batch, _ = arguments()


class LitServeApi(litserve.LitAPI):
    def setup(self, device):
        self.params = jax.device_put(backstay.load(folder).params)
        self.compiled = jax.jit(predict)

    def decode_request(self, request):
        return np.asarray(request["inputs"][0]["data"], np.float32)

    def predict(self, x):
        x = x if batch > 1 else x[None]
        padded = np.zeros((batch, x.shape[1]), np.float32)
        padded[: len(x)] = x
        out = jax.device_get(self.compiled(self.params, None, padded))
        rows = [{name: array[row] for name, array in out.items()} for row in range(len(x))]
        return rows if batch > 1 else rows[0]

    def encode_response(self, output):
        return {"outputs": [{"name": name, "data": array.ravel().tolist()} for name, array in output.items()]}


if __name__ == "__main__":
    api = LitServeApi(max_batch_size=batch, batch_timeout=0.005, api_path="/v2/models/model/infer")
    litserve.LitServer(api, accelerator="cpu").run(port=port, log_level="warning", generate_client_file=False)
