"""Other libraries' signatures over the operators of attnzoo_kernels."""
