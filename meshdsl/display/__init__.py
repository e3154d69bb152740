"""Text for people: numbers with units, colours, and HTML of notebooks."""
