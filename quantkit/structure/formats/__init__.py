"""How families of models write tool calls: one file a format, its parser beside its grammar."""
