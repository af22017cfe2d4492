"""What `python -m traceax` reads and prints. (Floor 1; uses nothing of ours.)

Matrix files, checked before they are believed, and tables of results. A new file format is
a room, with a function from paths to a `claim`, and a line in `files`; what is done with a
matrix stands in `traceax/__main__.py`.
"""
