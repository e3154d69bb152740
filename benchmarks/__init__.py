"""Scripts that measure a step against the same step written by hand; each prints JSON lines."""
