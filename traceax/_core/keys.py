"""Keys of samples, blocks and estimates, by arithmetic."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PRNGKeyArray, UInt32

# Odd numbers, by whose multiples the two words of the keys of samples, of the keys of
# blocks, and of the keys of several estimates, differ.
SAMPLES, BLOCKS = (0x9E3779B9, 0x85EBCA6B), (0xC2B2AE35, 0x27D4EB2F)
ESTIMATES = 0x165667B1, 0xD3A2646D


def keys_of(
    key: PRNGKeyArray, count: int, steps: tuple[int, int] = SAMPLES
) -> Key[Array, " count"] | UInt32[Array, "count words"]:
    """Return a key of its own for each of several samples, blocks or estimates.

    To split a key takes a round of the generator, which compiles to ten loops. But streams
    of threefry are independent for any two keys that differ (Salmon, Moraes, Dror and Shaw
    2011, doi:10.1145/2063384.2063405), so multiples of odd numbers are added to both words
    of the key. No multiple is zero, so a sample does not repeat what is drawn from the key
    itself. The keys of other generators are split.
    """
    if jax.random.key_impl(key) != "threefry2x32":
        return jax.random.split(key, count)
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    words = jax.random.key_data(key) if typed else key
    multiples = np.outer(np.arange(1, count + 1), steps).astype(np.uint32)
    words = words[None, :] + multiples
    return jax.random.wrap_key_data(words, impl="threefry2x32") if typed else words
