"""Samplers: functions that draw probes, random vectors z with E[z z*] = I.

`hadamard` draws signs without replacement. A Hadamard matrix H of order m has entries of
modulus 1 and orthogonal columns. Draw k of its rows r without replacement, restrict them to
the first n columns, and multiply each column by a random sign:

    z_r = d o H[r, :n],      sum over all m rows of z_r* A z_r = m tr A   for any signs d.

Given d, the samples z_r* A z_r are drawn from a finite population with mean tr A. So their
mean has the variance of a survey, which is (m - k)/(m - 1) times the variance with
independent signs. This holds term by term, because
E (1/k sum_r H_ra H_rb)^2 = (m - k)/(k (m - 1)) for every pair a != b, and the signs of
different pairs are uncorrelated. Like independent signs, these probes are exact for
diagonal operators. The matrix is Sylvester's, which has a power of 2 as its order:
H_rc = (-1)^(number of ones that r and c have in common in binary).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Inexact, PRNGKeyArray, PyTree

from traceax._core.checks import (
    are_arrays,
    check_callable,
    check_count,
    check_key,
    require,
    require_type,
    written,
)
from traceax._core.keys import keys_of
from traceax._core.vectors import Structure, common_dtype, dimension, unflatten_rows
from traceax._linalg import lapack
from traceax._linalg.basis import orthonormalise
from traceax._linalg.columns import dot, over, times

Probes = PyTree[Inexact[Array, "..."]]
SamplerLike = Callable[[PRNGKeyArray, Structure, int], Probes]
LARGE = 2**20  # from so many numbers on, each device draws its own part of a block


@dataclass(eq=False)
class Sampler:
    """A function that draws probes, with the properties that estimators use.

    `tx.rademacher`, `tx.normal`, `tx.sphere`, `tx.orthogonal` and `tx.hadamard` are
    samplers. A plain function can be passed as a sampler, too. Then estimators only assume
    that E[z z*] = I.

    **Arguments**

    - `draw`: a function `draw(key, structure, num_probes)` that returns vectors with the
      given structure, and a leading axis of `num_probes` on every leaf. It is traced.
    - `rotation_invariant`: whether the distribution of a probe does not change under
      rotations. Then estimators may rescale projected probes to their expected length
      ("resphering"), which makes `xtrace` exact for multiples of I. Default `False`.
    - `independent`: whether each sample may be drawn with a key of its own. Then `draw` is
      called for one sample at a time (under `jax.vmap`), and estimators may draw samples in
      batches. The first probes are then the same for any number of samples from two on. A
      single sample is drawn with the key itself, and is a different one. Default `False`.
    - `group`: the number of probes that make one sample. The sum of their z z* has the mean
      `group` times I, as with the colours of `probing`. Default 1.
    - `population`: a function that maps n to the size of the population, if probes are
      drawn without replacement. Default `None`, which means that they are drawn with
      replacement.

    **Returns** a sampler. Call it as `sampler(key, structure, num_probes)`. The same key
    and sampler give the same probes in every function of this library.

    **Example**

        >>> import jax, traceax as tx
        >>> def doubled(key, structure, num_probes):
        ...     return jax.tree.map(lambda z: -z, tx.sphere(key, structure, num_probes))
        >>> sampler = tx.Sampler(doubled, rotation_invariant=True)
        >>> operator = tx.as_operator(lambda v: 3 * v, 100)
        >>> print(tx.xtrace(operator, jax.random.key(0), 20, sampler=sampler).value.round())
        300.0

    **Reference**: Epperly, Tropp and Webber (2024), section 2.3,
    [doi:10.1137/23M1548323](https://doi.org/10.1137/23M1548323).

    **See also**: `probing`, and `check_sampler` in `traceax.testing`.
    """

    draw: SamplerLike
    _: KW_ONLY
    rotation_invariant: bool = False
    independent: bool = False
    group: int = 1
    population: Callable[[int], int] | None = None

    def __post_init__(self) -> None:
        _check_draw("Sampler", "draw", self.draw)
        # `help` then shows a sampler as the function, and as its name if it is a default.
        functools.update_wrapper(self, self.draw, updated=())
        self.__name__ = getattr(self.draw, "__name__", type(self.draw).__name__)

    def __call__(self, key: PRNGKeyArray, structure: Structure, num_probes: int) -> Probes:
        check_key(self.__name__, key)
        num_probes = check_count(self.__name__, "num_probes", num_probes, 1)
        count, rest = divmod(num_probes, self.group)
        if not self.independent or count == 1 or rest:
            return self.draw(key, structure, num_probes)
        keys = keys_of(key, count)
        samples = jax.vmap(lambda key: self.draw(key, structure, self.group))(keys)
        return jax.tree.map(lambda x: x.reshape(num_probes, *x.shape[2:]), samples)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        # `inspect` and `help` treat an object that has this method as a function.
        return self

    def __repr__(self) -> str:
        return self.__name__

    def __reduce__(self) -> Any:
        return self.__name__


class PlainSampler(Sampler):
    """A sampler made of a user's own function, about which nothing is known."""


def _check_draw(name: str, argument: str, draw: object) -> None:
    cure = "Pass traceax.rademacher or traceax.probing(colours)."
    check_callable(name, argument, draw, "(key, structure, num_probes) -> probes", cure, 3)


def as_sampler(name: str, sampler: Any) -> Sampler:
    """Return the sampler that the user gave, or make one of a plain function.

    A `functools.partial` of either of them keeps its properties. `name` is the public
    function that errors name.
    """
    if isinstance(sampler, Sampler):
        return sampler
    if not isinstance(sampler, functools.partial):
        _check_draw(name, "sampler", sampler)
        return PlainSampler(sampler)
    inner = as_sampler(name, sampler.func)
    if not sampler.args and not sampler.keywords:
        return inner
    kept: dict[str, Any] = {f.name: getattr(inner, f.name) for f in fields(Sampler)}
    kept["draw"] = functools.partial(inner.draw, *sampler.args, **sampler.keywords)
    return PlainSampler(**kept) if isinstance(inner, PlainSampler) else Sampler(**kept)


def hadamard_order(n: int) -> int:
    """Return the order of the Hadamard matrix for n dimensions."""
    return 1 << (n - 1).bit_length()


def space(name: str, structure: Structure) -> tuple[int, jnp.dtype]:
    """Return the dimension and the dtype of the vectors that are drawn.

    They are split into leaves after the draw, so that a probe does not depend on how the
    space is split.
    """
    fits = are_arrays(structure, "real or complex numbers")
    must = "be a pytree of jax.ShapeDtypeStruct of real or complex dtypes"
    cure = "Pass operator.in_structure(), or jax.ShapeDtypeStruct((n,), float)."
    require_type(fits, name, "structure", must, written(structure), cure)
    return dimension(structure), common_dtype(structure)


@functools.partial(Sampler, independent=True)
def rademacher(key: PRNGKeyArray, structure: Structure, num_probes: int) -> PyTree[Array]:
    """Draw probes of independent random signs, or random phases (Steinhaus) if complex.

    Every entry has modulus 1, so the trace of a diagonal operator is exact from one probe.
    The variance of one quadratic form z* A z is 2 ||off(A)||_F^2 for a real symmetric A,
    and ||off(A)||_F^2 for complex probes, with off(A) for A without its diagonal.

    **Arguments** (details are in the guide's conventions)

    - `key`: one JAX random key, for example `jax.random.key(0)`.
    - `structure`: the space of the probes, a pytree of `jax.ShapeDtypeStruct`, for example
      `operator.in_structure()`.
    - `num_probes`: the number of probes, an int of at least 1.

    **Returns** the probes, with the given structure and a leading axis of `num_probes` on
    every leaf.

    **Cost**: one random bit for each entry, or one random number if it is complex.

    **Example**

        >>> import jax, traceax as tx
        >>> structure = jax.ShapeDtypeStruct((5,), jax.numpy.float32)
        >>> tx.rademacher(jax.random.key(0), structure, 3).shape
        (3, 5)

    **Reference**: Girard (1989), Numerische Mathematik 56. Hutchinson (1989),
    [doi:10.1080/03610918908812806](https://doi.org/10.1080/03610918908812806).

    **See also**: `sphere`, `hadamard`, `hutchinson_trace`.
    """
    n, dtype = space("rademacher", structure)
    return unflatten_rows(_signs(key, n, num_probes, dtype), structure)


@functools.partial(Sampler, rotation_invariant=True, independent=True)
def normal(key: PRNGKeyArray, structure: Structure, num_probes: int) -> PyTree[Array]:
    """Draw probes of independent standard normal entries, with E|z|^2 = 1 if complex.

    The variance of one quadratic form z* A z is 2 ||A||_F^2 for a real symmetric A, and
    ||A||_F^2 for complex probes. Because the length of these probes is random, they are
    never better than `sphere`.

    **Arguments** (details are in the guide's conventions)

    - `key`: one JAX random key, for example `jax.random.key(0)`.
    - `structure`: the space of the probes, a pytree of `jax.ShapeDtypeStruct`, for example
      `operator.in_structure()`.
    - `num_probes`: the number of probes, an int of at least 1.

    **Returns** the probes, with the given structure and a leading axis of `num_probes` on
    every leaf.

    **Cost**: one float32 number for each entry.

    **Example**

        >>> import jax, traceax as tx
        >>> structure = jax.ShapeDtypeStruct((5,), jax.numpy.float32)
        >>> tx.normal(jax.random.key(0), structure, 3).shape
        (3, 5)

    **Reference**: Girard (1989), Numerische Mathematik 56.

    **See also**: `sphere`, `rademacher`.
    """
    n, dtype = space("normal", structure)
    return unflatten_rows(_gaussian(key, n, num_probes, dtype), structure)


@functools.partial(Sampler, rotation_invariant=True, independent=True)
def sphere(key: PRNGKeyArray, structure: Structure, num_probes: int) -> PyTree[Array]:
    """Draw probes uniformly from the sphere of radius sqrt(n).

    n is the number of entries of the whole pytree. The distribution of a probe is invariant
    under rotations, so estimators may rescale projected probes to their expected length
    ("resphering"). The variance of one quadratic form z* A z for a real symmetric A is
    2n/(n+2) (||A||_F^2 - |tr A|^2/n), which is 0 for multiples of I.

    **Arguments** (details are in the guide's conventions)

    - `key`: one JAX random key, for example `jax.random.key(0)`.
    - `structure`: the space of the probes, a pytree of `jax.ShapeDtypeStruct`, for example
      `operator.in_structure()`.
    - `num_probes`: the number of probes, an int of at least 1.

    **Returns** the probes, with the given structure and a leading axis of `num_probes` on
    every leaf.

    **Cost**: one float32 number for each entry.

    **Example**

        >>> import jax, traceax as tx
        >>> structure = jax.ShapeDtypeStruct((5,), jax.numpy.float32)
        >>> probes = tx.sphere(jax.random.key(0), structure, 3)
        >>> bool(jax.numpy.allclose((probes**2).sum(1), 5.0))
        True

    **Reference**: Epperly, Tropp and Webber (2024), section 2.3,
    [doi:10.1137/23M1548323](https://doi.org/10.1137/23M1548323).

    **See also**: `rademacher`, `orthogonal`, `xtrace`.
    """
    n, dtype = space("sphere", structure)
    rows = _gaussian(key, n, num_probes, dtype)
    rows = times(rows, math.sqrt(n) / jnp.linalg.norm(rows, axis=1, keepdims=True))
    return unflatten_rows(rows, structure)


@functools.partial(Sampler, rotation_invariant=True, population=lambda n: n)
def orthogonal(key: PRNGKeyArray, structure: Structure, num_probes: int) -> PyTree[Array]:
    """Draw probes that are sqrt(n) times uniformly distributed (Haar) orthonormal columns.

    Each probe is uniform on the sphere. Because the probes are orthogonal, the variance of
    a Hutchinson mean is multiplied by (n - num_probes)/(n - 1). The probes are dependent.

    **Arguments** (details are in the guide's conventions)

    - `key`: one JAX random key, for example `jax.random.key(0)`.
    - `structure`: the space of the probes, a pytree of `jax.ShapeDtypeStruct`, for example
      `operator.in_structure()`.
    - `num_probes`: the number of probes, an int of at least 1 and at most n.

    **Returns** the probes, with the given structure and a leading axis of `num_probes` on
    every leaf.

    **Cost**: one single-precision number for each entry, and 4 to 9 n num_probes^2 flops
    for an orthonormal basis.

    **Example**

        >>> import jax, traceax as tx
        >>> structure = jax.ShapeDtypeStruct((5,), jax.numpy.float32)
        >>> probes = tx.orthogonal(jax.random.key(0), structure, 3)
        >>> bool(jax.numpy.allclose(probes @ probes.T, 5.0 * jax.numpy.eye(3), atol=1e-5))
        True

    **Reference**: Mezzadri (2007), Notices of the AMS 54(5).

    **See also**: `sphere`, `hadamard`, `hutchinson_trace`.
    """
    n, dtype = space("orthogonal", structure)
    must, cure = f"be at most {n}, the dimension", "Draw fewer, or use traceax.sphere."
    require(num_probes <= n, "orthogonal", "num_probes", must, num_probes, cure)
    basis = orthonormalise(_gaussian(key, n, num_probes, dtype).T)
    turn, triangle = lapack.qr(basis.factor)
    diagonal = jnp.diagonal(triangle)
    turn = turn * over(math.sqrt(n) * diagonal, jnp.abs(diagonal))[None, :]
    return unflatten_rows(dot(basis.columns, turn).T, structure)


@functools.partial(Sampler, population=hadamard_order)
def hadamard(key: PRNGKeyArray, structure: Structure, num_probes: int) -> PyTree[Array]:
    """Draw rows of a Hadamard matrix with random signs, without replacement.

    If leaves are complex, the signs are replaced by random phases. The order m of the
    matrix is the least power of 2 that is at least n. The variance of a Hutchinson mean is
    (m - num_probes)/(m - 1) times the variance with `rademacher`, and the trace of a
    diagonal operator is exact, too. These probes help if their number is a good part of the
    dimension. They are dependent.

    **Arguments** (details are in the guide's conventions)

    - `key`: one JAX random key, for example `jax.random.key(0)`.
    - `structure`: the space of the probes, a pytree of `jax.ShapeDtypeStruct`, for example
      `operator.in_structure()`.
    - `num_probes`: the number of probes, an int of at least 1 and at most m.

    **Returns** the probes, with the given structure and a leading axis of `num_probes` on
    every leaf.

    **Cost**: one random bit for each dimension, a random order of m rows, and one sign for
    each entry.

    **Example**

        >>> import jax, traceax as tx
        >>> structure = jax.ShapeDtypeStruct((16,), jax.numpy.float32)
        >>> probes = tx.hadamard(jax.random.key(0), structure, 3)
        >>> print(probes @ probes.T)
        [[16.  0.  0.]
         [ 0. 16.  0.]
         [ 0.  0. 16.]]

    **Reference**: Bekas, Kokiopoulou and Saad (2007),
    [doi:10.1016/j.apnum.2007.01.003](https://doi.org/10.1016/j.apnum.2007.01.003).

    **See also**: `rademacher`, `orthogonal`, `divergence`.
    """
    n, dtype = space("hadamard", structure)
    order = hadamard_order(n)
    must = f"be at most {order}, the order of the matrix for {n} dimensions"
    cure = "Draw fewer, or use traceax.rademacher."
    require(num_probes <= order, "hadamard", "num_probes", must, num_probes, cure)
    rows_key, signs_key = jax.random.split(key)
    rows = jax.random.permutation(rows_key, order)[:num_probes]
    common = rows[:, None] & jnp.arange(n)[None, :]
    signs = (1 - 2 * (jax.lax.population_count(common) & 1)).astype(dtype)
    draw = _phases if jnp.issubdtype(dtype, jnp.complexfloating) else jax.random.rademacher
    return unflatten_rows(signs * draw(signs_key, (1, n), dtype), structure)


def _signs(key: PRNGKeyArray, n: int, k: int, dtype: jnp.dtype) -> Inexact[Array, "k n"]:
    """Draw k rows of n random signs, or random phases if the dtype is complex."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return _phases(key, (k, n), dtype)
    # Each sign takes one random bit. With a random number for each, the draw would take ten
    # times as long.
    integers = _rows(jax.random.bits, key, k, -(-n // 32), jnp.uint32)
    bits = (integers[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None, :]) & 1
    return 1 - 2 * bits.reshape(k, -1)[:, :n].astype(dtype)


def _phases(key: PRNGKeyArray, shape: tuple[int, int], dtype: jnp.dtype) -> Array:
    """Draw complex numbers of modulus 1 with uniform random angles."""
    angles = 2 * math.pi * _rows(jax.random.uniform, key, *shape, jnp.finfo(dtype).dtype)
    return jax.lax.complex(jnp.cos(angles), jnp.sin(angles))


def _rows(draw: Callable, key: PRNGKeyArray, k: int, n: int, dtype: Any) -> Array:
    """Draw k rows of n numbers.

    Small blocks are drawn as one long vector, which has the same numbers and compiles
    faster. But a device cannot draw its part of a vector if the part is cut along n, so
    large blocks are drawn in their own shape.
    """
    return draw(key, (k, n) if k * n >= LARGE else (k * n,), dtype).reshape(k, n)


def _gaussian(key: PRNGKeyArray, n: int, k: int, dtype: jnp.dtype) -> Inexact[Array, "k n"]:
    """Draw k rows of n normal numbers.

    They are drawn in single precision, which takes half the time of double precision. No
    estimate shows the difference. The branch of `cond` is always taken, for all keys of a
    batch at once. It keeps the compiler from computing the normal numbers again for each of
    their uses.
    """
    single = jnp.complex64 if jnp.issubdtype(dtype, jnp.complexfloating) else jnp.float32
    drawn = functools.partial(_rows, jax.random.normal, k=k, n=n, dtype=single)

    def chosen(draw: Callable[[Array], Array], keys: Array) -> Array:
        always = jnp.ravel(jax.random.key_data(keys))[0] | 1 != 0
        like = jax.eval_shape(draw, keys)
        return jax.lax.cond(always, draw, lambda _: jnp.zeros_like(like), keys)

    one = custom_vmap(functools.partial(chosen, drawn))
    one.def_vmap(lambda _, __, keys: (chosen(jax.vmap(drawn), keys), True))
    return one(key).astype(dtype)
