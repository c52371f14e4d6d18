"""Level 2: one differentiable function per operation of the library."""
