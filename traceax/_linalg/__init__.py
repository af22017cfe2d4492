"""Linear algebra of tall blocks, and of what is small. (Layer 1; uses nothing of ours.)

Arithmetic of columns, orthonormal bases and their downdates, Nyström factors, Krylov
spaces and what they precondition, conjugate gradients, standard errors. Nothing here knows
of operators, probes or estimates: a map is a function of blocks. A new factorisation goes
here, and a new kind of error bar to `jackknife`.
"""
