"""Calibration: which text, what it measures, and the layer-by-layer run that measures it."""
