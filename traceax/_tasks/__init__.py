"""What `python -m traceax` does with a matrix. (Floor 6; uses what users use.)

A task is an operator, the estimators that fit, front door first, and the exact answer where
dense linear algebra gives it soon. A new task is a function from a matrix and the options
to a `Task`, a line in `own`, and a flag in `traceax/_command/options.py`.
"""
