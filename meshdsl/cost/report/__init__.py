"""Output of an evaluated program for people: text, HTML, comparisons, explanations, traces."""
