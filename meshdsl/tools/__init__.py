"""The command line, pictures, the demo, and readers of the texts of compilers."""
