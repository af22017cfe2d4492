import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import traceax as tx

jax.config.update("jax_enable_x64", True)
rng = np.random.default_rng(0)


def draw(*shape):
    return jnp.array(rng.normal(size=shape))


x, y = draw(50, 4), draw(50, 1)
weights = draw(20, 4), draw(20), draw(1, 20) / 5, draw(1)


def loss(weights, args):
    w1, b1, w2, b2 = weights
    return jnp.mean((jnp.tanh(x @ w1.T + b1) @ w2.T + b2 - y) ** 2)


hessian = lx.JacobianLinearOperator(jax.grad(loss), weights, tags=lx.symmetric_tag)
key = jax.random.key(0)
print(tx.xtrace(hessian, key, 60).value, tx.hutchinson_trace(hessian, key, 60).value)
