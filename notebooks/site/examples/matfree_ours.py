import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import traceax as tx

jax.config.update("jax_enable_x64", True)
points = jnp.array(np.random.default_rng(0).uniform(size=(600, 2)))
squared = jnp.sum((points[:, None] - points) ** 2, axis=-1)
space = jax.ShapeDtypeStruct((600,), points.dtype)
tag = lx.positive_semidefinite_tag


def logdet(length):
    kernel = jnp.exp(-squared / 2 / length**2)
    operator = lx.FunctionLinearOperator(lambda v: kernel @ v, space, tag)
    return tx.logdet(operator, jax.random.key(0), 240, shift=0.01).value


print(*jax.value_and_grad(logdet)(0.3))
