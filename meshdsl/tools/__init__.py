"""What people and outside programs use: commands, pictures, the demo, and compilers that check programs."""
