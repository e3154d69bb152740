"""Pictures of shardings and programs as SVG, for notebooks and documents; `md.show` makes them."""
