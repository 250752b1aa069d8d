"""Pictures as SVG files, and traces that a browser opens. What they show is decided elsewhere."""
