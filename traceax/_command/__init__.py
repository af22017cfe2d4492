"""What `python -m traceax` reads and prints. (Floor 1; uses nothing of ours.)

Options, matrix files, checked before they are believed, their eigenvalues, and results as
tables or JSON. A new file format is a room, with a function from paths to a `claim`, and a
line in `files`; what is done with a matrix stands in `traceax/_tasks`.
"""
