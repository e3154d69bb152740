"""Scripts that compare meshdsl with hand-written steps, GSPMD, other compilers and published results."""
