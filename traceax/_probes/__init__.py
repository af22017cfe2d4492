"""Random vectors z with E[z z*] = I. (Layer 2; uses `_core` and `_linalg`.)

Samplers, colourings of sparse operators and probing with them, and how a budget becomes
probes (`draw`), at once or in batches (`stream`).
"""
