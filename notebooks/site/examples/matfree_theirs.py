import jax
import jax.numpy as jnp
import numpy as np
from matfree import decomp, funm, stochtrace

jax.config.update("jax_enable_x64", True)
points = jnp.array(np.random.default_rng(0).uniform(size=(600, 2)))
squared = jnp.sum((points[:, None] - points) ** 2, axis=-1)

sampler = stochtrace.sampler_sphere(jnp.zeros(600), num=12)
tridiagonal = decomp.tridiag_sym(20, reortho="full", custom_vjp=True)
integrand = funm.monte_carlo_funm_sym_logdet(tridiagonal)
estimate = stochtrace.estimator_monte_carlo(integrand, sampler)


def logdet(length):
    kernel = jnp.exp(-squared / 2 / length**2) + 0.01 * jnp.eye(600)
    return estimate(lambda v, kernel: kernel @ v, jax.random.key(0), kernel)


print(*jax.value_and_grad(logdet)(0.3))
