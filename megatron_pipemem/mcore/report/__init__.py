"""Report the measurements of a run and its predictions."""
