"""How loops walk their data: one module per schedule, a function from a loop to its kernels."""
