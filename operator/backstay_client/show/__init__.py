"""Shows jobs to people: lines, a bar, curves, and HTML for notebooks. Nothing here prints by itself."""
