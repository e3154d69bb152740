"""Example models written with meshdsl; each module defines workloads for the command line."""
