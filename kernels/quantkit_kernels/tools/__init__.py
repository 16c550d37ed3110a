"""Tools for the kernels: compiled ahead of time and judged, measured beside other libraries, tuned."""
