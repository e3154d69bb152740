"""What each compiler does with a kernel, a loop's stack and a collective: one file or folder for each platform."""
