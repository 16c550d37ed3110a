"""Interactive charts: Vega-Lite specifications, made with altair."""
