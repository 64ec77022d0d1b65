"""The operators of attnzoo_kernels under the signatures of other libraries."""
