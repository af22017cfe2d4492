"""What `python -m traceax` reads and prints. (Floor 1; uses nothing of ours.)

Matrix files, checked before they are believed, and tables of results. A new file format
goes to `matrix`; what is done with it stands in `traceax/__main__.py`.
"""
