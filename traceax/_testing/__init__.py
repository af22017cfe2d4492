"""What tests are made of, those of users and our own. (Floor 7; may use every other wing.)

Matrices of known spectra (`matrices`), one matrix in the clothes of every operator class
(`clothes`), the strategy that draws from both (`operators`), and the checks of what users
write: an operator, a sampler, an estimator. `traceax.testing` opens them to the public, and
nobody else comes here. A new check is a room; a new class of operators a line in `clothes`.
"""
