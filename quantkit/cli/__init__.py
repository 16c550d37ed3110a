"""The command line: thin click commands, one file each, imported when they are called."""
