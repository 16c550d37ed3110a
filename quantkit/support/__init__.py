"""What every room stands on: errors, progress, paths, units, JSON and YAML from strangers, isolated
processes."""
