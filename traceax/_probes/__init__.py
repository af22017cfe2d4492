"""Random vectors z with E[z z*] = I. (Layer 2; uses `_core` and `_linalg`.)

Samplers, colourings for sparse operators, probing with them and what it tells of its own
error, and how a budget becomes probes, drawn at once or in batches (`stream`).
A new sampler is a module, as `hadamard` is; what estimators must know of it (may it be
resphered, is it independent) stands in `draw`.
"""
