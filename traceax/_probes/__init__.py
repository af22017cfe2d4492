"""Random vectors z with E[z z*] = I. (Layer 2; uses `_core` and `_linalg`.)

Samplers, colourings for sparse operators (`colouring`, of `graph`s, by `lattices` or
`greedy`; what they tell of their error: `witnesses`), and how a budget becomes probes,
drawn at once or in batches. A new sampler is a module, as `hadamard` is; what estimators
must know of it (may it be resphered, is it independent) stands in `traits`.
"""
