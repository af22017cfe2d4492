import jax
import jax.numpy as jnp
import lineax as lx
import traceax as tx

matrix = jnp.diag(jnp.arange(1.0, 201.0) ** -2) + 0.01
operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
key = jax.random.key(0)

value, statistics = tx.XTraceEstimator().estimate(key, operator, 60)
error = statistics["std.err"]
other, _ = tx.HutchinsonEstimator(tx.SphereSampler()).estimate(key, operator, 60)
print(value, other)
