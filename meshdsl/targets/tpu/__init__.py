"""The TPU compiler: its tiles, the order of its loops, and programs as it needs them."""
