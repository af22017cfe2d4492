"""What leaves a process: pytrees of ours that `jax.export` may write.

It writes a pytree if it is told how to write what is static in each of its nodes; of an
Estimate nothing is, so there is nothing to write, and all that are read are alike.
"""

from __future__ import annotations

from typing import TypeVar

import equinox as eqx
import jax
from jax import export

Kind = TypeVar("Kind", bound=type[eqx.Module])


def exportable(example: eqx.Module) -> None:
    """Register the class of `example`, which has no static field."""
    kind = type(example)
    node = jax.tree.structure(example).node_data()
    assert node is not None
    export.register_pytree_node_serialization(
        kind,
        serialized_name=f"traceax.{kind.__name__}",
        serialize_auxdata=lambda _: b"",
        deserialize_auxdata=lambda _: node[1],
    )
