import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

import backstay

digits = load_digits()
images = (digits.data / 16).astype("float32")  # (1797, 64)
labels = digits.target.astype("int32")  # (1797,)


def init(key):
    return {"w": jax.random.normal(key, (64, 10)) * 0.01, "b": jnp.zeros(10)}


def loss(params, batch):
    x, y = batch
    logits = x @ params["w"] + params["b"]
    accuracy = (logits.argmax(-1) == y).mean()
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
    return loss, {"accuracy": accuracy}


if __name__ == "__main__":
    result = backstay.train(
        init=init,
        loss=loss,
        batches=backstay.from_dataset((images, labels), batch_size=32),
        optimizer=optax.adam(1e-2),
        steps=300,
    )
    print(f"trained {result.step} updates, loss {result.loss:.3f}")
