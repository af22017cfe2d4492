"""Side-by-side measurements against matfree 0.6.3. Run by hand, not by pytest."""

import os

# Two OpenBLAS threads that wait for each other on a busy machine take a hundred times as
# long over a QR as one. It reads this when it is loaded, so before JAX is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
