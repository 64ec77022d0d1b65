"""The shared library of the plain Triton kernels. It knows no variant: variants add hooks."""
