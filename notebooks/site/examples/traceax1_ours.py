import jax
import jax.numpy as jnp
import lineax as lx
import traceax as tx

matrix = jnp.diag(jnp.arange(1.0, 201.0) ** -2) + 0.01
operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
key = jax.random.key(0)

estimate = tx.xtrace(operator, key, 60)
value, error = estimate.value, estimate.standard_error
other = tx.hutchinson_trace(operator, key, 60, sampler=tx.sphere).value
print(value, other)
