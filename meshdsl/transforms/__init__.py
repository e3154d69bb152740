"""Transformations of functions and graphs: gradients, products with derivatives, and `md.vmap`."""
