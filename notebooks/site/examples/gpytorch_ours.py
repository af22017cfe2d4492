import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import traceax as tx

jax.config.update("jax_enable_x64", True)
points = jnp.array(np.random.default_rng(0).uniform(size=(600, 2)))
squared = jnp.sum((points[:, None] - points) ** 2, axis=-1)
y = jnp.sin(6 * points[:, 0])


def loss(length):
    kernel = jnp.exp(-squared / 2 / length**2)
    space = jax.ShapeDtypeStruct(y.shape, y.dtype)
    tag = lx.positive_semidefinite_tag
    operator = lx.FunctionLinearOperator(lambda v: kernel @ v, space, tag)
    fit = tx.inv_quad_logdet(operator, y, jax.random.key(0), shift=0.01)
    return (fit.inv_quad.value + fit.logdet.value) / 2


print(*jax.value_and_grad(loss)(0.3))
