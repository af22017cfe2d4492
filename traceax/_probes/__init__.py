"""Random vectors z with E[z z*] = I. (Layer 2; uses `_core` and `_linalg`.)

`samplers` draws them, and has the properties of a sampler that estimators use. `colouring`
colours the dimensions of sparse operators, and `probing` draws a probe for each colour.
`draw` makes blocks of probes and has the default choices. `stream` draws them in batches.
"""
