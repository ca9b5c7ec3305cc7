"""A plain server with FastAPI for bench/serve.py."""

import jax
import numpy as np
import uvicorn
from fastapi import FastAPI
from serving_model import arguments, predict

import backstay

folder, port, _, _ = arguments()
found = backstay.load(folder)
params = jax.device_put(found.params)
compiled = jax.jit(predict)
app = FastAPI()


@app.get("/v2/health/ready")
def ready():
    return {"ready": True}


@app.post("/v2/models/model/infer")
def infer(body: dict):
    given = body["inputs"][0]
    x = np.asarray(given["data"], np.float32).reshape(given["shape"])
    out = jax.device_get(compiled(params, None, x))
    outputs = [{"name": name, "data": array.ravel().tolist()} for name, array in out.items()]
    return {"model_version": str(found.step), "outputs": outputs}


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
