"""The shared library of the Hopper kernels, written in Gluon. It knows no variant: variants add hooks."""
